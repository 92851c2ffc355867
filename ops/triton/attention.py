"""Paged attention of rows that each list their own 8-token pages.

Two kernels share the work, and a pass on the device decides per tile of 8 rows which of them takes it (unions.py):

- the union kernel walks the pages that any of the tile's rows picked once, all rows and heads of the tile on the M side of the
  matrix products, with one bit a row and page for a mask;
- the row kernel walks one row's own list.

A tile's first step is every row's own last page, which alone is partly filled; after it the history pages need no token
masks, and every row that has pages has seen a token, so that no later step can meet a row without a maximum.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .fp8 import decode_e4m3, has_native_e4m3
from .unions import ROWS_PER_TILE, build_unions, row_range

PAGE = 8
# Lower than any score, yet finite: exp2 of a difference to it is 0 or 1, never NaN.
_LOWEST = tl.constexpr(-3.0e38)
_LOG2_E = 1.4426950408889634


@triton.jit
def _load_kv(pointers, mask, FP8: tl.constexpr, NATIVE: tl.constexpr, dtype: tl.constexpr):
    if mask is None:
        value = tl.load(pointers)
    else:
        value = tl.load(pointers, mask=mask, other=0)
    if FP8:
        # Every e4m3 value is exact in fp16 and in bf16; the scales are applied to the scores and to the result.
        value = decode_e4m3(value, NATIVE).to(dtype)
    return value


@triton.jit
def _load_half(
    rows_of_cache,
    seen,
    first: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    half: tl.constexpr,
    MASKED: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    dtype: tl.constexpr,
):
    """[tokens, SIZE] of the K half (0) or V half (1), elements first.. of the head; tokens not seen are zero if MASKED."""
    column = first + tl.arange(0, SIZE)
    pointers = rows_of_cache[:, None] + (half * DIM + column)[None, :]
    if first + SIZE > DIM:
        if MASKED:
            return _load_kv(pointers, seen[:, None] & (column < DIM)[None, :], FP8, NATIVE, dtype)
        return _load_kv(pointers, (column < DIM)[None, :], FP8, NATIVE, dtype)
    if MASKED:
        return _load_kv(pointers, seen[:, None], FP8, NATIVE, dtype)
    return _load_kv(pointers, None, FP8, NATIVE, dtype)


@triton.jit
def _dot(a, b, acc, IEEE: tl.constexpr):
    if IEEE:
        return tl.dot(a, b, acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def _attend(
    q0,
    q1,
    acc0,
    acc1,
    top,
    norm,
    rows_of_cache,
    seen,
    visible,
    scale_log2,
    DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    MASKED: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    IEEE: tl.constexpr,
):
    """One step of the online softmax. visible [M, N] or [1, N]; seen [N]: tokens that some row sees."""
    dtype: tl.constexpr = q0.dtype
    k0 = _load_half(rows_of_cache, seen, 0, D0, DIM, 0, MASKED, FP8, NATIVE, dtype)
    score = _dot(q0, tl.trans(k0), None, IEEE)
    if D1 > 0:
        k1 = _load_half(rows_of_cache, seen, D0, D1, DIM, 0, MASKED, FP8, NATIVE, dtype)
        score = _dot(q1, tl.trans(k1), score, IEEE)
    v0 = _load_half(rows_of_cache, seen, 0, D0, DIM, 1, MASKED, FP8, NATIVE, dtype)
    score = tl.where(visible, score * scale_log2, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    weight = tl.exp2(score - higher[:, None])
    shrink = tl.exp2(top - higher)
    norm = norm * shrink + tl.sum(weight, 1)
    weight = weight.to(dtype)
    acc0 = _dot(weight, v0, acc0 * shrink[:, None], IEEE)
    if D1 > 0:
        v1 = _load_half(rows_of_cache, seen, D0, D1, DIM, 1, MASKED, FP8, NATIVE, dtype)
        acc1 = _dot(weight, v1, acc1 * shrink[:, None], IEEE)
    return acc0, acc1, higher, norm


@triton.jit
def _load_query(pointers, live, first: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr):
    column = first + tl.arange(0, SIZE)
    return tl.load(pointers[:, None] + column[None, :], mask=live[:, None] & (column < DIM)[None, :], other=0)


@triton.jit
def _store_result(pointers, acc, norm, v_scale, live, first: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr):
    column = first + tl.arange(0, SIZE)
    # A row that saw no token gives exactly zero.
    value = acc * tl.where(norm == 0, 0.0, v_scale / norm)[:, None]
    tl.store(
        pointers[:, None] + column[None, :],
        value.to(pointers.dtype.element_ty),
        mask=live[:, None] & (column < DIM)[None, :],
    )


# What changes from step to step is not specialized on: nothing compiles again, in a capture least of all.
_PER_STEP = ["rows", "pages_size", "page_limit"]


@triton.jit(do_not_specialize=_PER_STEP)
def _union_kernel(
    query,
    cache,
    pages,
    indptr,
    last_page_len,
    lists,
    bits,
    counts,
    out,
    k_scale,
    v_scale,
    scale_log2,
    rows,
    pages_size,
    page_limit,
    list_stride,
    stride_query_row,
    stride_query_head,
    stride_page,
    stride_token,
    stride_out_row,
    stride_out_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    IEEE: tl.constexpr,
):
    tile = tl.program_id(0)
    count = tl.load(counts + tile)
    if count < 0:
        return
    line = tl.arange(0, ROWS * GROUP)
    tile_row = line // GROUP
    row = tile.to(tl.int64) * ROWS + tile_row
    head = line % GROUP
    live = (row < rows) & (head < HEADS)
    query_rows = query + row * stride_query_row + head.to(tl.int64) * stride_query_head
    q0 = _load_query(query_rows, live, 0, D0, DIM)
    acc0 = tl.zeros([ROWS * GROUP, D0], tl.float32)
    if D1 > 0:
        q1 = _load_query(query_rows, live, D0, D1, DIM)
        acc1 = tl.zeros([ROWS * GROUP, D1], tl.float32)
    else:
        q1 = q0
        acc1 = acc0
    v_factor = 1.0
    if FP8:
        scale_log2 = scale_log2 * tl.load(k_scale)
        v_factor = tl.load(v_scale)
    top = tl.full([ROWS * GROUP], _LOWEST, tl.float32)
    norm = tl.zeros([ROWS * GROUP], tl.float32)

    lists += tile.to(tl.int64) * list_stride
    bits += tile.to(tl.int64) * list_stride
    # Every row's own last page: eight pages of eight tokens, one page a row.
    OWN: tl.constexpr = TOKENS if TOKENS < ROWS * 8 else ROWS * 8
    for first_own in tl.static_range(0, ROWS * 8, OWN):
        own = first_own + tl.arange(0, OWN)
        own_row = tile.to(tl.int64) * ROWS + own // 8
        length = tl.load(last_page_len + own_row, mask=own_row < rows, other=0)
        picked = tl.load(bits + own // 8).to(tl.int32)
        seen = (picked != 0) & (own % 8 < tl.minimum(tl.maximum(length, 1), 8))
        page = tl.load(lists + own // 8).to(tl.int64)
        tokens = cache + page * stride_page + (own % 8).to(tl.int64) * stride_token
        acc0, acc1, top, norm = _attend(
            q0, q1, acc0, acc1, top, norm, tokens, seen, (tile_row[:, None] == (own // 8)[None, :]) & seen[None, :], scale_log2,
            DIM, D0, D1, True, FP8, NATIVE, IEEE,
        )  # fmt: skip

    token = tl.arange(0, TOKENS)
    in_page = (token % 8).to(tl.int64) * stride_token
    for first in tl.range(ROWS, ROWS + count, TOKENS // 8, num_stages=STAGES):
        listed = tl.load(lists + first + token // 8).to(tl.int64)
        chosen = tl.load(bits + first + token // 8).to(tl.int32)
        places = cache + listed * stride_page + in_page
        visible = ((chosen[None, :] >> tile_row[:, None]) & 1) != 0
        acc0, acc1, top, norm = _attend(
            q0, q1, acc0, acc1, top, norm, places, token >= 0, visible, scale_log2,
            DIM, D0, D1, False, FP8, NATIVE, IEEE,
        )  # fmt: skip

    # A weight of 0 times a NaN or an infinity that only another row of the tile picked is NaN: the row kernel, which runs next,
    # walks such a tile again.
    total = tl.sum(acc0, 1)
    if D1 > 0:
        total += tl.sum(acc1, 1)
    tl.store(counts + tile + tile_row * 0, -1 + tile_row * 0, mask=total != total)
    out_rows = out + row * stride_out_row + head.to(tl.int64) * stride_out_head
    _store_result(out_rows, acc0, norm, v_factor, live, 0, D0, DIM)
    if D1 > 0:
        _store_result(out_rows, acc1, norm, v_factor, live, D0, D1, DIM)


@triton.jit(do_not_specialize=_PER_STEP)
def _row_kernel(
    query,
    cache,
    pages,
    indptr,
    last_page_len,
    counts,
    out,
    k_scale,
    v_scale,
    scale_log2,
    rows,
    pages_size,
    page_limit,
    stride_query_row,
    stride_query_head,
    stride_page,
    stride_token,
    stride_out_row,
    stride_out_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    IEEE: tl.constexpr,
    DECIDED: tl.constexpr,
):
    row = tl.program_id(0)
    if DECIDED:
        if tl.load(counts + row // ROWS) >= 0:
            return
    head = tl.arange(0, GROUP)
    live = head < HEADS
    query_rows = query + row.to(tl.int64) * stride_query_row + head.to(tl.int64) * stride_query_head
    q0 = _load_query(query_rows, live, 0, D0, DIM)
    acc0 = tl.zeros([GROUP, D0], tl.float32)
    if D1 > 0:
        q1 = _load_query(query_rows, live, D0, D1, DIM)
        acc1 = tl.zeros([GROUP, D1], tl.float32)
    else:
        q1 = q0
        acc1 = acc0
    v_factor = 1.0
    if FP8:
        scale_log2 = scale_log2 * tl.load(k_scale)
        v_factor = tl.load(v_scale)
    top = tl.full([GROUP], _LOWEST, tl.float32)
    norm = tl.zeros([GROUP], tl.float32)

    begin, end = row_range(indptr, row.to(tl.int64), row < rows, pages_size)
    length = tl.minimum(tl.maximum(tl.load(last_page_len + row), 1), 8)
    count = (end - begin).to(tl.int32)
    visible_tokens = count * 8 - 8 + length
    pages += begin
    token = tl.arange(0, TOKENS)
    in_page = (token % 8).to(tl.int64) * stride_token
    full = visible_tokens // TOKENS * TOKENS
    for first in tl.range(0, full, TOKENS, num_stages=STAGES):
        page = tl.load(pages + (first + token) // 8)
        page = tl.minimum(tl.maximum(page, 0), page_limit - 1).to(tl.int64)
        tokens = cache + page * stride_page + in_page
        acc0, acc1, top, norm = _attend(
            q0, q1, acc0, acc1, top, norm, tokens, token >= 0, (token >= 0)[None, :], scale_log2,
            DIM, D0, D1, False, FP8, NATIVE, IEEE,
        )  # fmt: skip
    if full < visible_tokens:
        seen = full + token < visible_tokens
        page = tl.load(pages + (full + token) // 8, mask=seen, other=0)
        page = tl.minimum(tl.maximum(page, 0), page_limit - 1).to(tl.int64)
        tokens = cache + page * stride_page + in_page
        acc0, acc1, top, norm = _attend(
            q0, q1, acc0, acc1, top, norm, tokens, seen, seen[None, :], scale_log2,
            DIM, D0, D1, True, FP8, NATIVE, IEEE,
        )  # fmt: skip

    out_rows = out + row.to(tl.int64) * stride_out_row + head.to(tl.int64) * stride_out_head
    _store_result(out_rows, acc0, norm, v_factor, live, 0, D0, DIM)
    if D1 > 0:
        _store_result(out_rows, acc1, norm, v_factor, live, D0, D1, DIM)


@dataclass(frozen=True)
class Walk:
    """How a kernel walks its pages: tokens a step, warps, pipeline stages."""

    tokens: int
    warps: int
    stages: int


# Tuned on an H200, 2026-11-30, over random and shared regions; keyed by the padded head_dim. Many rows: one warp a row, so that
# many rows' gathers are in flight at once. Few rows: several warps, since a row's own latency is what counts. Where a GPU has
# less shared memory, _fit takes fewer stages, then fewer tokens.
_UNION_WALKS = {64: Walk(128, 8, 3), 128: Walk(64, 8, 3), 192: Walk(64, 8, 3), 256: Walk(32, 8, 3)}
_MANY_ROW_WALKS = {64: Walk(32, 1, 5), 128: Walk(32, 1, 5), 192: Walk(16, 1, 4), 256: Walk(16, 1, 4)}
_MANY_FP8_ROW_WALKS = {64: Walk(32, 1, 3), 128: Walk(32, 1, 3), 192: Walk(64, 2, 4), 256: Walk(64, 4, 4)}
_FEW_ROW_WALKS = {64: Walk(128, 4, 4), 128: Walk(128, 4, 4), 192: Walk(128, 4, 4), 256: Walk(64, 4, 4)}
# Rows a multiprocessor from which rows are many, and from which unions are built.
MANY_ROWS = 4
# Query heads that one program takes; more are walked in several passes.
HEADS_A_PASS = 16
MAX_HEAD_DIM = 256


def padded_dims(dim):
    """The head_dim as one or two power-of-two pieces: 192 is 128 + 64, others are rounded up to a power of two."""
    if dim == 192:
        return 128, 64
    return max(triton.next_power_of_2(dim), 16), 0


def _fit(walk, width, itemsize, resident, shared_memory):
    tokens, stages = walk.tokens, walk.stages
    step = 2 * width * itemsize
    resident += 16384  # conversions between register layouts
    while stages > 1 and resident + tokens * step * (stages - 1) > shared_memory:
        stages -= 1
    while tokens > 16 and resident + tokens * step * max(stages - 1, 1) > shared_memory:
        tokens //= 2
    return Walk(tokens, walk.warps, stages)


@functools.lru_cache(None)
def walks(dim, itemsize, fp8, many_rows, shared_memory):
    """The union and the row kernel's Walk for a head_dim, the bytes of a query element, and a GPU's shared memory in bytes."""
    width = sum(padded_dims(dim))
    key = min(entry for entry in _UNION_WALKS if entry >= width)
    rows = (_MANY_FP8_ROW_WALKS if fp8 else _MANY_ROW_WALKS) if many_rows else _FEW_ROW_WALKS
    query = HEADS_A_PASS * width * itemsize
    return (
        _fit(_UNION_WALKS[key], width, itemsize, ROWS_PER_TILE * query, shared_memory),
        _fit(rows[key], width, itemsize, query, shared_memory),
    )


@functools.lru_cache(None)
def _device_facts(device):
    """(multiprocessors, shared memory of a program, whether attention_hopper.py runs); stand-ins for the interpreter."""
    if device.type != "cuda":
        return 1, 65536, False
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or 65536
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)
    return properties.multi_processor_count, shared, hopper


def view_pages(cache):
    """(pages, elements from page to page) of the cache's view in 8-token pages."""
    page_stride = PAGE * cache.stride(2)
    blocks = cache.shape[0]
    if blocks == 0:
        return 0, page_stride
    return ((blocks - 1) * cache.stride(0) + cache.shape[2] * cache.stride(2)) // page_stride, page_stride


