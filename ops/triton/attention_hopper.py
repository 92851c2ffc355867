"""The union walk on Hopper: two warps bring pages in with the bulk copy engine while warpgroups multiply.

The same walk as attention.py's union kernel over the same lists (unions.py), written in Gluon because it needs what Triton's
own pipelining does not give: a page of 8 tokens is exactly one 1,024-byte swizzle atom for every 64 elements, so that a gather
of pages is a handful of bulk copies that land where wgmma wants them; and each warpgroup starts the scores of a step before the
sums of the step before it are done, so that the tensor cores do not wait for exponentials.

Compute capability 9.0, bf16 or fp16, head_dim 64, 128, 192 or 256, 16-byte aligned token rows. Anything else takes attention.py.
"""

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_LOWEST = gl.constexpr(-3.0e38)


@gluon.constexpr_function
def _product_layout(columns):
    """wgmma's register layout of a [64, columns] result of one warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _copy_pages(descriptor, pages, column, target, stage, barrier, PAGES: gl.constexpr, SIZE: gl.constexpr):
    """SIZE elements from column on of every page, each page's 64-element pieces to their places in the stage."""
    pieces: gl.constexpr = SIZE // 64
    for j in gl.static_range(PAGES):
        for c in gl.static_range(pieces):
            tma.async_copy_global_to_shared(
                descriptor,
                [pages[j] * 8, column + c * 64],
                barrier,
                target.index((stage * pieces + c) * PAGES + j),
            )


