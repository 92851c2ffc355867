"""Every argument of every public function, wrong in every way: an error that names it, what it was and what it must be.

A function that writes leaves its buffers as they were. Each function has an entry in FUNCTIONS: a builder of good arguments and
the names of those it writes; CASES changes one argument at a time. Faults that any tensor can have (another type, dtype, rank,
device, requiring grad) are generated for all of them.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import reference as ref
import torch
from samples import generator, index_set, int32, paged_set, prefill_step, random_regions

import sparse_prefill as sp

ROWS, HEADS, DIM, REGIONS = 4, 2, 8, 3


def good_store():
    return dict(
        keys=torch.randn(ROWS, 128).bfloat16(), cache=torch.zeros(2, 64, 68, dtype=torch.uint8), slot_mapping=torch.arange(ROWS)
    )


def good_stage():
    sample = index_set([70, 3], generator(0))
    chunk = sp.PrefillChunk(
        sample.block_table, sample.cu_seq_lens, sample.token_to_seq, int32([0]), int32([1]), 0, 1, 2, sample.total_seq_lens, 70
    )
    return dict(cache=sample.cache, chunk=chunk, world=1, interleave=1)


def good_score():
    payload, scales = ref.pages_of_keys(torch.zeros(70, 68, dtype=torch.uint8), 70)
    return dict(
        q=torch.randn(ROWS, HEADS, 128).bfloat16(),
        payload=payload,
        scales=scales,
        weights=torch.ones(ROWS, HEADS),
        ks=torch.zeros(ROWS, dtype=torch.int32),
        ke=torch.full((ROWS,), 70, dtype=torch.int32),
        total_keys=64,
        weight_scale=1.0,
        precision="exact",
    )


def good_select():
    return dict(
        logits=torch.randn(ROWS, 20),
        ks=torch.zeros(ROWS, dtype=torch.int32),
        ke=torch.full((ROWS,), 20, dtype=torch.int32),
        k=5,
        keep_first=1,
        keep_last=1,
    )


def good_prefill():
    step = prefill_step([(3, 70), (1, 20)], generator(1))
    chunks = sp.build_prefill_chunks(step.query_lens, step.seq_lens, step.block_table, **step.options)
    return dict(
        q=step.q,
        weights=step.weights,
        cache=step.cache,
        out=step.out,
        metadata=sp.prepare_prefill_metadata(sp.PrefillMetadata(chunks, 73), 1, 0, 1),
        world=1,
        interleave=1,
        weight_scale=0.5,
        keep_first=1,
        keep_last=1,
        precision="exact",
    )


def good_build():
    return dict(
        query_lens=[3, 1],
        seq_lens=[70, 20],
        block_table=torch.zeros(2, 2, dtype=torch.int32),
        key_budget=100,
        logits_bytes=2**20,
        compress_ratio=1,
        own_region=False,
        token_offset=0,
        world=1,
        rank=0,
        interleave=1,
    )


def good_prepare():
    chunks = sp.build_prefill_chunks([3, 1], [70, 20], torch.zeros(2, 2, dtype=torch.int32), key_budget=100)
    return dict(metadata=sp.PrefillMetadata(chunks, 70), world=1, rank=0, interleave=1)


def good_append():
    return dict(selected=torch.zeros(ROWS, 2, dtype=torch.int32), positions=torch.full((ROWS,), 9))


def good_fixup():
    return dict(
        positions=torch.full((ROWS,), 9),
        indptr=torch.full((ROWS + 1,), 7, dtype=torch.int32),
        last_page_len=torch.full((ROWS,), 7, dtype=torch.int32),
        region_count=REGIONS,
    )


def good_fill():
    positions = [9, 20, 31, -1]
    return dict(
        regions=random_regions(generator(2), positions, REGIONS),
        table=torch.zeros(2, 3, dtype=torch.int32),
        owners=torch.zeros(ROWS, dtype=torch.int32),
        indptr=int32(ref.compact_page_metadata(positions, REGIONS)[0]),
        pages=torch.full((ROWS * REGIONS,), 7, dtype=torch.int32),
        block_size=16,
        query=torch.randn(ROWS, HEADS, DIM).bfloat16(),
        contiguous_query=torch.full((ROWS, HEADS, DIM), 7.0, dtype=torch.bfloat16),
        page_stride=2,
        start=0,
        num_pages=0,
    )


def good_plan_staged():
    return dict(table=torch.zeros(2, 3, dtype=torch.int32), lengths=[20, 0], block_size=16)


def good_stage_pages():
    return dict(
        cache=torch.zeros(3, 1, 16, 2 * DIM, dtype=torch.uint8),
        staged=sp.StagedPrefillPages(int32([0, 2]), int32([[0, 1]])),
        dtype=torch.bfloat16,
        k_scale=torch.tensor([1.0]),
        v_scale=torch.tensor([1.0]),
    )


def good_attention():
    sample = paged_set([40, 30], generator(3), dim=DIM)
    positions = [9, 20, 29, -1]
    regions = random_regions(generator(3), positions, REGIONS)
    indptr, last_page_len = ref.compact_page_metadata(positions, REGIONS)
    owners, pages = int32([0, 0, 1, 1]), torch.zeros(indptr[-1], dtype=torch.int32)
    ref.fill_prefill_pages(regions, sample.table, owners, int32(indptr), pages, 16, ref.kv_page_stride(sample.cache))
    return dict(
        query=torch.randn(ROWS, HEADS, DIM).bfloat16(),
        cache=sample.cache,
        pages=pages,
        indptr=int32(indptr),
        last_page_len=int32(last_page_len),
        owners=owners,
        out=torch.full((ROWS, HEADS, DIM), 7.0, dtype=torch.bfloat16),
        scale=0.3,
        k_scale=torch.tensor([1.0]),
        v_scale=torch.tensor([1.0]),
        backend="auto",
    )


def good_kv_cache():
    return dict(cache=torch.zeros(3, 1, 16, 2 * DIM))


def good_plan():
    return dict(
        query_shape=(ROWS, HEADS, DIM),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        positions=[9, 20, 31, -1],
        region_count=REGIONS,
        scale=0.3,
        block_size=16,
        contiguous_query=True,
    )


def plan_of(**options):
    plan = sp.CompactPagedPrefill(None, max_rows=8)
    plan.plan(**{**good_plan(), **options})
    return plan


def good_page_metadata():
    return dict(
        table=torch.zeros(2, 3, dtype=torch.int32), owners=torch.zeros(ROWS, dtype=torch.int32), page_stride=2, start=1, end=3
    )


def good_prepare_chunk():
    return dict(
        start=0,
        query=torch.randn(ROWS, HEADS, DIM).bfloat16(),
        cache=torch.zeros(3, 1, 16, 2 * DIM).bfloat16(),
        regions=random_regions(generator(2), [9, 20, 31, -1], REGIONS),
        table=torch.zeros(2, 3, dtype=torch.int32),
        owners=torch.zeros(ROWS, dtype=torch.int32),
    )


def good_finish():
    return dict(
        query=torch.randn(ROWS, HEADS, DIM).bfloat16(),
        cache=torch.zeros(3, 1, 16, 2 * DIM).bfloat16(),
        out=torch.full((ROWS, HEADS, DIM), 7.0, dtype=torch.bfloat16),
    )


@dataclass
class Function:
    call: Any
    good: Any
    mutates: tuple = ()
    # Tensor arguments checked for the common faults, of those only the ones that a case of its own does not replace.
    tensors: tuple = ()
    any_dims: tuple = field(default=())


FUNCTIONS = {
    "quantize_mxfp4": Function(sp.quantize_mxfp4, lambda: dict(x=torch.randn(2, 128)), tensors=("x",), any_dims=("x",)),
    "dequantize_mxfp4": Function(
        sp.dequantize_mxfp4,
        lambda: dict(packed=torch.zeros(2, 64, dtype=torch.uint8), scale=torch.zeros(2, 4, dtype=torch.uint8)),
        tensors=("packed", "scale"),
        any_dims=("packed",),
    ),
    "store_index_keys": Function(sp.store_index_keys, good_store, ("cache",), ("keys", "cache", "slot_mapping")),
    "stage_keys": Function(sp.stage_keys, good_stage, tensors=("cache",)),
    "score_keys": Function(sp.score_keys, good_score, tensors=("q", "payload", "scales", "weights", "ks", "ke")),
    "select_keys": Function(sp.select_keys, good_select, tensors=("logits", "ks", "ke")),
    "prefill_chunks": Function(sp.prefill_chunks, good_prefill, ("out",), ("weights", "cache", "out")),
    "build_prefill_chunks": Function(sp.build_prefill_chunks, good_build, tensors=("block_table",)),
    "prepare_prefill_metadata": Function(sp.prepare_prefill_metadata, good_prepare),
    "prefill_workspace_bytes": Function(
        sp.prefill_workspace_bytes, lambda: dict(max_keys=1, max_reqs=1, world=1, interleave=1, max_rows=1, k=1, page_sets=1)
    ),
    "local_key_counts": Function(sp.local_key_counts, lambda: dict(n=5, world=2, interleave=1)),
    "append_own_region": Function(sp.append_own_region, good_append, tensors=("selected", "positions")),
    "compact_page_metadata": Function(
        sp.compact_page_metadata, lambda: dict(positions=torch.tensor([3]), region_count=2), tensors=("positions",)
    ),
    "fixup_positions": Function(
        sp.fixup_positions, good_fixup, ("indptr", "last_page_len"), ("positions", "indptr", "last_page_len")
    ),
    "kv_page_stride": Function(sp.kv_page_stride, good_kv_cache, tensors=("cache",)),
    "kv_page_count": Function(sp.kv_page_count, good_kv_cache, tensors=("cache",)),
    "view_sparse_kv_pages": Function(sp.view_sparse_kv_pages, good_kv_cache, tensors=("cache",)),
    "fill_prefill_pages": Function(
        sp.fill_prefill_pages,
        good_fill,
        ("pages", "contiguous_query"),
        ("regions", "table", "owners", "indptr", "pages", "query", "contiguous_query"),
    ),
    "plan_staged_prefill_pages": Function(sp.plan_staged_prefill_pages, good_plan_staged, tensors=("table",)),
    "stage_prefill_pages": Function(sp.stage_prefill_pages, good_stage_pages, tensors=("cache", "k_scale", "v_scale")),
    "paged_attention": Function(
        sp.paged_attention,
        good_attention,
        ("out",),
        ("query", "cache", "pages", "indptr", "last_page_len", "owners", "out", "k_scale", "v_scale"),
    ),
    "CompactPagedPrefill": Function(
        sp.CompactPagedPrefill, lambda: dict(workspace=torch.empty(8, dtype=torch.uint8), max_rows=8, backend="auto")
    ),
    "CompactPagedPrefill.plan": Function(lambda **options: sp.CompactPagedPrefill(None, max_rows=8).plan(**options), good_plan),
    "CompactPagedPrefill.fixup_positions": Function(
        lambda **options: plan_of().fixup_positions(**options), lambda: dict(positions=torch.tensor([9, 20, 31, -1]))
    ),
    "CompactPagedPrefill.page_metadata": Function(lambda **options: plan_of().page_metadata(**options), good_page_metadata),
    "CompactPagedPrefill.prepare_chunk": Function(
        lambda **options: plan_of(contiguous_query=False).prepare_chunk(**options), good_prepare_chunk
    ),
    "CompactPagedPrefill.finish": Function(lambda **options: plan_of().finish(**options), good_finish, ("out",)),
}


# (function, argument, how its good value becomes bad, what the message says it was)


def generated():
    for name, function in FUNCTIONS.items():
        for argument in function.tensors:
            good = function.good()[argument]
            yield name, argument, lambda good: "text", "str"
            yield name, argument, lambda good: good.to(torch.complex64), "complex64"
            if argument in ("k_scale", "v_scale"):
                continue
            yield name, argument, lambda good: None, "None"
            if argument not in function.any_dims:
                yield name, argument, lambda good: good.unsqueeze(0), f"{good.dim() + 1}"
                yield name, argument, lambda good: good.reshape(-1) if good.dim() > 1 else good.sum().to(good.dtype), "dim"
    for name, function in FUNCTIONS.items():
        good = function.good()
        for argument, value in good.items():
            if type(value) is int and argument not in ("world", "rank"):
                yield name, argument, lambda good: -1, "-1"
                yield name, argument, lambda good: 1.5, "1.5"
                yield name, argument, lambda good: "1", "str"
                yield name, argument, lambda good: True, "True"
            if type(value) is float:
                yield name, argument, lambda good: "1", "str"
                yield name, argument, lambda good: None, "None"
            if type(value) is str:
                yield name, argument, lambda good: "no such name", "no such name"
                yield name, argument, lambda good: 7, "7"


def shorter(good):
    return good[:-1]


def wider(dim=-1):
    """One element more in a dimension."""

    def change(good):
        shape = list(good.shape)
        shape[dim] += 1
        return torch.zeros(shape, dtype=good.dtype)

    return change


def every_other(good):
    """The same values with stride 2 in the last dimension."""
    wide = torch.zeros(*good.shape[:-1], 2 * good.shape[-1], dtype=good.dtype)
    wide[..., ::2] = good
    return wide[..., ::2]


def chunk_with(**changes):
    def change(good):
        from dataclasses import replace

        return replace(good, **{name: value(getattr(good, name)) for name, value in changes.items()})

    return change


def first_chunk_with(**changes):
    def change(good):
        return sp.PrefillMetadata([chunk_with(**changes)(good.chunks[0])], good.max_prefill_seq_len)

    return change


def without(attribute):
    """Any object with the attributes is accepted; this one lacks one."""
    from types import SimpleNamespace

    def change(good):
        names = set(good.__dataclass_fields__) - {attribute}
        return SimpleNamespace(**{name: getattr(good, name) for name in names})

    return change


def index_strides(*strides):
    return lambda good: torch.zeros(40_000, dtype=torch.uint8).as_strided((2, 64, 68), strides)


def kv_strides(shape, strides):
    return lambda good: torch.zeros(4000, dtype=good.dtype).as_strided(shape, strides)


def meta(good):
    return good.to("meta")


SPECIFIC = [
    ("quantize_mxfp4", "x", lambda good: torch.randn(2, 127), "127"),
    ("quantize_mxfp4", "x", lambda good: torch.randn(2, 0), "0"),
    ("quantize_mxfp4", "x", lambda good: torch.tensor(1.0), ""),
    ("dequantize_mxfp4", "packed", lambda good: good[:, :63], "63"),
    ("dequantize_mxfp4", "scale", lambda good: good[:, :3], "3"),
    ("dequantize_mxfp4", "scale", lambda good: good[:1], "1, 4"),
    ("store_index_keys", "keys", wider(1), "129"),
    ("store_index_keys", "keys", every_other, "2"),
    ("store_index_keys", "keys", lambda good: good.half(), "float16"),
    ("store_index_keys", "keys", meta, "meta"),
    ("store_index_keys", "slot_mapping", shorter, "3"),
    ("store_index_keys", "slot_mapping", wider(0), "5"),
    ("store_index_keys", "slot_mapping", lambda good: good.to(torch.int16), "int16"),
    ("store_index_keys", "slot_mapping", meta, "meta"),
    ("store_index_keys", "cache", lambda good: good[:, :32], "32"),
    ("store_index_keys", "cache", lambda good: torch.zeros(2, 128, 68, dtype=torch.uint8), "128"),
    ("store_index_keys", "cache", lambda good: torch.zeros(2, 64, 132, dtype=torch.uint8), "132"),
    ("store_index_keys", "cache", lambda good: good.to(torch.int8), "int8"),
    ("store_index_keys", "cache", index_strides(4351, 68, 1), "4351"),
    ("store_index_keys", "cache", index_strides(8704, 136, 1), "136"),
    ("store_index_keys", "cache", index_strides(8704, 68, 2), "2"),
    ("store_index_keys", "cache", index_strides(0, 68, 1), "0"),
    ("stage_keys", "cache", index_strides(4351, 68, 1), "4351"),
    ("stage_keys", "cache", lambda good: good[..., :67], "67"),
    ("stage_keys", "cache", lambda good: good.to(torch.int8), "int8"),
    ("stage_keys", "world", lambda good: 0, "0"),
    ("stage_keys", "world", lambda good: "1", "str"),
    ("stage_keys", "interleave", lambda good: 0, "0"),
    ("stage_keys", "chunk", lambda good: "text", "str"),
    ("stage_keys", "chunk", lambda good: None, "None"),
    ("stage_keys", "block_table", chunk_with(block_table=lambda t: t.long()), "int64"),
    ("stage_keys", "block_table", chunk_with(block_table=lambda t: t[0]), "1"),
    ("stage_keys", "block_table", chunk_with(block_table=lambda t: None), "None"),
    ("stage_keys", "block_table", chunk_with(block_table=meta), "meta"),
    ("stage_keys", "cu_seq_lens", chunk_with(cu_seq_lens=shorter), "2"),
    ("stage_keys", "cu_seq_lens", chunk_with(cu_seq_lens=lambda t: t.long()), "int64"),
    ("stage_keys", "cu_seq_lens", chunk_with(cu_seq_lens=meta), "meta"),
    ("stage_keys", "token_to_seq", chunk_with(token_to_seq=lambda t: t.long()), "int64"),
    ("stage_keys", "token_to_seq", chunk_with(token_to_seq=lambda t: t[None]), "2"),
    ("stage_keys", "token_to_seq", chunk_with(token_to_seq=meta), "meta"),
    ("stage_keys", "chunk", without("token_to_seq"), "SimpleNamespace"),
    ("stage_keys", "chunk", without("block_table"), "SimpleNamespace"),
    ("stage_keys", "chunk", without("cu_seq_lens"), "SimpleNamespace"),
    ("score_keys", "q", lambda good: good[..., :127], "127"),
    ("score_keys", "q", lambda good: good.float(), "float32"),
    ("score_keys", "q", lambda good: good[:, :0], "0"),
    ("score_keys", "q", lambda good: torch.randn(ROWS, 129, 128).bfloat16(), "129"),
    ("score_keys", "q", lambda good: (torch.zeros(ROWS, HEADS, 64, dtype=torch.uint8),), "1"),
    ("score_keys", "q", lambda good: ("a", "b"), "str"),
    ("score_keys", "q_scale", lambda good: torch.zeros(ROWS, HEADS, 64, dtype=torch.uint8), "None"),
    ("score_keys", "q_scale", lambda good: (good, torch.zeros(ROWS, HEADS, 4, dtype=torch.uint8)), ""),
    (
        "score_keys",
        "q_scale",
        lambda good: (torch.zeros(ROWS, HEADS, 64, dtype=torch.uint8), torch.zeros(ROWS, HEADS, 3, dtype=torch.uint8)),
        "3",
    ),
    (
        "score_keys",
        "q_scale",
        lambda good: (torch.zeros(ROWS, HEADS, 64, dtype=torch.uint8), torch.zeros(ROWS, 1, 4, dtype=torch.uint8)),
        "1, 4",
    ),
    (
        "score_keys",
        "q_scale",
        lambda good: (torch.zeros(ROWS, HEADS, 64, dtype=torch.uint8), torch.zeros(ROWS, HEADS, 4)),
        "float32",
    ),
    (
        "score_keys",
        "q",
        lambda good: (torch.zeros(ROWS, HEADS, 63, dtype=torch.uint8), torch.zeros(ROWS, HEADS, 4, dtype=torch.uint8)),
        "63",
    ),
    ("score_keys", "payload", lambda good: good[:, :, :3], "3"),
    ("score_keys", "payload", lambda good: good[..., :15], "15"),
    ("score_keys", "payload", lambda good: good.transpose(2, 3).contiguous().transpose(2, 3), "strides"),
    ("score_keys", "payload", meta, "meta"),
    ("score_keys", "scales", shorter, "1, 1, 4, 64"),
    ("score_keys", "scales", lambda good: good[..., :63], "63"),
    ("score_keys", "scales", lambda good: good.to(torch.int32), "int32"),
    ("score_keys", "scales", meta, "meta"),
    ("score_keys", "weights", shorter, "3, 2"),
    ("score_keys", "weights", wider(1), "4, 3"),
    ("score_keys", "weights", lambda good: good.half(), "float16"),
    ("score_keys", "weights", meta, "meta"),
    ("score_keys", "ks", shorter, "3"),
    ("score_keys", "ks", lambda good: good.long(), "int64"),
    ("score_keys", "ks", meta, "meta"),
    ("score_keys", "ke", wider(0), "5"),
    ("score_keys", "ke", lambda good: good.long(), "int64"),
    ("score_keys", "ke", meta, "meta"),
    ("score_keys", "total_keys", lambda good: 129, "129"),
    ("score_keys", "precision", lambda good: "Exact", "Exact"),
    ("select_keys", "logits", lambda good: good.bfloat16(), "bfloat16"),
    ("select_keys", "logits", lambda good: good.double(), "float64"),
    ("select_keys", "logits", every_other, "2"),
    ("select_keys", "ks", shorter, "3"),
    ("select_keys", "ks", lambda good: good.long(), "int64"),
    ("select_keys", "ks", meta, "meta"),
    ("select_keys", "ke", wider(0), "5"),
    ("select_keys", "ke", lambda good: good.long(), "int64"),
    ("select_keys", "ke", meta, "meta"),
    ("select_keys", "keep_first", lambda good: 5, "5"),
    ("select_keys", "keep_last", lambda good: 5, "5"),
    ("select_keys", "k", lambda good: 1, "1"),
    ("prefill_chunks", "q", lambda good: "text", "str"),
    ("prefill_chunks", "q", lambda good: good[:1], "1"),
    ("prefill_chunks", "q", lambda good: torch.randn(4, 2, 127).bfloat16(), "127"),
    ("prefill_chunks", "q", lambda good: torch.randn(4, 2, 128), "float32"),
    ("prefill_chunks", "q_scale", lambda good: (good[0], good[1][:, :, :3]), "3"),
    ("prefill_chunks", "q_scale", lambda good: good[0], "None"),
    ("prefill_chunks", "weights", shorter, "3, 2"),
    ("prefill_chunks", "weights", wider(1), "4, 3"),
    ("prefill_chunks", "weights", lambda good: good.half(), "float16"),
    ("prefill_chunks", "weights", meta, "meta"),
    ("prefill_chunks", "cache", index_strides(4351, 68, 1), "4351"),
    ("prefill_chunks", "out", lambda good: good.long(), "int64"),
    ("prefill_chunks", "out", shorter, "3, 5"),
    ("prefill_chunks", "out", every_other, "2"),
    ("prefill_chunks", "out", lambda good: good[:1].expand(4, -1), "strides"),
    ("prefill_chunks", "metadata", lambda good: None, "None"),
    ("prefill_chunks", "metadata", lambda good: good.plans, "PrefillPlans"),
    ("prefill_chunks", "world", lambda good: 2, "2"),
    ("prefill_chunks", "world", lambda good: 0, "0"),
    ("prefill_chunks", "world", lambda good: "1", "str"),
    ("prefill_chunks", "interleave", lambda good: 0, "0"),
    ("prefill_chunks", "interleave", lambda good: 2, "2"),
    ("prefill_chunks", "keep_first", lambda good: 5, "5"),
    ("prefill_chunks", "keep_last", lambda good: 5, "5"),
    ("build_prefill_chunks", "query_lens", lambda good: None, "None"),
    ("build_prefill_chunks", "query_lens", lambda good: [3, -1], "-1"),
    ("build_prefill_chunks", "query_lens", lambda good: [3, 1.5], "1.5"),
    ("build_prefill_chunks", "query_lens", lambda good: [71, 1], "71"),
    ("build_prefill_chunks", "query_lens", lambda good: torch.zeros(2, dtype=torch.int64, device="meta"), "meta"),
    ("build_prefill_chunks", "seq_lens", lambda good: [70], "1"),
    ("build_prefill_chunks", "seq_lens", lambda good: [70, "20"], "20"),
    ("build_prefill_chunks", "seq_lens", lambda good: 7, "int"),
    ("build_prefill_chunks", "block_table", lambda good: good[:1], "1"),
    ("build_prefill_chunks", "block_table", lambda good: good[:, :1], "1"),
    ("build_prefill_chunks", "block_table", lambda good: good.long(), "int64"),
    ("build_prefill_chunks", "key_budget", lambda good: 0, "0"),
    ("build_prefill_chunks", "logits_bytes", lambda good: 0, "0"),
    ("build_prefill_chunks", "compress_ratio", lambda good: 0, "0"),
    ("build_prefill_chunks", "world", lambda good: 0, "0"),
    ("build_prefill_chunks", "rank", lambda good: 1, "1"),
    ("build_prefill_chunks", "rank", lambda good: -1, "-1"),
    ("build_prefill_chunks", "interleave", lambda good: 0, "0"),
    ("prepare_prefill_metadata", "metadata", lambda good: None, "None"),
    ("prepare_prefill_metadata", "metadata", lambda good: good.chunks, "list"),
    ("prepare_prefill_metadata", "world", lambda good: 0, "0"),
    ("prepare_prefill_metadata", "world", lambda good: "1", "str"),
    ("prepare_prefill_metadata", "rank", lambda good: 1, "1"),
    ("prepare_prefill_metadata", "interleave", lambda good: 0, "0"),
    ("prepare_prefill_metadata", "max_prefill_seq_len", lambda good: sp.PrefillMetadata(good.chunks, "70"), "str"),
    ("prepare_prefill_metadata", "block_table", first_chunk_with(block_table=lambda t: t.long()), "int64"),
    ("prepare_prefill_metadata", "block_table", first_chunk_with(block_table=lambda t: t[:1]), "1, 2"),
    ("prepare_prefill_metadata", "cu_seq_lens", first_chunk_with(cu_seq_lens=shorter), "2"),
    ("prepare_prefill_metadata", "token_to_seq", first_chunk_with(token_to_seq=shorter), "89"),
    ("prepare_prefill_metadata", "cu_seqlen_ks", first_chunk_with(cu_seqlen_ks=shorter), "3"),
    ("prepare_prefill_metadata", "cu_seqlen_ke", first_chunk_with(cu_seqlen_ke=wider(0)), "5"),
    ("prepare_prefill_metadata", "cu_seqlen_ke", first_chunk_with(cu_seqlen_ke=meta), "meta"),
    ("prepare_prefill_metadata", "token_start", first_chunk_with(token_start=lambda n: -1), "-1"),
    ("prepare_prefill_metadata", "token_end", first_chunk_with(token_end=lambda n: "4"), "str"),
    ("prepare_prefill_metadata", "num_reqs", first_chunk_with(num_reqs=lambda n: 2.0), "float"),
    ("prepare_prefill_metadata", "total_seq_lens", first_chunk_with(total_seq_lens=lambda n: -3), "-3"),
    ("prepare_prefill_metadata", "max_seqlen_k", first_chunk_with(max_seqlen_k=lambda n: None), "None"),
    ("prepare_prefill_metadata", "request_set", first_chunk_with(request_set=lambda n: "a"), "str"),
    ("prefill_workspace_bytes", "world", lambda good: 0, "0"),
    ("prefill_workspace_bytes", "interleave", lambda good: 0, "0"),
    ("local_key_counts", "world", lambda good: 0, "0"),
    ("append_own_region", "selected", lambda good: good.long(), "int64"),
    ("append_own_region", "positions", shorter, "3"),
    ("append_own_region", "positions", lambda good: good.to(torch.int16), "int16"),
    ("append_own_region", "positions", meta, "meta"),
    ("compact_page_metadata", "positions", lambda good: [3, -2], "-2"),
    ("compact_page_metadata", "positions", lambda good: [1.5], "float"),
    ("compact_page_metadata", "positions", lambda good: 7, "0"),
    ("compact_page_metadata", "positions", meta, "meta"),
    ("compact_page_metadata", "region_count", lambda good: 0, "0"),
    ("fixup_positions", "positions", lambda good: good.float(), "float32"),
    ("fixup_positions", "positions", meta, "meta"),
    ("fixup_positions", "positions|last_page_len", lambda good: torch.full((ROWS + 1,), 9), ""),
    ("fixup_positions", "indptr", shorter, "4"),
    ("fixup_positions", "indptr", lambda good: good.long(), "int64"),
    ("fixup_positions", "indptr", every_other, "2"),
    ("fixup_positions", "indptr", lambda good: good[:1].expand(ROWS + 1), "0"),
    ("fixup_positions", "last_page_len", shorter, "3"),
    ("fixup_positions", "last_page_len", lambda good: good.long(), "int64"),
    ("fixup_positions", "last_page_len", every_other, "2"),
    ("fixup_positions", "last_page_len", meta, "meta"),
    ("fixup_positions", "region_count", lambda good: 0, "0"),
    *(
        case
        for name in ("kv_page_stride", "kv_page_count", "view_sparse_kv_pages")
        for case in (
            (name, "cache", lambda good: torch.zeros(3, 2, 16, 16), "2, 16, 16"),
            (name, "cache", lambda good: torch.zeros(3, 1, 12, 16), "12"),
            (name, "cache", lambda good: torch.zeros(3, 1, 16, 15), "15"),
            (name, "cache", lambda good: torch.zeros(3, 1, 16, 16, dtype=torch.int32), "int32"),
            (name, "cache", every_other, "2"),
            (name, "cache", kv_strides((2, 1, 8, 16), (130, 128, 16, 1)), "130"),
            (name, "cache", kv_strides((2, 1, 8, 16), (64, 64, 8, 1)), "8"),
        )
    ),
    ("fill_prefill_pages", "regions", lambda good: good.long(), "int64"),
    ("fill_prefill_pages", "regions|table", meta, ""),
    ("fill_prefill_pages", "table", lambda good: good.long(), "int64"),
    ("fill_prefill_pages", "table", meta, "meta"),
    ("fill_prefill_pages", "owners", shorter, "3"),
    ("fill_prefill_pages", "owners", lambda good: good.long(), "int64"),
    ("fill_prefill_pages", "owners", meta, "meta"),
    ("fill_prefill_pages", "indptr", shorter, "4"),
    ("fill_prefill_pages", "indptr", lambda good: good.long(), "int64"),
    ("fill_prefill_pages", "indptr", meta, "meta"),
    ("fill_prefill_pages", "pages", lambda good: good.long(), "int64"),
    ("fill_prefill_pages", "pages", every_other, "2"),
    ("fill_prefill_pages", "pages", lambda good: good[:1].expand(12), "0"),
    ("fill_prefill_pages", "pages", meta, "meta"),
    ("fill_prefill_pages", "query", shorter, "3, 2, 8"),
    ("fill_prefill_pages", "query", lambda good: good.double(), "float64"),
    ("fill_prefill_pages", "query", meta, "meta"),
    ("fill_prefill_pages", "contiguous_query", lambda good: good.half(), "float16"),
    ("fill_prefill_pages", "contiguous_query", shorter, "3, 2, 8"),
    ("fill_prefill_pages", "contiguous_query", lambda good: good[..., :7].contiguous(), "7"),
    ("fill_prefill_pages", "contiguous_query", lambda good: good[:, :1].contiguous(), "1, 8"),
    ("fill_prefill_pages", "contiguous_query", lambda good: good.transpose(0, 1).contiguous().transpose(0, 1), "strides"),
    ("fill_prefill_pages", "contiguous_query", meta, "meta"),
    ("fill_prefill_pages", "block_size", lambda good: 12, "12"),
    ("fill_prefill_pages", "block_size", lambda good: 0, "0"),
    ("fill_prefill_pages", "page_stride", lambda good: 0, "0"),
    ("fill_prefill_pages", "start|indptr", lambda good: 1, ""),
    ("fill_prefill_pages", "start|indptr", lambda good: 2**62, ""),
    ("plan_staged_prefill_pages", "table", lambda good: good.long(), "int64"),
    ("plan_staged_prefill_pages", "lengths", lambda good: [20], "1"),
    ("plan_staged_prefill_pages", "lengths", lambda good: [20, -1], "-1"),
    ("plan_staged_prefill_pages", "lengths", lambda good: [20, 49], "49"),
    ("plan_staged_prefill_pages", "lengths", lambda good: [20, "0"], "str"),
    ("plan_staged_prefill_pages", "lengths", lambda good: None, "None"),
    ("plan_staged_prefill_pages", "block_size", lambda good: 12, "12"),
    ("stage_prefill_pages", "cache", lambda good: torch.zeros(3, 2, 16, 16), "2, 16, 16"),
    ("stage_prefill_pages", "cache", lambda good: torch.zeros(3, 1, 12, 16), "12"),
    ("stage_prefill_pages", "cache", every_other, "2"),
    ("stage_prefill_pages", "cache", lambda good: good.to(torch.int32), "int32"),
    ("stage_prefill_pages", "staged", lambda good: None, "None"),
    ("stage_prefill_pages", "pages", lambda good: (good.pages.long(), good.table), "int64"),
    ("stage_prefill_pages", "pages", lambda good: (good.pages[None], good.table), "2"),
    ("stage_prefill_pages", "pages", lambda good: ("text", good.table), "str"),
    ("stage_prefill_pages", "pages", lambda good: (good.pages.to("meta"), good.table), "meta"),
    ("stage_prefill_pages", "dtype", lambda good: torch.float64, "float64"),
    ("stage_prefill_pages", "dtype", lambda good: "float64", "float64"),
    ("stage_prefill_pages", "dtype", lambda good: 7, "7"),
    *(
        case
        for name in ("stage_prefill_pages", "paged_attention")
        for scale in ("k_scale", "v_scale")
        for case in (
            (name, scale, lambda good: torch.ones(2), "2"),
            (name, scale, lambda good: torch.ones(0), "0"),
            (name, scale, lambda good: good.bfloat16(), "bfloat16"),
            (name, scale, meta, "meta"),
            (name, scale, lambda good: 1.0, "float"),
        )
    ),
    ("paged_attention", "query", lambda good: good.double(), "float64"),
    ("paged_attention", "query", every_other, "2"),
    ("paged_attention", "query", shorter, "3, 2, 8"),
    ("paged_attention", "cache", lambda good: good.float(), "float32"),
    ("paged_attention", "cache", meta, "meta"),
    ("paged_attention", "cache", lambda good: good[..., :14], "14"),
    ("paged_attention", "cache", lambda good: torch.zeros(3, 2, 16, 16).bfloat16(), "2, 16, 16"),
    ("paged_attention", "cache", kv_strides((2, 1, 8, 16), (130, 128, 16, 1)), "130"),
    ("paged_attention", "pages", lambda good: good.long(), "int64"),
    ("paged_attention", "pages", meta, "meta"),
    ("paged_attention", "indptr", shorter, "4"),
    ("paged_attention", "indptr", lambda good: good.long(), "int64"),
    ("paged_attention", "indptr", meta, "meta"),
    ("paged_attention", "last_page_len", shorter, "3"),
    ("paged_attention", "last_page_len", lambda good: good.long(), "int64"),
    ("paged_attention", "last_page_len", meta, "meta"),
    ("paged_attention", "owners", shorter, "3"),
    ("paged_attention", "owners", lambda good: good.long(), "int64"),
    ("paged_attention", "owners", meta, "meta"),
    ("paged_attention", "out", lambda good: good.half(), "float16"),
    ("paged_attention", "out", lambda good: good[:, :1], "1, 8"),
    ("paged_attention", "out", lambda good: good[..., :7], "7"),
    ("paged_attention", "out", every_other, "2"),
    ("paged_attention", "out", lambda good: good[:1].expand(ROWS, -1, -1), "strides"),
    ("paged_attention", "out", meta, "meta"),
    ("CompactPagedPrefill", "workspace", lambda good: "text", "str"),
    ("CompactPagedPrefill", "workspace", lambda good: good.int(), "int32"),
    ("CompactPagedPrefill", "workspace", lambda good: good[None], "1, 8"),
    ("CompactPagedPrefill", "max_rows", lambda good: 0, "0"),
    ("CompactPagedPrefill.plan", "query_shape", lambda good: (ROWS, HEADS), "2"),
    ("CompactPagedPrefill.plan", "query_shape", lambda good: None, "None"),
    ("CompactPagedPrefill.plan", "query_shape", lambda good: (ROWS, 0, DIM), "0"),
    ("CompactPagedPrefill.plan", "query_shape", lambda good: (-1, HEADS, DIM), "-1"),
    ("CompactPagedPrefill.plan", "query_shape", lambda good: (ROWS, HEADS, 8.0), "8.0"),
    ("CompactPagedPrefill.plan", "query_shape", lambda good: (9, HEADS, DIM), "9"),
    ("CompactPagedPrefill.plan", "dtype", lambda good: torch.float64, "float64"),
    ("CompactPagedPrefill.plan", "dtype", lambda good: "text", "text"),
    ("CompactPagedPrefill.plan", "positions", lambda good: good[:-1], "3"),
    ("CompactPagedPrefill.plan", "positions", lambda good: [9, 20, 31, -2], "-2"),
    ("CompactPagedPrefill.plan", "positions", lambda good: torch.tensor(good, device="meta"), "meta"),
    ("CompactPagedPrefill.plan", "positions", lambda good: torch.tensor(good).float(), "float32"),
    ("CompactPagedPrefill.plan", "region_count", lambda good: 0, "0"),
    ("CompactPagedPrefill.plan", "block_size", lambda good: 12, "12"),
    ("CompactPagedPrefill.plan", "contiguous_query", lambda good: 1, "1"),
    ("CompactPagedPrefill.fixup_positions", "positions", shorter, "3"),
    ("CompactPagedPrefill.fixup_positions", "positions", lambda good: good.tolist(), "list"),
    ("CompactPagedPrefill.page_metadata", "table", lambda good: good.long(), "int64"),
    ("CompactPagedPrefill.page_metadata", "table", lambda good: None, "None"),
    ("CompactPagedPrefill.page_metadata", "owners", lambda good: good.long(), "int64"),
    ("CompactPagedPrefill.page_metadata", "owners", lambda good: None, "None"),
    ("CompactPagedPrefill.page_metadata", "end", lambda good: 5, "5"),
    ("CompactPagedPrefill.page_metadata", "page_stride", lambda good: 0, "0"),
    ("CompactPagedPrefill.prepare_chunk", "query", shorter, "3, 2, 8"),
    ("CompactPagedPrefill.prepare_chunk", "query|contiguous_query", lambda good: good.half(), "float16"),
    ("CompactPagedPrefill.prepare_chunk", "cache", lambda good: good[:, :, :8].contiguous(), "8"),
    ("CompactPagedPrefill.prepare_chunk", "cache", lambda good: None, "None"),
    ("CompactPagedPrefill.prepare_chunk", "regions", lambda good: good[:, :2], "4, 2"),
    ("CompactPagedPrefill.prepare_chunk", "regions", lambda good: good.long(), "int64"),
    ("CompactPagedPrefill.prepare_chunk", "table", lambda good: good.long(), "int64"),
    ("CompactPagedPrefill.prepare_chunk", "owners", shorter, "3"),
    ("CompactPagedPrefill.prepare_chunk", "start|indptr|contiguous_query", lambda good: 6, ""),
    ("CompactPagedPrefill.finish", "query", shorter, "3"),
    ("CompactPagedPrefill.finish", "query", lambda good: None, "None"),
    ("CompactPagedPrefill.finish", "cache", lambda good: good.float(), "float32"),
    ("CompactPagedPrefill.finish", "out", shorter, "3"),
    ("CompactPagedPrefill.finish", "out", lambda good: good.float(), "float32"),
]
CASES = [*generated(), *SPECIFIC]
# The argument that a case replaces, where the message names a part of it.
PARTS = {
    "stage_keys": {"block_table": "chunk", "cu_seq_lens": "chunk", "token_to_seq": "chunk"},
    "score_keys": {"q_scale": "q"},
    "prefill_chunks": {"q_scale": "q"},
    "prepare_prefill_metadata": dict.fromkeys(
        "max_prefill_seq_len block_table cu_seq_lens token_to_seq cu_seqlen_ks cu_seqlen_ke token_start token_end num_reqs"
        " total_seq_lens max_seqlen_k request_set".split(),
        "metadata",
    ),
    "stage_prefill_pages": {"pages": "staged"},
}


def storage_of(arguments, names):
    return [ref.storage_bytes(arguments[name]).clone() for name in names if arguments[name].device.type == "cpu"]


def run(name, argument, change):
    """Calls with one bad argument; returns the error after checking that nothing was written."""
    function = FUNCTIONS[name]
    arguments = function.good()
    replaced = PARTS.get(name, {}).get(argument, argument.partition("|")[0])
    arguments[replaced] = change(arguments[replaced])
    written = [m for m in function.mutates if isinstance(arguments[m], torch.Tensor)]
    before = storage_of(arguments, written)
    with pytest.raises((ValueError, TypeError)) as caught:
        function.call(**arguments)
    assert type(caught.value) in (ValueError, TypeError)
    for a, b in zip(storage_of(arguments, written), before, strict=True):
        assert torch.equal(a, b), "a refused call wrote"
    return str(caught.value)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_good_arguments_are_accepted(name):
    function = FUNCTIONS[name]
    function.call(**function.good())


@pytest.mark.parametrize(
    "name, argument, change, was", CASES, ids=[f"{name}-{argument}-{i}" for i, (name, argument, *_) in enumerate(CASES)]
)
def test_message_names_the_argument_what_it_was_and_what_it_must_be(name, argument, change, was):
    message = run(name, argument, change)
    head, _, rest = message.partition(": ")
    # A method's checks are those of the function that it calls.
    assert name.startswith(head) or head in FUNCTIONS or head in ("store_owners",), message
    named, _, required = rest.partition(", must ")
    assert any(part in named for part in argument.split("|")), message
    assert required, message
    assert was in named, message


GRAD = [
    (name, argument)
    for name, function in FUNCTIONS.items()
    for argument, value in function.good().items()
    if isinstance(value, torch.Tensor) and value.dtype.is_floating_point
]


@pytest.mark.parametrize("name, argument", GRAD)
def test_an_input_that_requires_grad_is_refused_under_grad_mode_only(name, argument):
    function = FUNCTIONS[name]
    arguments = function.good()
    arguments[argument].requires_grad_()
    before = storage_of(arguments, function.mutates)
    if name not in ("quantize_mxfp4", "kv_page_stride", "kv_page_count", "view_sparse_kv_pages"):
        with torch.enable_grad(), pytest.raises(ValueError, match=f"{argument}.*requires? grad|contiguous_query.*grad"):
            function.call(**arguments)
        for a, b in zip(storage_of(arguments, function.mutates), before, strict=True):
            assert torch.equal(a, b)
    with torch.no_grad():
        function.call(**arguments)


# A read argument may not share memory with a written one


def overlapping(name):
    """Arguments of which one read and one written share memory, for every such pair that dtypes allow."""
    storage = torch.zeros(1 << 16, dtype=torch.uint8)

    def at(like, offset=0):
        size = like.numel() * like.element_size()
        view = storage[offset : offset + size].view(like.dtype).view(like.shape)
        return view.copy_(like)

    arguments = FUNCTIONS[name].good()
    flat = [key for key, value in arguments.items() if isinstance(value, torch.Tensor)]
    for written in FUNCTIONS[name].mutates:
        for read in flat:
            if read != written:
                changed = dict(arguments)
                changed[written] = at(arguments[written])
                changed[read] = at(arguments[read], arguments[written].nbytes // 2 // 8 * 8)
                yield written, read, changed


PAIRS = [
    (name, written, read) for name, function in FUNCTIONS.items() if function.mutates for written, read, _ in overlapping(name)
]


@pytest.mark.parametrize("name, written, read", PAIRS)
def test_an_argument_that_overlaps_a_written_one_is_refused(name, written, read):
    (arguments,) = (changed for w, r, changed in overlapping(name) if (w, r) == (written, read))
    before = ref.storage_bytes(arguments[written]).clone()
    with pytest.raises(ValueError, match=rf"{read}|{written}") as caught:
        FUNCTIONS[name].call(**arguments)
    assert "overlap" in str(caught.value) or "memory" in str(caught.value)
    assert torch.equal(ref.storage_bytes(arguments[written]), before)


def test_the_same_tensor_as_query_and_output_is_refused():
    arguments = good_attention()
    arguments["query"] = arguments["out"]
    with pytest.raises(ValueError, match="query.*out|out.*query"):
        sp.paged_attention(**arguments)
    assert (arguments["out"] == 7.0).all()


def test_neighbours_in_one_storage_are_no_overlap():
    """K, V, query and output buffers are often cut from one allocation."""
    arguments = good_attention()
    both = torch.zeros(2, ROWS, HEADS, DIM, dtype=torch.bfloat16)
    both[0] = arguments["query"]
    sp.paged_attention(**{**arguments, "query": both[0], "out": both[1]})
    beside = torch.zeros(ROWS, 2, HEADS, DIM, dtype=torch.bfloat16)
    beside[:, 0] = arguments["query"]
    sp.paged_attention(**{**arguments, "query": beside[:, 0], "out": beside[:, 1]})
    sp.paged_attention(**arguments)
    assert torch.equal(both[1], arguments["out"]) and torch.equal(beside[:, 1], arguments["out"])


def test_a_layer_of_a_merged_cache_is_no_overlap_of_another():
    """Two layers in one block row: index keys of one are written while the other's are read elsewhere."""
    merged = torch.zeros(3, 2, 4352, dtype=torch.uint8)
    caches = [merged[:, layer].unflatten(1, (64, 68)) for layer in range(2)]
    keys = torch.randn(3, 128).bfloat16()
    sp.store_index_keys(keys, caches[0], torch.arange(3))
    assert merged[:, 0].any() and not merged[:, 1].any()