def _takes_bulk_copies(cache, heads, dim, page_limit, scale):
    """Whether attention_hopper.py, on a GPU that runs it, can walk this cache's unions."""
    return (
        cache.element_size() == 2
        and dim in (64, 128, 192, 256)
        and heads > 4
        and cache.data_ptr() % 16 == 0
        and cache.stride(2) % 8 == 0
        # The copy engine's coordinates are 32 bits wide, and the maximum is taken before scaling.
        and page_limit * PAGE < 2**31
        and scale > 0
    )


def union_heads(shared_memory):
    """Query heads that the union kernel takes at a time: 8 rows of 16 heads need over 100 KiB on GPUs without wgmma."""
    return 8 if 65536 < shared_memory < 131072 else HEADS_A_PASS


def launch(query, cache, pages, indptr, last_page_len, owners, out, scale, k_scale, v_scale, share=None, bulk_copies=None):
    """The kernels of one call. share: whether to build unions; bulk_copies: whether attention_hopper.py walks them."""
    rows, all_heads, dim = out.shape
    page_limit, page_stride = view_pages(cache)
    fp8 = cache.element_size() == 1
    if fp8 and cache.dtype is not torch.uint8:
        cache = cache.view(torch.uint8)
    multiprocessors, shared_memory, hopper = _device_facts(cache.device)
    many_rows = rows >= MANY_ROWS * multiprocessors
    union_walk, row_walk = walks(dim, query.element_size(), fp8, many_rows, shared_memory)
    d0, d1 = padded_dims(dim)
    scale_log2 = scale * _LOG2_E
    strides = (query.stride(0), query.stride(1), page_stride, cache.stride(2), out.stride(0), out.stride(1))
    kinds = {
        "ROWS": ROWS_PER_TILE, "DIM": dim, "D0": d0, "D1": d1,
        "FP8": fp8, "NATIVE": fp8 and has_native_e4m3(cache.device), "IEEE": query.dtype is torch.float32,
    }  # fmt: skip

    def passes(step):
        """(query, out, heads) of every `step` heads."""
        if all_heads <= step:
            return [(query, out, all_heads)]
        firsts = range(0, all_heads, step)
        return [(query[:, i : i + step], out[:, i : i + step], min(step, all_heads - i)) for i in firsts]

    if share is None:
        # fp32 is multiplied without tensor cores, which leaves nothing to share.
        share = many_rows and query.dtype is not torch.float32
    counts = None
    if share:
        lists, bits, counts = build_unions(pages, indptr, owners, rows, page_limit, multiprocessors)
        for some_query, some_out, heads in passes(union_heads(shared_memory)):
            group = max(triton.next_power_of_2(heads), 2)
            if bulk_copies is None:
                bulk_copies = hopper and _takes_bulk_copies(cache, heads, dim, page_limit, scale)
            if bulk_copies:
                from .attention_hopper import walk_unions

                walk_unions(some_query, cache, page_limit, last_page_len, lists, bits, counts, some_out, scale_log2, group)
            else:
                _union_kernel[(counts.shape[0],)](
                    some_query, cache, pages, indptr, last_page_len, lists, bits, counts, some_out, k_scale, v_scale, scale_log2,
                    rows, pages.shape[0], page_limit, lists.stride(0), *strides,
                    HEADS=heads, GROUP=group, TOKENS=union_walk.tokens, STAGES=union_walk.stages, num_warps=union_walk.warps,
                    **kinds,
                )  # fmt: skip
    for some_query, some_out, heads in passes(HEADS_A_PASS):
        _row_kernel[(rows,)](
            some_query, cache, pages, indptr, last_page_len, counts, some_out, k_scale, v_scale, scale_log2,
            rows, pages.shape[0], page_limit, *strides,
            HEADS=heads, GROUP=max(triton.next_power_of_2(heads), 16), TOKENS=row_walk.tokens, STAGES=row_walk.stages,
            num_warps=row_walk.warps, DECIDED=share, **kinds,
        )  # fmt: skip


def paged_attention(query, cache, pages, indptr, last_page_len, owners, out, scale, k_scale, v_scale, backend):
    """backend "auto" is "triton" on every GPU: no measurement and no other package decides."""
    dim = query.shape[2]
    if backend == "flashinfer":
        from .. import flashinfer

        flashinfer.check("paged_attention", query.shape[1], dim, query.dtype, cache.dtype)
    elif dim > MAX_HEAD_DIM:
        raise ValueError(f"paged_attention: query had head_dim {dim}, must have at most {MAX_HEAD_DIM} with backend 'triton'")
    if out.numel() == 0:
        return
    if cache.numel() == 0 or pages.numel() == 0:
        out.zero_()
        return
    if backend == "flashinfer":
        flashinfer.paged_attention(query, cache, pages, indptr, last_page_len, out, scale)
        return
    launch(query, cache, pages, indptr, last_page_len, owners, out, scale, k_scale, v_scale)
