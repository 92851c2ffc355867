"""Kernels of a row's regions and of its page counts."""

import torch
import triton
import triton.language as tl


@triton.jit
def _floor_div8(x):
    # An arithmetic shift floors, also for -1; Triton's // truncates.
    return x >> 3


@triton.jit(do_not_specialize=["k"])
def _append_own_region_kernel(selected, positions, out, k, stride_row, stride_column, stride_position, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = _floor_div8(tl.load(positions + row * stride_position).to(tl.int64))
    last = tl.minimum(own, k)
    history = (column < last) & (column < k)
    region = tl.load(selected + row * stride_row + column.to(tl.int64) * stride_column, mask=history, other=-1)
    region = tl.where((column == last) & (own >= 0), own.to(tl.int32), region)
    tl.store(out + row * (k + 1) + column, region, mask=column <= k)


def append_own_region(selected, positions):
    rows, k = selected.shape
    out = torch.empty((rows, k + 1), dtype=torch.int32, device=selected.device)
    if rows:
        block = min(triton.next_power_of_2(k + 1), 1024)
        _append_own_region_kernel[(rows, triton.cdiv(k + 1, block))](
            selected, positions, out, k, selected.stride(0), selected.stride(1), positions.stride(0), BLOCK=block
        )
    return out


@triton.jit(do_not_specialize=["region_count", "rows", "capacity"])
def _fixup_positions_kernel(positions, indptr, last_page_len, region_count, rows, capacity, stride_position, BLOCK: tl.constexpr):
    """One program: a running sum over at most some ten thousand rows takes a few microseconds."""
    lane = tl.arange(0, BLOCK)
    total = tl.full((), 0, tl.int32)
    tl.store(indptr, total)
    for first in range(0, rows, BLOCK):
        row = first + lane
        live = row < rows
        position = tl.load(positions + row.to(tl.int64) * stride_position, mask=live, other=-1).to(tl.int64)
        count = tl.minimum(tl.maximum(_floor_div8(position) + 1, 0), region_count).to(tl.int32)
        count = tl.where(live, count, 0)
        tl.store(indptr + 1 + row, total + tl.cumsum(count, 0), mask=live)
        tl.store(last_page_len + row, (position & 7).to(tl.int32) + 1, mask=live)
        total += tl.sum(count, 0)
    # Rows of the buffers past the positions have no pages.
    for first in range(rows, capacity, BLOCK):
        row = first + lane
        tl.store(indptr + 1 + row, total + lane * 0, mask=row < capacity)
        tl.store(last_page_len + row, 8 + lane * 0, mask=row < capacity)


def fixup_positions(positions, indptr, last_page_len, region_count):
    _fixup_positions_kernel[(1,)](
        positions,
        indptr,
        last_page_len,
        region_count,
        positions.shape[0],
        last_page_len.shape[0],
        positions.stride(0),
        BLOCK=4096,
        num_warps=16,
    )
