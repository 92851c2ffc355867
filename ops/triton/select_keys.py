"""The k largest logits of each row's window, as ascending window-relative indices; equal logits prefer the smaller index.

A row's window is streamed once. A sample gives a threshold that lets a little more than k logits through; those are compacted in
index order into scratch, and the exact k-th largest of them is found by bisection in registers. Among logits equal to the
threshold at most the first k can be selected, so no number of ties overflows the scratch. Where the sample misjudged the row (too
few passed, or too many), the row is streamed again with another threshold and at last with the exact one, which never fails: the
result does not depend on the sample.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .score_keys import register_limit


@dataclass(frozen=True)
class SelectConfig:
    """``block`` elements are streamed at a time by ``num_warps`` warps after a sample of ``sample``, twice that for windows of
    over ``long`` columns; the last step gives each warp ``finish`` candidates."""

    block: int
    num_warps: int
    num_stages: int
    sample: int
    long: int
    finish: int
    max_registers: int | None  # None: the compiler's choice
    gpu: str
    date: str


SELECT = SelectConfig(
    block=4096, num_warps=8, num_stages=2, sample=4096, long=1 << 17, finish=512, max_registers=None, gpu="NVIDIA H200", date="2026-11-30"
)

# Bytes of candidates held at once.
SCRATCH_BYTES = 1 << 27


@triton.jit
def _order(x):
    """int32 that orders as fp32 x does: NaN as -inf, -0 as +0."""
    bits = (tl.where(x != x, float("-inf"), x) + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unorder(order):
    """fp32 of a scalar that :func:`_order` made."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _kth(order, rank, slack):
    """A t such that between ``rank`` and ``rank + slack`` entries are >= t, or the rank-th largest entry."""
    low = tl.min(order, axis=0)
    high = tl.max(order, axis=0)
    while low < high:
        # The mean, rounded up, without overflow.
        middle = (low | high) - ((low ^ high) >> 1)
        count = tl.sum((order >= middle).to(tl.int32), axis=0)
        if count >= rank:
            low = middle
            if count <= rank + slack:
                high = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _forced(column, n, keep_first, keep_last):
    return (column < keep_first) | (column >= n - keep_last)