@gluon.jit
def _produce(
    descriptor,
    lists,
    steps,
    tile0,
    tile1,
    full,
    empty,
    COLUMN: gl.constexpr,
    D0: gl.constexpr,
    D1: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warp's part: the K half (COLUMN 0) or the V half of every step's pages, a stage at a time."""
    dtype: gl.constexpr = tile0.dtype
    step_pages: gl.constexpr = TOKENS // 8
    atom: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    atoms0 = tile0._reinterpret(dtype, [STAGES * (D0 // 64) * step_pages, 8, 64], atom)
    if D1 > 0:
        atoms1 = tile1._reinterpret(dtype, [STAGES * (D1 // 64) * step_pages, 8, 64], atom)
    for i in range(steps):
        stage = i % STAGES
        pages = ()
        for j in gl.static_range(step_pages):
            pages = pages + (gl.load(lists + i * step_pages + j),)
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), TOKENS * (D0 + D1) * 2)
        _copy_pages(descriptor, pages, COLUMN, atoms0, stage, full.index(stage), step_pages, D0)
        if D1 > 0:
            _copy_pages(descriptor, pages, COLUMN + D0, atoms1, stage, full.index(stage), step_pages, D1)


@gluon.jit
def _hide_rows(tile, seen_rows, layout: gl.constexpr):
    """Zeroes the token rows of a V tile that no row sees: a weight of 0 times NaN would be NaN."""
    value = tile.load(layout)
    seen = gl.convert_layout(seen_rows, gl.SliceLayout(1, layout))
    tile.store(gl.where(seen[:, None], value, 0.0).to(tile.dtype))


@gluon.jit
def _store_query(query_rows, live, q_tile, first: gl.constexpr, SIZE: gl.constexpr, layout: gl.constexpr):
    column = first + gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))
    pointers = gl.convert_layout(query_rows, gl.SliceLayout(1, layout))
    mask = gl.convert_layout(live, gl.SliceLayout(1, layout))
    q_tile.store(gl.load(pointers[:, None] + column[None, :], mask=mask[:, None], other=0.0))


@gluon.jit
def _store_output(out_rows, acc, norm, live, first: gl.constexpr, SIZE: gl.constexpr, layout: gl.constexpr):
    column = first + gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))
    pointers = gl.convert_layout(out_rows, gl.SliceLayout(1, layout))
    mask = gl.convert_layout(live, gl.SliceLayout(1, layout))
    inverse = gl.convert_layout(gl.where(norm == 0, 0.0, 1.0 / norm), gl.SliceLayout(1, layout))
    # A row that saw no token gives exactly zero.
    value = acc * inverse[:, None]
    gl.store(pointers[:, None] + column[None, :], value.to(out_rows.dtype.element_ty), mask=mask[:, None])


@gluon.jit
def _consume(
    query,
    out,
    last_page_len,
    words,
    count_of_tile,
    scale_log2,
    tile,
    rows,
    steps,
    stride_query_row,
    stride_query_head,
    stride_out_row,
    stride_out_head,
    q0,
    q1,
    k0,
    k1,
    v0,
    v1,
    k_full,
    k_empty,
    v_full,
    v_empty,
    WARPGROUP: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D0: gl.constexpr,
    D1: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):
    dtype: gl.constexpr = k0.dtype
    score_layout: gl.constexpr = _product_layout(TOKENS)
    acc0_layout: gl.constexpr = _product_layout(D0)
    acc1_layout: gl.constexpr = _product_layout(max(D1, 64))
    # Weights are the left operand from registers; their layout does not depend on the width of the product.
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, acc0_layout, 2)
    weight1_layout: gl.constexpr = gl.DotOperandLayout(0, acc1_layout, 2)
    line_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    column_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

    line = gl.arange(0, 64, layout=line_layout)
    tile_row = WARPGROUP * (64 // GROUP) + line // GROUP
    row = tile.to(gl.int64) * 8 + tile_row
    head = line % GROUP
    live = (row < rows) & (head < HEADS)

    q0 = q0.index(WARPGROUP)
    query_rows = query + row * stride_query_row + head.to(gl.int64) * stride_query_head
    _store_query(query_rows, live, q0, 0, D0, blocked)
    if D1 > 0:
        q1 = q1.index(WARPGROUP)
        _store_query(query_rows, live, q1, D0, D1, blocked)
    fence_async_shared()

    zero = gl.zeros([64, TOKENS], gl.float32, layout=score_layout)
    acc0 = gl.zeros([64, D0], gl.float32, layout=acc0_layout)
    if D1 > 0:
        acc1 = gl.zeros([64, D1], gl.float32, layout=acc1_layout)

    # Step 0: every row's own last page, one page a row, of which it sees the first last_page_len tokens.
    token = gl.arange(0, TOKENS, layout=column_layout)
    own_row = tile.to(gl.int64) * 8 + (token >> 3)
    length = gl.load(last_page_len + own_row, mask=own_row < rows, other=0)
    length = gl.minimum(gl.maximum(length, 1), 8)
    word = gl.load(words)
    picked = ((word >> ((token >> 3) * 9).to(gl.int64)) & 1) != 0
    seen = picked & ((token & 7) < length)
    mbarrier.wait(k_full.index(0), 0)
    score = warpgroup_mma(q0, k0.index(0).permute((1, 0)), zero, use_acc=False)
    if D1 > 0:
        score = warpgroup_mma(q1, k1.index(0).permute((1, 0)), score)
    mbarrier.arrive(k_empty.index(0), count=1)
    visible = seen[None, :] & (tile_row[:, None] == (token >> 3)[None, :])
    score = gl.where(visible, score, float("-inf"))
    # The scale is positive, so the maximum may be taken before scaling.
    top = gl.maximum(gl.max(score, 1) * scale_log2, _LOWEST)
    weight = gl.exp2(score * scale_log2 - top[:, None])
    norm = gl.sum(weight, 1)
    weight0 = gl.convert_layout(weight.to(dtype), weight_layout)

    mbarrier.wait(v_full.index(0), 0)
    # Both warpgroups write the same bits, so neither needs to wait for the other.
    _hide_rows(v0.index(0), seen, blocked)
    if D1 > 0:
        _hide_rows(v1.index(0), seen, blocked)
    fence_async_shared()

    for i in range(1, steps):
        stage = i % STAGES
        last = (i - 1) % STAGES
        word = gl.load(words + i)
        mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
        score = warpgroup_mma(q0, k0.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        if D1 > 0:
            score = warpgroup_mma(q1, k1.index(stage).permute((1, 0)), score, is_async=True)
        mbarrier.wait(v_full.index(last), ((i - 1) // STAGES) & 1)
        acc0 = warpgroup_mma(weight0, v0.index(last), acc0, is_async=True)
        if D1 > 0:
            weight1 = gl.convert_layout(weight0, weight1_layout)
            acc1 = warpgroup_mma(weight1, v1.index(last), acc1, is_async=True)
            score = warpgroup_mma_wait(2, deps=[score])
        else:
            score = warpgroup_mma_wait(1, deps=[score])
        mbarrier.arrive(k_empty.index(stage), count=1)

        of_row = word >> tile_row.to(gl.int64)
        visible = ((of_row[:, None] >> ((token >> 3) * 8).to(gl.int64)[None, :]) & 1) != 0
        score = gl.where(visible, score, float("-inf"))
        higher = gl.maximum(gl.max(score, 1) * scale_log2, top)
        weight = gl.exp2(score * scale_log2 - higher[:, None])
        shrink = gl.exp2(top - higher)
        norm = norm * shrink + gl.sum(weight, 1)
        top = higher
        if D1 > 0:
            acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        else:
            acc0 = warpgroup_mma_wait(0, deps=[acc0])
        mbarrier.arrive(v_empty.index(last), count=1)
        weight0 = gl.convert_layout(weight.to(dtype), weight_layout)
        acc0 = acc0 * gl.convert_layout(shrink, gl.SliceLayout(1, acc0_layout))[:, None]
        if D1 > 0:
            acc1 = acc1 * gl.convert_layout(shrink, gl.SliceLayout(1, acc1_layout))[:, None]

    last = (steps - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((steps - 1) // STAGES) & 1)
    acc0 = warpgroup_mma(weight0, v0.index(last), acc0)
    total = gl.convert_layout(gl.sum(acc0, 1), line_layout)
    if D1 > 0:
        acc1 = warpgroup_mma(gl.convert_layout(weight0, weight1_layout), v1.index(last), acc1)
        total += gl.convert_layout(gl.sum(acc1, 1), line_layout)
    # A weight of 0 times a NaN or an infinity that only another row of the tile picked is NaN: the row kernel, which runs next,
    # walks such a tile again.
    gl.store(count_of_tile + line * 0, -1 + line * 0, mask=total != total)
    out_rows = out + row * stride_out_row + head.to(gl.int64) * stride_out_head
    _store_output(out_rows, acc0, norm, live, 0, D0, acc0_layout)
    if D1 > 0:
        _store_output(out_rows, acc1, norm, live, D0, D1, acc1_layout)


@gluon.jit(do_not_specialize=["rows"])
def _union_kernel(
    descriptor,
    query,
    last_page_len,
    lists,
    words,
    counts,
    out,
    scale_log2,
    rows,
    list_stride,
    stride_query_row,
    stride_query_head,
    stride_out_row,
    stride_out_head,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D0: gl.constexpr,
    D1: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """words int64: eight pages' row bits each. One program a tile; a tile that is to be walked row by row costs a load."""
    dtype: gl.constexpr = descriptor.dtype
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    warpgroups: gl.constexpr = GROUP // 8
    tile = gl.program_id(0)
    count = gl.load(counts + tile)
    if count >= 0:
        lists += tile.to(gl.int64) * list_stride
        words += tile.to(gl.int64) * (list_stride // 8)
        steps = 1 + (count * 8 + TOKENS - 1) // TOKENS
        q0 = gl.allocate_shared_memory(dtype, [warpgroups, 64, D0], swizzled)
        k0 = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, D0], swizzled)
        v0 = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, D0], swizzled)
        if D1 > 0:
            q1 = gl.allocate_shared_memory(dtype, [warpgroups, 64, D1], swizzled)
            k1 = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, D1], swizzled)
            v1 = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, D1], swizzled)
        else:
            q1 = q0
            k1 = k0
            v1 = v0
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for s in gl.static_range(STAGES):
            mbarrier.init(k_full.index(s), count=1)
            mbarrier.init(v_full.index(s), count=1)
            mbarrier.init(k_empty.index(s), count=warpgroups)
            mbarrier.init(v_empty.index(s), count=warpgroups)
        fence_async_shared()
        # Spelled out twice: a tuple kept in a variable would turn its constants into run-time values.
        if warpgroups == 2:
            gl.warp_specialize(
                [
                    (
                        _consume,
                        (
                            query, out, last_page_len, words, counts + tile, scale_log2, tile, rows, steps,
                            stride_query_row, stride_query_head, stride_out_row, stride_out_head,
                            q0, q1, k0, k1, v0, v1, k_full, k_empty, v_full, v_empty,
                            0, HEADS, GROUP, D0, D1, TOKENS, STAGES,
                        ),
                    ),
                    (
                        _consume,
                        (
                            query, out, last_page_len, words, counts + tile, scale_log2, tile, rows, steps,
                            stride_query_row, stride_query_head, stride_out_row, stride_out_head,
                            q0, q1, k0, k1, v0, v1, k_full, k_empty, v_full, v_empty,
                            1, HEADS, GROUP, D0, D1, TOKENS, STAGES,
                        ),
                    ),
                    (_produce, (descriptor, lists, steps, k0, k1, k_full, k_empty, 0, D0, D1, TOKENS, STAGES)),
                    (_produce, (descriptor, lists, steps, v0, v1, v_full, v_empty, D0 + D1, D0, D1, TOKENS, STAGES)),
                ],
                [4, 1, 1],
                [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [
                    (
                        _consume,
                        (
                            query, out, last_page_len, words, counts + tile, scale_log2, tile, rows, steps,
                            stride_query_row, stride_query_head, stride_out_row, stride_out_head,
                            q0, q1, k0, k1, v0, v1, k_full, k_empty, v_full, v_empty,
                            0, HEADS, GROUP, D0, D1, TOKENS, STAGES,
                        ),
                    ),
                    (_produce, (descriptor, lists, steps, k0, k1, k_full, k_empty, 0, D0, D1, TOKENS, STAGES)),
                    (_produce, (descriptor, lists, steps, v0, v1, v_full, v_empty, D0 + D1, D0, D1, TOKENS, STAGES)),
                ],
                [1, 1],
                [PRODUCER_REGISTERS, PRODUCER_REGISTERS],
            )  # fmt: skip


@dataclass(frozen=True)
class Walk:
    """Tokens a step, stages, and the registers of a thread, all warps' mean (None: what a multiprocessor has for one program)."""

    tokens: int
    stages: int
    registers: int | None = None


# Tuned on an H200, 2026-11-30; keyed by (warpgroups, head_dim). One warpgroup leaves room for two programs a multiprocessor.
_WALKS = {
    (2, 64): Walk(64, 4),
    (2, 128): Walk(64, 4),
    (2, 192): Walk(64, 3),
    (2, 256): Walk(64, 2),
    (1, 64): Walk(64, 3, 128),
    (1, 128): Walk(64, 2, 128),
    (1, 192): Walk(64, 3),
    (1, 256): Walk(64, 2),
}


def registers(group):
    """Registers of a thread that multiplies and of one that copies; on the copy engine's side the page ids of a step must fit."""
    return {"CONSUMER_REGISTERS": 232, "PRODUCER_REGISTERS": 40 if group == 16 else 24}


def walk_unions(query, cache, page_limit, last_page_len, lists, bits, counts, out, scale_log2, group):
    """Attention of every tile whose count is not -1. The arguments are those of attention.py's union kernel."""
    rows, heads, dim = out.shape
    d0, d1 = (128, 64) if dim == 192 else (dim, 0)
    group = max(group, 8)
    walk = _WALKS[group // 8, dim]
    atom = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # Pages lie 8 * stride(2) elements apart, so the whole view is one matrix of token rows.
    descriptor = TensorDescriptor(cache, [page_limit * 8, 2 * dim], [cache.stride(2), 1], [8, 64], atom)
    _union_kernel[(counts.shape[0],)](
        descriptor,
        query,
        last_page_len,
        lists,
        bits.view(torch.int64),
        counts,
        out,
        scale_log2,
        rows,
        lists.stride(0),
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        HEADS=heads,
        GROUP=group,
        D0=d0,
        D1=d1,
        TOKENS=walk.tokens,
        STAGES=walk.stages,
        **registers(group),
        num_warps=4,
        maxnreg=walk.registers,
    )
