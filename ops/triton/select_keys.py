"""The k largest logits of each row's window, as ascending window-relative indices; equal logits prefer the smaller index.

One program takes one row. A sample of the window gives a threshold that lets a little more than k logits through; one pass over
the window turns it into bit masks, 32 columns a word, of the logits above the threshold and of those equal to it; the columns of
set bits are listed in order, and the exact k-th largest of them is found by bisection in registers. Where fewer than k lie above,
the list is completed by the first that are equal, so ties never overflow it. Where the sample misjudged the window (too few
passed, or too many), another threshold is tried and at last the exact one, which never fails: the result does not depend on the
sample.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .score_keys import register_limit


@dataclass(frozen=True)
class SelectConfig:
    """``words`` words of 32 columns are marked at a time by ``num_warps`` warps, after a sample of ``sample``, twice that for
    windows of over ``long`` columns; then each of at most 16 warps has ``share`` listed columns."""

    words: int
    num_warps: int
    share: int
    sample: int
    long: int
    max_registers: int | None  # None: the compiler's choice
    gpu: str
    date: str


SELECT = SelectConfig(
    words=128, num_warps=8, share=256, sample=4096, long=1 << 17, max_registers=None, gpu="NVIDIA H200", date="2026-11-30"
)

# Bytes of masks and lists held at once.
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
def _kth(order, low, high, total, rank, slack):
    """A t such that between ``rank`` and ``rank + slack`` entries are >= t, or the rank-th largest entry.

    ``total`` entries, at least ``rank``, are >= ``low``; none is > ``high``. Each step costs a sum over the whole program, so two
    steps in three guess where the rank lies from the counts at both ends; every third halves the range, which bounds the number.
    """
    # Counts of entries >= low and > high.
    many = total
    few = 0
    turn = 0
    while low < high:
        # The mean, rounded up, without overflow.
        middle = (low | high) - ((low ^ high) >> 1)
        if turn < 2:
            width = high.to(tl.float32) - low.to(tl.float32)
            share = (many - rank).to(tl.float32) / tl.maximum(many - few, 1).to(tl.float32)
            guess = low.to(tl.int64) + (width * share).to(tl.int64) + 1
            middle = tl.minimum(guess, high.to(tl.int64)).to(tl.int32)
        turn = tl.where(turn == 2, 0, turn + 1)
        count = tl.sum((order >= middle).to(tl.int32), axis=0)
        if count >= rank:
            low = middle
            many = count
            if count <= rank + slack:
                high = middle
        else:
            high = middle - 1
            few = count
    return low


@triton.jit
def _count_bits(word):
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _or(a, b):
    return a | b


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
def _mark(base, n, threshold, above, equal, WORDS: tl.constexpr):
    """Words of bits, one a column: above the threshold, and equal to it. Bits of columns past the window are undefined."""
    word = tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    one = (tl.full([32], 1, dtype=tl.uint32) << bit.to(tl.uint32))[None, :]
    column = word[:, None] * 32 + bit[None, :]
    for start in range(0, (n + 31) // 32, WORDS):
        x = tl.load(base + start * 32 + column, mask=column < n - start * 32, other=0.0)
        x = tl.where(x != x, float("-inf"), x)
        tl.store(above + start + word, tl.reduce(tl.where(x > threshold, one, 0), 1, _or))
        tl.store(equal + start + word, tl.reduce(tl.where(x == threshold, one, 0), 1, _or))


@triton.jit
def _words(above, equal, start, n, keep_first, keep_last, WORDS: tl.constexpr, KEEP: tl.constexpr):
    """The marks of WORDS words from ``start`` on, cut to the window, forced columns above."""
    word = start + tl.arange(0, WORDS)
    live = word < (n + 31) // 32
    over = tl.load(above + word, mask=live, other=0)
    tied = tl.load(equal + word, mask=live, other=0)
    inside = _low_bits(n - word * 32)
    over &= inside
    tied &= inside
    if KEEP:
        forced = (_low_bits(keep_first - word * 32) | (_low_bits(n - keep_last - word * 32) ^ 0xFFFFFFFF)) & inside
        forced = tl.where(live, forced, 0)
        over |= forced
        tied &= forced ^ 0xFFFFFFFF
    return over, tied


@triton.jit
def _low_bits(count):
    """Words with the lowest ``count`` bits set; all of them from 32 on, none up to 0."""
    part = (tl.full(count.shape, 1, dtype=tl.uint32) << (tl.minimum(tl.maximum(count, 0), 31)).to(tl.uint32)) - 1
    return tl.where(count >= 32, 0xFFFFFFFF, part).to(tl.uint32)


@triton.jit
def _count(above, equal, n, keep_first, keep_last, WORDS: tl.constexpr, KEEP: tl.constexpr):
    over_count = 0
    tied_count = 0
    for start in range(0, (n + 31) // 32, WORDS):
        over, tied = _words(above, equal, start, n, keep_first, keep_last, WORDS, KEEP)
        over_count += tl.sum(_count_bits(over), axis=0)
        tied_count += tl.sum(_count_bits(tied), axis=0)
    return over_count, tied_count


@triton.jit
def _sample_threshold(base, n, rank, SAMPLE: tl.constexpr):
    """The rank-th largest order, or nearly, of groups of four columns spread over the window."""
    quad = tl.arange(0, SAMPLE // 4) * (n // (SAMPLE // 4))
    column = tl.minimum(quad[:, None] + tl.arange(0, 4)[None, :], n - 1)
    sample = tl.reshape(_order(tl.load(base + column)), [SAMPLE])
    return _kth(sample, tl.min(sample, axis=0), tl.max(sample, axis=0), SAMPLE, rank, rank // 16)


@triton.jit
def _list(above, equal, columns, n, ties, keep_first, keep_last, WORDS: tl.constexpr, KEEP: tl.constexpr):
    """Columns of the marks above and of the first ``ties`` equal ones, in order."""
    count = 0
    for start in range(0, (n + 31) // 32, WORDS):
        over, tied = _words(above, equal, start, n, keep_first, keep_last, WORDS, KEEP)
        tied_count = _count_bits(tied)
        before = tl.cumsum(tied_count, axis=0) - tied_count
        room = tl.minimum(tl.maximum(ties - before, 0), tied_count)
        kept = _count_bits(over) + room
        last = tl.cumsum(kept, axis=0)
        position = count + last - kept
        bits = over | tl.where(room > 0, tied, 0)
        column = (start + tl.arange(0, WORDS)) * 32
        for _ in range(tl.max(_count_bits(bits), axis=0)):
            lowest = bits & (0 - bits)
            tie = (tied & lowest) != 0
            emit = (lowest != 0) & ((tie == 0) | (room > 0))
            # A power of two's exponent is its bit's number.
            place = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            tl.store(columns + position, column + place, mask=emit)
            position += emit.to(tl.int32)
            room -= tie.to(tl.int32)
            bits ^= lowest
        count += tl.max(last, axis=0)
        ties -= tl.minimum(tl.sum(tied_count, axis=0), ties)


@triton.jit
def _window(ks, ke, window, num_columns):
    """First column and length of a window, cut to the columns there are."""
    first = tl.minimum(tl.maximum(tl.load(ks + window), 0), num_columns)
    return first, tl.maximum(tl.minimum(tl.maximum(tl.load(ke + window), 0), num_columns) - first, 0)


@triton.jit
def _first_rank(n, k, forced, CAPACITY: tl.constexpr, SAMPLE: tl.constexpr):
    """The sample's rank midway between too few and too many passing columns; forced columns pass in any case."""
    return tl.maximum(((k + CAPACITY) // 2 - forced).to(tl.int64) * SAMPLE // n, 1).to(tl.int32)


@triton.jit(do_not_specialize=["window_first", "window_step", "num_columns", "k", "keep_first", "keep_last", "num_words"])
def sample_kernel(
    logits,
    ks,
    ke,
    found,
    window_first,
    window_step,
    num_columns,
    num_words,
    k,
    keep_first,
    keep_last,
    logits_stride,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """The first threshold of row ``program_id``, to ``found`` [rows, 3]. Windows of at most CAPACITY columns need none."""
    row = tl.program_id(0).to(tl.int64)
    first, n = _window(ks, ke, window_first + row * window_step, num_columns)
    if n > CAPACITY:
        rank = _first_rank(n, k, keep_first + keep_last, CAPACITY, SAMPLE)
        tl.store(found + row * 3, _sample_threshold(logits + row * logits_stride + first, n, rank, SAMPLE))


@triton.jit(do_not_specialize=["window_first", "window_step", "num_columns", "k", "keep_first", "keep_last", "num_words"])
def mark_kernel(
    logits,
    ks,
    ke,
    marks,
    found,
    window_first,
    window_step,
    num_columns,
    num_words,
    k,
    keep_first,
    keep_last,
    logits_stride,
    CAPACITY: tl.constexpr,
    WORDS: tl.constexpr,
    LISTED: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Marks row ``program_id`` of ``logits`` at the threshold found for it, to ``marks`` [rows, 2, num_words].

    ``found`` receives how many columns exceed the threshold and how many equal it.
    """
    row = tl.program_id(0).to(tl.int64)
    first, n = _window(ks, ke, window_first + row * window_step, num_columns)
    above = marks + row * (2 * num_words)
    equal = above + num_words
    if n > CAPACITY:
        _mark(logits + row * logits_stride + first, n, _unorder(tl.load(found + row * 3)), above, equal, WORDS)
        # Other threads of the program read what these wrote.
        tl.debug_barrier()
        over, tied = _count(above, equal, n, keep_first, keep_last, LISTED, KEEP)
        tl.store(found + row * 3 + 1, over)
        tl.store(found + row * 3 + 2, tied)


@triton.jit(do_not_specialize=["window_first", "window_step", "num_columns", "k", "keep_first", "keep_last", "num_words"])
def retry_kernel(
    logits,
    ks,
    ke,
    marks,
    found,
    window_first,
    window_step,
    num_columns,
    num_words,
    k,
    keep_first,
    keep_last,
    logits_stride,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
    WORDS: tl.constexpr,
    LISTED: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Marks a row again whose threshold too few columns reached, or too many exceeded.

    Apart from the others: it is rarely needed, and what it needs would take registers there.
    """
    row = tl.program_id(0).to(tl.int64)
    first, n = _window(ks, ke, window_first + row * window_step, num_columns)
    base = logits + row * logits_stride + first
    above = marks + row * (2 * num_words)
    equal = above + num_words
    if n > CAPACITY:
        over = tl.load(found + row * 3 + 1)
        tied = tl.load(found + row * 3 + 2)
        rank = _first_rank(n, k, keep_first + keep_last, CAPACITY, SAMPLE)
        attempt = 0
        while (over + tied < k) | (over > CAPACITY):
            if over > CAPACITY:
                rank = tl.maximum(rank // 2, 1)
            else:
                rank = tl.minimum(rank * 2, SAMPLE)
            if attempt < 2:
                order = _sample_threshold(base, n, rank, SAMPLE)
            else:
                order = _exact_threshold(base, n, k, keep_first, keep_last, 512, KEEP)
            tl.debug_barrier()
            _mark(base, n, _unorder(order), above, equal, WORDS)
            tl.debug_barrier()
            over, tied = _count(above, equal, n, keep_first, keep_last, LISTED, KEEP)
            tl.store(found + row * 3, order)
            tl.store(found + row * 3 + 1, over)
            attempt += 1


@triton.jit(
    do_not_specialize=["window_first", "window_step", "out_step", "num_columns", "k", "keep_first", "keep_last", "num_words"]
)
def select_kernel(
    logits,
    ks,
    ke,
    out,
    marks,
    found,
    lists,
    window_first,
    window_step,
    out_step,
    num_columns,
    num_words,
    k,
    keep_first,
    keep_last,
    logits_stride,
    CAPACITY: tl.constexpr,
    LISTED: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Selects row ``program_id`` of ``logits`` among its marked columns; ``lists`` [rows, CAPACITY] is scratch."""
    row = tl.program_id(0).to(tl.int64)
    first, n = _window(ks, ke, window_first + row * window_step, num_columns)
    base = logits + row * logits_stride + first
    target = out + row * out_step
    slot = tl.arange(0, CAPACITY)
    if n <= k:
        for start in range(0, k, CAPACITY):
            column = start + slot
            tl.store(target + column, tl.where(column < n, column, -1), mask=column < k)
    else:
        count = n
        low = tl.full([], -0x7FFFFFFF, dtype=tl.int32)
        columns = lists + row * CAPACITY
        column = slot
        if n > CAPACITY:
            low = tl.load(found + row * 3)
            over = tl.load(found + row * 3 + 1)
            ties = tl.maximum(k - over, 0)
            count = over + ties
            above = marks + row * (2 * num_words)
            _list(above, above + num_words, columns, n, ties, keep_first, keep_last, LISTED, KEEP)
            # Other threads of the program read what these wrote.
            tl.debug_barrier()
            column = tl.load(columns + slot, mask=slot < count, other=0)
        if count == k:
            # Every listed column is selected.
            tl.store(target + slot, column, mask=slot < k)
        else:
            order = _order(tl.load(base + column, mask=slot < count, other=0.0))
            if KEEP:
                order = tl.where(_forced(column, n, keep_first, keep_last), 0x7FFFFFFF, order)
            # No logit orders as low as an absent one.
            order = tl.where(slot < count, order, -0x80000000)
            if n <= CAPACITY:
                low = tl.min(tl.where(slot < count, order, 0x7FFFFFFF), axis=0)
            threshold = _kth(order, low, tl.max(order, axis=0), count, k, 0)
            above_it = order > threshold
            equal_it = order == threshold
            scan = tl.cumsum(above_it.to(tl.int32) + (equal_it.to(tl.int32) << 16), axis=0)
            ties = scan >> 16
            room = k - (tl.max(scan, axis=0) & 0xFFFF)
            position = (scan & 0xFFFF) + tl.minimum(ties, room) - 1
            chosen = above_it | (equal_it & (ties <= room))
            column = slot
            if n > CAPACITY:
                # Read again: registers are scarcer than cached loads.
                column = tl.load(columns + slot, mask=chosen, other=0)
            tl.store(target + position, column, mask=chosen)


def capacity(k):
    """Columns a row's list holds: twice k, at least 2048."""
    return max(2048, 2 * triton.next_power_of_2(k))


def launch_options(k, columns, keep, config=SELECT):
    """Constants and options of each kernel, by name."""
    size = {"CAPACITY": capacity(k)}
    sample = {"SAMPLE": config.sample if columns <= config.long else 2 * config.sample}
    listed = {"LISTED": 1024, "KEEP": keep}
    words = {"WORDS": config.words}
    options = {"num_warps": config.num_warps, "maxnreg": None}
    # Left to itself the assembler spills three registers in these to fit one more program on a multiprocessor.
    limit = 96 if capacity(k) == 2048 or (keep and capacity(k) == 4096) else None
    return {
        "sample": (size | sample, options),
        "mark": (size | words | listed, options | {"maxnreg": config.max_registers}),
        "retry": (size | sample | words | listed, options),
        "select": (size | listed, options | {"num_warps": min(16, capacity(k) // config.share), "maxnreg": limit}),
    }


class Scratch:
    """Marks and lists of as many rows as SCRATCH_BYTES hold, reused from batch to batch."""

    def __init__(self, device, k, rows, columns, config=SELECT):
        self.capacity = capacity(k)
        self.config = config
        # Windows that fit the capacity are listed whole, without scratch.
        self.words = triton.cdiv(triton.cdiv(columns, 32), config.words) * config.words if columns > self.capacity else 0
        listed = self.capacity if self.words else 0
        self.rows = max(1, min(rows, SCRATCH_BYTES // max(1, 8 * self.words + 4 * listed)))
        self.marks = torch.empty((self.rows, 2, self.words), dtype=torch.uint32, device=device)
        self.lists = torch.empty((self.rows, listed), dtype=torch.int32, device=device)
        self.found = torch.empty((self.rows, 3), dtype=torch.int32, device=device)

    def select(self, logits, ks, ke, window_first, window_step, num_rows, out, out_first, out_step, k, keep_first, keep_last):
        """Selects from ``num_rows`` rows of ``logits``; row i has window window_first + i * window_step, out row likewise."""
        columns = logits.shape[1]
        launches = launch_options(k, columns, keep_first > 0 or keep_last > 0, self.config)
        for first in range(0, num_rows, self.rows):
            rows = min(self.rows, num_rows - first)
            batch = logits[first:]
            window = (window_first + first * window_step, window_step)
            rest = (columns, self.words, k, keep_first, keep_last, logits.stride(0))
            if self.words:
                for name, kernel, scratch in (
                    ("sample", sample_kernel, (self.found,)),
                    ("mark", mark_kernel, (self.marks, self.found)),
                    ("retry", retry_kernel, (self.marks, self.found)),
                ):
                    constants, options = launches[name]
                    kernel[(rows,)](
                        batch, ks, ke, *scratch, *window, *rest, **constants, num_warps=options["num_warps"],
                        **register_limit(options["maxnreg"]),
                    )  # fmt: skip
            constants, options = launches["select"]
            target = out[out_first + first * out_step :]
            select_kernel[(rows,)](
                batch, ks, ke, target, self.marks, self.found, self.lists, *window, out_step * out.stride(0), *rest, **constants,
                num_warps=options["num_warps"],
                **register_limit(options["maxnreg"]),
            )  # fmt: skip


def select_keys(logits, ks, ke, k, keep_first, keep_last, config=SELECT):
    rows, columns = logits.shape
    out = torch.empty((rows, k), dtype=torch.int32, device=logits.device)
    if rows == 0 or k == 0:
        return out
    Scratch(logits.device, k, rows, columns, config).select(logits, ks, ke, 0, 1, rows, out, 0, 1, k, keep_first, keep_last)
    return out