@triton.jit
def _exact_threshold(base, n, k, keep_first, keep_last, BLOCK: tl.constexpr, KEEP: tl.constexpr):
    """The k-th largest order of the window, by a four-way search that streams the window up to 16 times."""
    low = tl.full([], -0x80000000, dtype=tl.int64)
    high = tl.full([], 0x7FFFFFFF, dtype=tl.int64)
    lane = tl.arange(0, BLOCK)
    while low < high:
        width = high - low
        first = (low + (width + 3) // 4).to(tl.int32)
        second = (low + (width + 1) // 2).to(tl.int32)
        third = (low + (3 * width + 3) // 4).to(tl.int32)
        above_first = tl.zeros([BLOCK], dtype=tl.int32)
        above_second = tl.zeros([BLOCK], dtype=tl.int32)
        above_third = tl.zeros([BLOCK], dtype=tl.int32)
        for start in range(0, n, BLOCK):
            column = start + lane
            inside = column < n
            order = _order(tl.load(base + column, mask=inside, other=0.0))
            if KEEP:
                order = tl.where(_forced(column, n, keep_first, keep_last), 0x7FFFFFFF, order)
            above_first += (inside & (order >= first)).to(tl.int32)
            above_second += (inside & (order >= second)).to(tl.int32)
            above_third += (inside & (order >= third)).to(tl.int32)
        if tl.sum(above_third, axis=0) >= k:
            low = third.to(tl.int64)
        elif tl.sum(above_second, axis=0) >= k:
            low = second.to(tl.int64)
            high = third.to(tl.int64) - 1
        elif tl.sum(above_first, axis=0) >= k:
            low = first.to(tl.int64)
            high = second.to(tl.int64) - 1
        else:
            high = first.to(tl.int64) - 1
    return low.to(tl.int32)


@triton.jit
def _compact(
    base, n, threshold, k, keep_first, keep_last, candidates, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
    KEEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes the columns above ``threshold`` and the first k equal to it, in index order; returns their number.

    Columns past CAPACITY are counted, not written.
    """
    count = 0
    room = k
    lane = tl.arange(0, BLOCK)
    for start in tl.range(0, n, BLOCK, num_stages=STAGES):
        column = start + lane
        inside = column < n
        x = tl.load(base + column, mask=inside, other=float("-inf"))
        x = tl.where(x != x, float("-inf"), x)
        above = x > threshold
        equal = (x == threshold) & inside
        if KEEP:
            forced = _forced(column, n, keep_first, keep_last) & inside
            above = above | forced
            equal = equal & (forced == 0)
        # Both running counts in one scan: BLOCK is under 2^16.
        scan = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
        ties = scan >> 16
        position = count + (scan & 0xFFFF) + tl.minimum(ties, room) - 1
        keep = (above | (equal & (ties <= room))) & (position < CAPACITY)
        order = _order(x)
        if KEEP:
            order = tl.where(forced, 0x7FFFFFFF, order)
        tl.store(candidates + position, (order.to(tl.int64) << 32) | column, mask=keep)
        total = tl.max(scan, axis=0)
        taken = tl.minimum(total >> 16, room)
        count += (total & 0xFFFF) + taken
        room -= taken
    return count


@triton.jit
def _window(ks, ke, window_first, window_step, row, num_columns):
    """First column and length of a row's window, cut to the columns there are."""
    window = window_first + row * window_step
    first = tl.minimum(tl.maximum(tl.load(ks + window), 0), num_columns)
    last = tl.minimum(tl.maximum(tl.load(ke + window), 0), num_columns)
    return first, tl.maximum(last - first, 0)


@triton.jit(do_not_specialize=["window_first", "window_step", "num_columns", "k", "keep_first", "keep_last"])
def compact_kernel(
    logits,
    ks,
    ke,
    candidates,
    counts,
    window_first,
    window_step,
    num_columns,
    k,
    keep_first,
    keep_last,
    logits_stride,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row's candidates to scratch row ``program_id``: every one of the k selected columns, and at most CAPACITY."""
    row = tl.program_id(0).to(tl.int64)
    first, n = _window(ks, ke, window_first, window_step, row, num_columns)
    base = logits + row * logits_stride + first
    candidates += row * CAPACITY
    # Shorter windows are their own candidates.
    if n > CAPACITY:
        # Expected to pass: half the scratch, midway between too few and, with k ties, too many.
        rank = tl.maximum(CAPACITY // 2 * SAMPLE // n, 1)
        step = n // (SAMPLE // 4)
        attempt = 0
        while attempt < 4:
            if attempt < 3:
                quad = tl.arange(0, SAMPLE // 4) * step
                column = tl.minimum(quad[:, None] + tl.arange(0, 4)[None, :], n - 1)
                sample = tl.reshape(_order(tl.load(base + column)), [SAMPLE])
                threshold = _kth(sample, rank, rank // 16)
            else:
                threshold = _exact_threshold(base, n, k, keep_first, keep_last, BLOCK // 4, KEEP)
            count = _compact(
                base, n, _unorder(threshold), k, keep_first, keep_last, candidates, CAPACITY, BLOCK, KEEP, STAGES
            )
            attempt += 1
            if count < k:
                rank = tl.minimum(rank * 2, SAMPLE)
            elif count > CAPACITY:
                rank = tl.maximum(rank // 2, 1)
            else:
                attempt = 4
                tl.store(counts + row, count)


@triton.jit(do_not_specialize=["window_first", "window_step", "out_step", "num_columns", "k", "keep_first", "keep_last"])
def select_kernel(
    logits,
    ks,
    ke,
    out,
    candidates,
    counts,
    window_first,
    window_step,
    out_step,
    num_columns,
    k,
    keep_first,
    keep_last,
    logits_stride,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
):
    """The exact selection of one row among its candidates, which are in index order."""
    row = tl.program_id(0).to(tl.int64)
    first, n = _window(ks, ke, window_first, window_step, row, num_columns)
    target = out + row * out_step
    if n <= k:
        for start in range(0, k, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(target + column, tl.where(column < n, column, -1), mask=column < k)
    else:
        slot = tl.arange(0, CAPACITY)
        compacted = n > CAPACITY
        if compacted:
            count = tl.load(counts + row)
            pair = tl.load(candidates + row * CAPACITY + slot, mask=slot < count, other=-0x8000000000000000)
            order = (pair >> 32).to(tl.int32)
        else:
            order = _order(tl.load(logits + row * logits_stride + first + slot, mask=slot < n, other=0.0))
            if KEEP:
                order = tl.where(_forced(slot, n, keep_first, keep_last), 0x7FFFFFFF, order)
            # No logit orders as low as an absent one.
            order = tl.where(slot < n, order, -0x80000000)
        threshold = _kth(order, k, 0)
        above = order > threshold
        equal = order == threshold
        scan = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
        ties = scan >> 16
        room = k - (tl.max(scan, axis=0) & 0xFFFF)
        keep = above | (equal & (ties <= room))
        position = (scan & 0xFFFF) + tl.minimum(ties, room) - 1
        # The low half of a pair is its column.
        pair = tl.load(candidates + row * CAPACITY + slot, mask=keep & compacted, other=0)
        tl.store(target + position, tl.where(compacted, pair.to(tl.int32), slot), mask=keep)


def capacity(k):
    """Candidates a row may have: four times k, at least 2048."""
    return max(2048, 4 * triton.next_power_of_2(k))


class Scratch:
    """Candidates of as many rows as SCRATCH_BYTES hold, reused from batch to batch."""

    def __init__(self, device, k, rows, columns, config=SELECT):
        self.capacity = capacity(k)
        self.config = config
        self.rows = max(1, min(rows, SCRATCH_BYTES // (8 * self.capacity)))
        # Windows that fit the capacity are not compacted.
        size = self.capacity if columns > self.capacity else 0
        self.candidates = torch.empty((self.rows, size), dtype=torch.int64, device=device)
        self.counts = torch.empty((self.rows,), dtype=torch.int32, device=device)

    def select(self, logits, ks, ke, window_first, window_step, num_rows, out, out_first, out_step, k, keep_first, keep_last):
        """Selects from ``num_rows`` rows of ``logits``; row i has window window_first + i * window_step, out row likewise."""
        columns = logits.shape[1]
        config = self.config
        keep = keep_first > 0 or keep_last > 0
        for first in range(0, num_rows, self.rows):
            rows = min(self.rows, num_rows - first)
            batch = logits[first:]
            window = window_first + first * window_step
            if columns > self.capacity:
                compact_kernel[(rows,)](
                    batch,
                    ks,
                    ke,
                    self.candidates,
                    self.counts,
                    window,
                    window_step,
                    columns,
                    k,
                    keep_first,
                    keep_last,
                    logits.stride(0),
                    CAPACITY=self.capacity,
                    SAMPLE=config.sample if columns <= config.long else 2 * config.sample,
                    BLOCK=config.block,
                    KEEP=keep,
                    STAGES=config.num_stages,
                    num_warps=config.num_warps,
                    **register_limit(config.max_registers),
                )
            select_kernel[(rows,)](
                batch,
                ks,
                ke,
                out[out_first + first * out_step :],
                self.candidates,
                self.counts,
                window,
                window_step,
                out_step * out.stride(0),
                columns,
                k,
                keep_first,
                keep_last,
                logits.stride(0),
                CAPACITY=self.capacity,
                BLOCK=1024,
                KEEP=keep,
                num_warps=max(4, self.capacity // config.finish),
            )


def select_keys(logits, ks, ke, k, keep_first, keep_last, config=SELECT):
    rows, columns = logits.shape
    out = torch.empty((rows, k), dtype=torch.int32, device=logits.device)
    if rows == 0 or k == 0:
        return out
    Scratch(logits.device, k, rows, columns, config).select(logits, ks, ke, 0, 1, rows, out, 0, 1, k, keep_first, keep_last)
    return out