# What a plan is asked at the wrong time


def test_prepare_chunk_needs_a_plan_that_owns_the_query():
    with pytest.raises(ValueError, match="contiguous_query"):
        plan_of().prepare_chunk(**good_prepare_chunk())


def test_stale_metadata_is_refused():
    """Prepared for a step of more rows than out has, or with other ranks: named before anything is written."""
    arguments = good_prefill()
    part = slice(0, 2)
    q, q_scale = arguments["q"]
    out = arguments["out"][part]
    before = out.clone()
    with pytest.raises(ValueError, match="chunks"):
        sp.prefill_chunks(**{**arguments, "q": (q[part], q_scale[part]), "weights": arguments["weights"][part], "out": out})
    assert torch.equal(out, before)


# Under torch.compile the same text comes inside torch's own exception


COMPILED = [
    ("select_keys", "logits", lambda good: good.double()),
    ("select_keys", "ks", shorter),
    ("score_keys", "weights", wider(1)),
    ("append_own_region", "positions", shorter),
    ("stage_keys", "cache", index_strides(4351, 68, 1)),
    ("fill_prefill_pages", "contiguous_query", lambda good: good.half()),
    ("paged_attention", "owners", shorter),
    ("paged_attention", "backend", lambda good: "no such name"),
    ("prefill_chunks", "out", shorter),
    ("store_index_keys", "slot_mapping", wider(0)),
]


@pytest.mark.parametrize("name, argument, change", COMPILED, ids=[f"{name}-{argument}" for name, argument, _ in COMPILED])
def test_compiled_errors_carry_the_same_text(name, argument, change, fresh_compile):
    message = run(name, argument, change)
    function = FUNCTIONS[name]
    arguments = function.good()
    arguments[argument] = change(arguments[argument])
    before = storage_of(arguments, function.mutates)
    with pytest.raises(Exception) as caught:
        torch.compile(function.call, backend="eager", fullgraph=True)(**arguments)
    assert message in str(caught.value)
    for a, b in zip(storage_of(arguments, function.mutates), before, strict=True):
        assert torch.equal(a, b)
