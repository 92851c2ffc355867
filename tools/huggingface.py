"""Sparse prefill for Hugging Face decoders, by name: ``attn_implementation="sparse_prefill"``.

:func:`register` adds the name to transformers' attention interface. What the attention of a step needs beside queries, keys and
values travels as a keyword of the model call, which transformers hands through to every layer::

    register()
    model.set_attn_implementation("sparse_prefill")
    context = SparsePrefillContext.allocate(model.config, lengths=[2048, 1311], max_rows=1024, budget=64)
    position_ids = context.begin_step([700, 324])  # so many new tokens of each request
    model(input_ids=tokens, position_ids=position_ids, use_cache=False, sparse_prefill=context)

The region index is training-free. A model that was trained with an indexer has learned index keys and queries; here every KV
group indexes the keys it has: one index key per 8-token region, the region's mean key less the mean of all regions before it.
Subtracting that running mean removes the component that all keys share, which otherwise drowns the differences a selection
needs. It looks back only, so a region's index key never changes and later tokens never reach earlier ones. Keys are taken as
the attention sees them, rotary embedding applied, from the paged cache. The layer's own queries score the index, all heads of the
group with weight 1.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from sparse_prefill import (
    CompactPagedPrefill,
    FP4PrefillMetadata,
    PrefillMetadata,
    append_own_region,
    build_prefill_chunks,
    mark_unbacked_sizes,
    prefill_chunks,
    prepare_prefill_metadata,
    store_index_keys,
)

from .timing import Stopwatch

NAME = "sparse_prefill"
REGION = 8
INDEX_PAGE = 64
INDEX_DIM = 128

# What one layer's step is made of, in order.
STAGES = (
    "write cache, summarize",
    "store index keys",
    "stage, score, select",
    "regions and page ids",
    "attention over pages",
)


class Step(NamedTuple):
    """What the layers of one step share, on the device; made by :meth:`SparsePrefillContext.begin_step`.

    T rows, R requests of the context, M the most regions that one request completes in this step. Rows are grouped by request,
    in the context's order, and a request's rows are consecutive tokens.

    Attributes:
        positions: int32 [T], each row's position in its request.
        owners: int32 [T], each row's request.
        table: int32 [R, width], KV blocks of each request.
        kv_blocks, kv_offsets: int64 [T], the block of the KV cache and the token in it that a row's key and value go to.
        region_blocks, region_pages: int64 [R, M], where the regions completed in this step lie: KV block and 8-token page in
            it. Requests that complete fewer than M repeat place 0 behind their own.
        region_slots: int64 [R * M], the slot of each of them in the index cache, -1 behind a request's own.
        region_starts: int64 [R], regions that a request had completed before the step.
        region_counts: int64 [R], regions that it completes in the step.
        weights: bf16 [T, heads of a group], all 1.
        unselected: int32 [T, k], all -1: what a selection holds before anything is selected, k = budget - 1.
        index: the chunk plan of the index, see :func:`sparse_prefill.prepare_prefill_metadata`.
    """

    positions: torch.Tensor
    owners: torch.Tensor
    table: torch.Tensor
    kv_blocks: torch.Tensor
    kv_offsets: torch.Tensor
    region_blocks: torch.Tensor
    region_pages: torch.Tensor
    region_slots: torch.Tensor
    region_starts: torch.Tensor
    region_counts: torch.Tensor
    weights: torch.Tensor
    unselected: torch.Tensor
    index: FP4PrefillMetadata


@dataclass
class SparsePrefillContext:
    """Caches of a set of requests and the plan of the step in progress. Make one with :meth:`allocate`.

    Attributes:
        kv_caches: one a layer, [blocks, G, block_size, 2 * head_dim], keys then values, G KV groups.
        index_caches: [layer][group], uint8 [index blocks, 64, 68], MXFP4 index keys, one a region.
        region_sums: one a layer, float64 [R, G, head_dim], the sum of the mean keys of every completed region of a request.
        block_table: int32 [R, width], KV blocks of each request, on the host.
        index_table: int32 [R, width], index pages of each request, on the host.
        lengths: tokens each request will have; its blocks are reserved from the start.
        seen: tokens each request has, the step in progress included.
        budget: regions a row attends to, its own included.
        keep_first: so many of a request's first regions are always among them.
        keep_last: and so many before the row's own.
        scale: softmax scale.
        heads: query heads of a KV group.
        max_rows: tokens of the largest step.
        plan: page ids, lengths and queries of the step, shared by its layers and groups.
        step: the step in progress, None before the first.
        compiled: run the attention step through torch.compile.
        key_budget: the most index keys staged at once.
        projection: None, or fp32 [head_dim, 128] where head_dim exceeds the 128 elements of an index key: a fixed orthonormal
            basis that keys and queries are projected on before they are indexed. Heads up to 128 are padded with zeros instead.
        seconds: host time spent in the attention step so far, all layers together.
        watch: None, or a :class:`~sparse_prefill.tools.timing.Stopwatch` that times the stages; only where ``compiled`` is off.
        record: None, or a list that receives (layer, group, regions) of every layer and group, step by step; only where
            ``compiled`` is off.
    """

    kv_caches: list[torch.Tensor]
    index_caches: list[tuple[torch.Tensor, ...]]
    region_sums: list[torch.Tensor]
    block_table: torch.Tensor
    index_table: torch.Tensor
    lengths: tuple[int, ...]
    seen: list[int]
    budget: int
    keep_first: int
    keep_last: int
    scale: float
    heads: int
    plan: CompactPagedPrefill
    max_rows: int
    compiled: bool = True
    key_budget: int = 1 << 17
    projection: torch.Tensor | None = None
    step: Step | None = None
    seconds: float = 0.0
    watch: Stopwatch | None = None
    record: list[tuple[int, int, torch.Tensor]] | None = field(default=None, repr=False)

    @classmethod
    def allocate(
        cls,
        config: Any,
        lengths: Sequence[int],
        *,
        max_rows: int,
        budget: int,
        keep_first: int = 1,
        keep_last: int = 6,
        block_size: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        compiled: bool = True,
        shuffle_seed: int = 0,
    ) -> SparsePrefillContext:
        """Caches for ``lengths`` tokens of each request, and a plan for steps of at most ``max_rows`` tokens.

        Args:
            config: a transformers configuration: layers, query heads, KV heads and head_dim are read from it.
            lengths: tokens each request will have at most.
            max_rows: tokens of the largest step.
            budget: regions a row attends to, its own included; a row is dense while it has no more.
            keep_first, keep_last: regions always kept at a request's start, and right before a row's own. They count within the
                budget: keep_first + keep_last + 1 <= budget.
            block_size: tokens of a KV block, a multiple of 8.
            dtype: of queries, keys, values and the KV cache.
            compiled: see :class:`SparsePrefillContext`.
            shuffle_seed: blocks of different requests are interleaved in a random order of this seed, as in a long-lived cache.

        Raises:
            ValueError: an argument is not as above.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        layers, query_heads = text.num_hidden_layers, text.num_attention_heads
        groups = getattr(text, "num_key_value_heads", None) or query_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // query_heads
        if query_heads % groups:
            raise ValueError(f"config: {query_heads} query heads were over {groups} KV groups, must be a multiple")
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths was {list(lengths)}, must hold at least one length, each at least 1")
        if keep_first < 0 or keep_last < 0 or keep_first + keep_last + 1 > budget:
            raise ValueError(
                f"budget was {budget} with keep_first {keep_first} and keep_last {keep_last}, must be at least"
                " keep_first + keep_last + 1"
            )
        if max_rows < 1:
            raise ValueError(f"max_rows was {max_rows}, must be at least 1")
        if block_size < REGION or block_size % REGION:
            raise ValueError(f"block_size was {block_size}, must be a multiple of {REGION}")
        generator = torch.Generator().manual_seed(shuffle_seed)
        block_table, blocks = _shuffled_table([-(-n // block_size) for n in lengths], generator)
        index_table, index_blocks = _shuffled_table([-(-(n // REGION) // INDEX_PAGE) for n in lengths], generator)
        return cls(
            kv_caches=[torch.zeros(blocks, groups, block_size, 2 * dim, dtype=dtype, device=device) for _ in range(layers)],
            index_caches=[
                tuple(torch.zeros(index_blocks, INDEX_PAGE, 68, dtype=torch.uint8, device=device) for _ in range(groups))
                for _ in range(layers)
            ],
            region_sums=[torch.zeros(len(lengths), groups, dim, dtype=torch.float64, device=device) for _ in range(layers)],
            block_table=block_table,
            index_table=index_table,
            lengths=tuple(lengths),
            seen=[0] * len(lengths),
            budget=budget,
            keep_first=keep_first,
            keep_last=keep_last,
            scale=dim**-0.5,
            heads=query_heads // groups,
            plan=CompactPagedPrefill(None, max_rows=max_rows),
            max_rows=max_rows,
            compiled=compiled,
            projection=None if dim <= INDEX_DIM else _orthonormal(dim).to(device),
        )

    def begin_step(self, query_lens: Sequence[int]) -> torch.Tensor:
        """Plans the next step: the chunks of the index, where keys and values go, and the attention's pages.

        Args:
            query_lens: new tokens of each request, in order; 0 leaves a request out. The model gets the requests' tokens
                one after another, [1, sum(query_lens)].

        Returns:
            int64 [1, T], position_ids for the model.

        Raises:
            ValueError: ``query_lens`` is not as above, or the step exceeds ``lengths`` or ``max_rows``.
        """
        requests = len(self.lengths)
        if len(query_lens) != requests:
            raise ValueError(f"query_lens had {len(query_lens)} requests, must have {requests}")
        rows = sum(query_lens)
        if rows < 1 or min(query_lens) < 0 or rows > self.max_rows:
            raise ValueError(f"query_lens was {list(query_lens)}, must add up to between 1 and max_rows = {self.max_rows}")
        before = list(self.seen)
        after = [seen + new for seen, new in zip(before, query_lens, strict=True)]
        for request, (length, most) in enumerate(zip(after, self.lengths, strict=True)):
            if length > most:
                raise ValueError(
                    f"query_lens[{request}] was {query_lens[request]}, must be at most {most - before[request]}: the request has"
                    f" {before[request]} of its {most} tokens"
                )
        device = self.kv_caches[0].device
        groups, block_size, dim = self.kv_caches[0].shape[1:]
        start, new = torch.tensor(before), torch.tensor(query_lens)
        owners = torch.repeat_interleave(torch.arange(requests), new)
        positions = torch.arange(rows) - (new.cumsum(0) - new)[owners] + start[owners]

        first = start // REGION
        count = (start + new) // REGION - first
        column = torch.arange(int(count.max()))
        live = column < count[:, None]
        region = first[:, None] + column
        token = torch.where(live, region * REGION, 0)
        region_blocks = self.block_table.gather(1, token // block_size)
        index_page = self.index_table.gather(1, torch.where(live, region // INDEX_PAGE, 0))
        slots = torch.where(live, index_page.long() * INDEX_PAGE + region % INDEX_PAGE, -1)

        # Requests without rows in this step have nothing to score: their keys are not staged.
        active = [request for request in range(requests) if query_lens[request]]
        chunks = build_prefill_chunks(
            [query_lens[request] for request in active],
            [after[request] for request in active],
            self.index_table[active].to(device),
            key_budget=self.key_budget,
            compress_ratio=REGION,
            own_region=True,
        )
        index = prepare_prefill_metadata(PrefillMetadata(chunks, max(after)), 1, 0, 1)
        self.plan.plan(
            (rows, self.heads, dim // 2),
            self.kv_caches[0].dtype,
            device,
            positions,
            self.budget,
            self.scale,
            block_size,
            contiguous_query=False,
        )
        tensors = (
            positions.int(),
            owners.int(),
            self.block_table,
            self.block_table[owners, positions // block_size].long(),
            positions % block_size,
            region_blocks.long(),
            token % block_size // REGION,
            slots.flatten().clone(),  # a view would drag its base's sizes into the graph's guards
            first,
            count,
            torch.ones(rows, self.heads, dtype=torch.bfloat16),
            torch.full((rows, self.budget - 1), -1, dtype=torch.int32),
        )
        self.step = Step(*(tensor.to(device) for tensor in tensors), index)
        # Every size of a step but k, which belongs to the budget.
        mark_unbacked_sizes(self.step)
        mark_unbacked_sizes(self.step.region_blocks, self.step.region_pages, dims=(1,))
        plan = self.plan
        mark_unbacked_sizes(plan.pages, plan.indptr, plan.last_page_len, plan.owners, plan.query)
        self.seen = after
        return positions.unsqueeze(0).to(device)

    def keys_read(self, positions: torch.Tensor) -> torch.Tensor:
        """Keys that rows at these positions attend to: whole regions, and their own up to themselves."""
        regions = (positions // REGION + 1).clamp_max(self.budget)
        return (regions - 1) * REGION + positions % REGION + 1


def _shuffled_table(counts, generator):
    """int32 [requests, max(counts)] of distinct block ids in random order, zero behind a request's own, and their number."""
    total, width = max(sum(counts), 1), max(*counts, 1)
    ids = torch.randperm(total, generator=generator).tolist()
    table = torch.zeros(len(counts), width, dtype=torch.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count] = torch.tensor(ids[:count], dtype=torch.int32)
        del ids[:count]
    return table, total


def _orthonormal(dim):
    # The same basis in every process, or an index could not be read back.
    gaussian = torch.randn(dim, INDEX_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return torch.linalg.qr(gaussian).Q.float()


def _to_index(vectors, projection):
    """[..., head_dim] as the bf16 [..., 128] that the index takes."""
    if projection is None:
        return F.pad(vectors, (0, INDEX_DIM - vectors.shape[-1])).to(torch.bfloat16)
    return (vectors.float() @ projection).to(torch.bfloat16)


def _index_keys(kv_cache, region_sums, step):
    """Index keys [R, M, G, head_dim] of the regions completed in this step. Adds their means to ``region_sums``."""
    blocks, groups, tokens, width = kv_cache.shape
    pages = kv_cache.view(blocks, groups, tokens // REGION, REGION, width)
    keys = pages[step.region_blocks, :, step.region_pages, :, : width // 2].double()  # [R, M, G, 8, head_dim]
    # Sums in float64 and in one order, so that a region's index key has the same bits however the prompt was cut into steps.
    pair = [keys[:, :, :, i] + keys[:, :, :, i + 1] for i in range(0, REGION, 2)]
    means = ((pair[0] + pair[1]) + (pair[2] + pair[3])) / REGION
    # [R, M + 1, G, head_dim]; entry m is the sum over the regions before the m-th of this step.
    sums = torch.cat([region_sums.unsqueeze(1), means], dim=1).cumsum(1)
    number = step.region_starts.unsqueeze(1) + torch.arange(means.shape[1], device=means.device)
    before = sums[:, :-1] / number.clamp_min(1)[:, :, None, None]
    last = step.region_counts[:, None, None, None].expand(-1, 1, *sums.shape[2:])
    region_sums.copy_(sums.gather(1, last).squeeze(1))
    return means - before


def _untimed(name):
    return contextlib.nullcontext()


def sparse_attention_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    index_caches: tuple[torch.Tensor, ...],
    region_sums: torch.Tensor,
    step: Step,
    plan: CompactPagedPrefill,
    keep_first: int,
    keep_last: int,
    projection: torch.Tensor | None = None,
    record: list[torch.Tensor] | None = None,
    watch: Stopwatch | None = None,
) -> torch.Tensor:
    """One layer's sparse prefill of one step, from keys to attention output; one graph under ``torch.compile(fullgraph=True)``.

    Writes the step's keys and values to the cache, index keys of the regions they complete to the index, then for every KV group
    selects each row's regions and attends to them. Mutates the caches, ``region_sums`` and the plan's buffers.

    Args:
        query: [T, query heads, head_dim], T rows.
        key, value: [T, G, head_dim].
        kv_cache, index_caches, region_sums: this layer's, see :class:`SparsePrefillContext`.
        step, plan: the step in progress.
        keep_first, keep_last, projection: see :class:`SparsePrefillContext`.
        seconds: host time spent in the attention step so far, all layers together.
        record: None, or a list that receives each group's regions, int32 [T, budget].
        watch: None, or what times the stages; not under torch.compile.

    Returns:
        [T, query heads, head_dim].
    """
    rows, query_heads, dim = query.shape
    groups = key.shape[1]
    heads = query_heads // groups
    # Sizes of a step are independent symbols to the compiler until they are said to be equal.
    for tensor in (key, value, step.kv_blocks, step.kv_offsets, step.positions, step.owners, step.weights, step.unselected):
        torch._check(tensor.shape[0] == rows)
    for tensor in (step.region_pages, step.region_starts, step.region_counts, region_sums):
        torch._check(tensor.shape[0] == step.region_blocks.shape[0])
    torch._check(step.region_pages.shape[1] == step.region_blocks.shape[1])
    torch._check(step.region_slots.shape[0] == step.region_blocks.shape[0] * step.region_blocks.shape[1])

    stage = watch.stage if watch is not None else _untimed
    with stage(STAGES[0]):
        kv_cache[step.kv_blocks, :, step.kv_offsets] = torch.cat([key, value], dim=-1)
        index_keys = _to_index(_index_keys(kv_cache, region_sums, step), projection)
    outputs = []
    for group in range(groups):
        own = query[:, group * heads : (group + 1) * heads]
        cache = kv_cache[:, group : group + 1]
        with stage(STAGES[1]):
            store_index_keys(index_keys[:, :, group].reshape(-1, INDEX_DIM), index_caches[group], step.region_slots)
        with stage(STAGES[2]):
            # Rows of requests that have no region yet are in no chunk and stay at -1.
            selected = step.unselected.clone()
            prefill_chunks(
                _to_index(own, projection),
                step.weights,
                index_caches[group],
                selected,
                step.index,
                1,
                1,
                1.0,
                keep_first=keep_first,
                keep_last=keep_last,
            )
        with stage(STAGES[3]):
            regions = append_own_region(selected, step.positions)
            plan.prepare_chunk(0, own, cache, regions, step.table, step.owners)
        with stage(STAGES[4]):
            out = torch.empty_like(own, memory_format=torch.contiguous_format)
            plan.finish(None, cache, out)
        outputs.append(out)
        if record is not None:
            record.append(regions)
    return torch.cat(outputs, dim=1)


@functools.cache
def compiled_attention_step():
    """:func:`sparse_attention_step` as one graph, shared by all layers, steps and contexts of a process."""
    return torch.compile(sparse_attention_step, fullgraph=True, backend=compile_backend())


@functools.cache
def compile_backend() -> str:
    """ "inductor", or "aot_eager" where the CPU has no C++ compiler for inductor to use."""
    if torch.cuda.is_available():
        return "inductor"
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError, RuntimeError):
        return "aot_eager"
    return "inductor"


def sparse_prefill_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sparse_prefill: SparsePrefillContext | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function behind the name "sparse_prefill" of transformers' attention interface.

    Args:
        module: the attention layer; its ``layer_idx`` picks the caches.
        query: [1, query heads, T, head_dim], the step's tokens of all requests one after another.
        key, value: [1, G, T, head_dim].
        attention_mask: None; causality and requests come from the context.
        scaling: softmax scale, the context's.
        dropout: 0.
        sparse_prefill: the context, given to the model's call under this keyword.
        options: other keywords of the model; those that change what attention computes are refused.

    Returns:
        [1, T, query heads, head_dim], and None for the attention weights.

    Raises:
        ValueError: an argument is not as above.
    """
    context = sparse_prefill
    if not isinstance(context, SparsePrefillContext):
        raise ValueError(
            f"sparse_prefill was {type(context).__name__}, must be a SparsePrefillContext: pass it to the model as"
            " model(..., sparse_prefill=context)"
        )
    step, layer = context.step, module.layer_idx
    if step is None:
        raise ValueError("sparse_prefill had no step in progress: call its begin_step first")
    rows, (_, groups, _, width) = step.positions.shape[0], context.kv_caches[layer].shape
    for name, tensor, heads in (("query", query, groups * context.heads), ("key", key, groups), ("value", value, groups)):
        if tuple(tensor.shape) != (1, heads, rows, width // 2):
            raise ValueError(
                f"{name} was {list(tensor.shape)}, must be {[1, heads, rows, width // 2]}: the step's tokens in one batch row,"
                " with use_cache=False"
            )
    if attention_mask is not None:
        raise ValueError("attention_mask was a tensor, must be None: the context knows which token belongs to which request")
    if dropout or module.training:
        raise ValueError("the model was in training mode, must be in evaluation mode: call model.eval()")
    if scaling is not None and scaling != context.scale:
        raise ValueError(f"scaling was {scaling}, must be the context's scale {context.scale}")
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(f"{name} was {options[name]!r}, must be None: this attention does not have it")
    start = time.perf_counter()
    inputs = [_rows_first(tensor[0]) for tensor in (query, key, value)]
    state = context.kv_caches[layer], context.index_caches[layer], context.region_sums[layer]
    settings = context.step, context.plan, context.keep_first, context.keep_last, context.projection
    if context.compiled:
        mark_unbacked_sizes(inputs)
        out = compiled_attention_step()(*inputs, *state, *settings)
    else:
        record = None if context.record is None else []
        out = sparse_attention_step(*inputs, *state, *settings, record, context.watch)
        if record is not None:
            context.record.extend((layer, group, regions) for group, regions in enumerate(record))
    context.seconds += time.perf_counter() - start
    return out.unsqueeze(0), None


def _rows_first(tensor):
    """[heads, T, head_dim] as a dense [T, heads, head_dim]. Unlike contiguous(), also gives one row the usual strides."""
    heads, rows, dim = tensor.shape
    return tensor.new_empty(rows, heads, dim).copy_(tensor.transpose(0, 1))


def register() -> None:
    """Makes ``attn_implementation="sparse_prefill"`` known to transformers. May be called again.

    Raises:
        ImportError: transformers is missing or too old to have an attention interface.
    """
    try:
        from transformers import AttentionInterface
    except ImportError as error:
        raise ImportError("sparse_prefill.tools.huggingface needs transformers 5: pip install 'sparse-prefill[demo]'") from error
    AttentionInterface.register(NAME, sparse_prefill_attention)
