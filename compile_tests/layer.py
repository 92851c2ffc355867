"""A sparse-attention layer's prefill through both halves, as a model would write it, and a step of requests to run it on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import sparse_prefill as sp

HEADS, GROUPS, DIM = 6, 2, 16  # query heads, KV groups, head dimension
INDEX_HEADS, INDEX_DIM = 3, 128
BLOCK = 16  # tokens of a KV block
K = 4  # history regions of a row
REGION = 8


@dataclass
class Step:
    """What one step brings: all of it changes in size from step to step."""

    hidden: torch.Tensor  # [rows, hidden]
    positions: torch.Tensor  # int64 [rows]
    owners: torch.Tensor  # int32 [rows]
    slots: torch.Tensor  # int64 [regions], index slots of the regions this step completes
    region_rows: torch.Tensor  # int64 [regions], the hidden row that ends each
    table: torch.Tensor  # int32 [requests, width], KV blocks
    metadata: sp.FP4PrefillMetadata


class Layer(torch.nn.Module):
    """Index -> regions -> attention for one layer whose KV cache is already written."""

    def __init__(self, kv_blocks: int, index_pages: int, hidden: int = 32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            return torch.randn(shape, generator=generator)

        self.index_key = torch.nn.Parameter(random(hidden, INDEX_DIM), requires_grad=False)
        self.index_query = torch.nn.Parameter(random(hidden, INDEX_HEADS * INDEX_DIM), requires_grad=False)
        self.index_weight = torch.nn.Parameter(random(hidden, INDEX_HEADS), requires_grad=False)
        self.query = torch.nn.Parameter(random(hidden, HEADS * DIM) / hidden**0.5, requires_grad=False)
        self.register_buffer("cache", random(kv_blocks, GROUPS, BLOCK, 2 * DIM).to(torch.bfloat16))
        self.register_buffer("index_cache", torch.zeros(index_pages, 64, 68, dtype=torch.uint8))

    def forward(self, step: Step, plan: sp.CompactPagedPrefill) -> torch.Tensor:
        rows = step.hidden.shape[0]
        # FP4 region summaries.
        summaries = (step.hidden[step.region_rows] @ self.index_key).to(torch.bfloat16)
        sp.store_index_keys(summaries, self.index_cache, step.slots)
        # Stage -> score -> select.
        q = (step.hidden @ self.index_query).view(rows, INDEX_HEADS, INDEX_DIM).to(torch.bfloat16)
        weights = step.hidden @ self.index_weight
        selected = torch.full((rows, K), -1, dtype=torch.int32, device=q.device)
        sp.prefill_chunks(q, weights, self.index_cache, selected, step.metadata, 1, 1, INDEX_DIM**-0.5, keep_first=1, keep_last=1)
        # Regions -> page ids -> attention, a KV group at a time.
        regions = sp.append_own_region(selected, step.positions)
        query = (step.hidden @ self.query).view(rows, GROUPS, HEADS // GROUPS, DIM).to(torch.bfloat16)
        plan.fixup_positions(step.positions)
        outs = []
        for group in range(GROUPS):
            cache = self.cache[:, group : group + 1]
            plan.prepare_chunk(0, query[:, group], cache, regions, step.table, step.owners)
            # Each group's output is a tensor of its own: a view of a larger one is no safe argument to mutate inside a graph.
            out = torch.empty((rows, HEADS // GROUPS, DIM), dtype=torch.bfloat16, device=query.device)
            plan.finish(None, cache, out)
            outs.append(out)
        return torch.stack(outs, dim=1)


def make_step(query_lens, seq_lens, *, kv_blocks, index_pages, key_budget, seed=0, hidden=32) -> Step:
    """A step of requests with ``query_lens`` new rows, ``seq_lens`` tokens in all; pages are dealt at random."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(query_lens)

    def deal(pages, per_page, lengths):
        width = max([-(-n // per_page) for n in lengths], default=0) + 1
        order = torch.randperm(pages, generator=generator)
        table, used = torch.full((len(lengths), width), -1, dtype=torch.int32), 0
        for i, n in enumerate(lengths):
            count = -(-n // per_page)
            table[i, :count] = order[used : used + count]
            used += count
        return table

    table = deal(kv_blocks, BLOCK, seq_lens).clamp_min(0)
    index_table = deal(index_pages, 64, [n // REGION for n in seq_lens])
    parts = [torch.arange(n - m, n) for m, n in zip(query_lens, seq_lens, strict=True)]
    positions = torch.cat(parts or [torch.empty(0, dtype=torch.int64)])
    owners = torch.repeat_interleave(torch.arange(len(query_lens)), torch.tensor(query_lens, dtype=torch.int64))
    ends = (positions % REGION == REGION - 1).nonzero().squeeze(1)
    region = positions[ends] // REGION
    slots = index_table[owners[ends], region // 64].to(torch.int64) * 64 + region % 64
    chunks = sp.build_prefill_chunks(
        query_lens, seq_lens, index_table, key_budget=key_budget, compress_ratio=REGION, own_region=True
    )
    metadata = sp.prepare_prefill_metadata(sp.PrefillMetadata(chunks, max(seq_lens, default=0)), 1, 0, 1)
    return Step(
        hidden=torch.randn((rows, hidden), generator=generator),
        positions=positions,
        owners=owners.to(torch.int32),
        slots=slots,
        region_rows=ends,
        table=table,
        metadata=metadata,
    )


def plan_step(plan: sp.CompactPagedPrefill, step: Step) -> None:
    rows = step.hidden.shape[0]
    plan.plan(
        (rows, HEADS // GROUPS, DIM), torch.bfloat16, "cpu", step.positions, K + 1, DIM**-0.5, BLOCK, contiguous_query=False
    )


def mark(step: Step) -> None:
    """Every size of a step is unbacked: one graph serves them all."""
    sp.mark_unbacked_sizes(step.hidden, step.positions, step.owners, step.slots, step.region_rows, step.metadata)
    sp.mark_unbacked_sizes(step.table, dims=(0, 1))
