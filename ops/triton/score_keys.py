"""Index scoring on tensor cores.

Queries and keys are decoded once, E2M1 times scale, to bf16, which holds every such product exactly. Then one tile is a matrix
product with keys on its M side and several rows' heads on its N side, so that ReLU, the weights and the sum over heads stay in
registers.

A logit's bits depend on its row and key alone: a tensor core adds the 128 products of one dot in an order given by their
position along the reduction, the same for every row and column of a tile; heads are added in one order given by the layout, the
same for each row of a tile; and the tile's shape depends on the number of heads and the device only.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .mxfp4 import DIM, GROUPS, PACKED, dequantize, quantize, unpack


@dataclass(frozen=True)
class ScoreConfig:
    """Tile of the scorer: ``columns`` is rows times heads of one tile, ``span`` the key tiles one program walks."""

    columns: int
    block_keys: int
    span: int
    num_warps: int
    num_stages: int
    max_registers: int | None  # None: the compiler's choice
    hopper: bool  # whether score_hopper's kernel runs
    gpu: str
    date: str


def _config(columns, num_warps, num_stages, max_registers, hopper):
    return ScoreConfig(
        columns=columns,
        block_keys=64,
        span=32,
        num_warps=num_warps,
        num_stages=num_stages,
        max_registers=max_registers,
        hopper=hopper,
        gpu="NVIDIA H200",
        date="2026-11-30",
    )


# Compute capability 9.0, with two accumulators, and everything else.
HOPPER = _config(256, 4, 2, None, True)
EXACT = _config(256, 8, 3, 128, False)

# Triton's interpreter multiplies bf16 bit patterns as integers, so it gets fp32, which holds the same products exactly.
_OPERAND = torch.float32 if triton.knobs.runtime.interpret else torch.bfloat16

# Bytes of decoded keys and of decoded queries held at once.
KEY_BYTES = 1 << 28
QUERY_BYTES = 1 << 26


@triton.jit
def decode_keys_kernel(payload, scales, keys):
    """One page [4, 64, 16] to bf16 [64, 128]."""
    page = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, 64)
    b = tl.arange(0, PACKED)
    packed = tl.load(payload + page * 4096 + (row * 16)[:, None] + (b // 16 * 1024 + b % 16)[None, :])
    column = row % 16 * 4 + row // 16
    byte = tl.load(scales + page * 256 + column[:, None] + (tl.arange(0, GROUPS) * 64)[None, :]).to(tl.int32)
    value = dequantize(unpack(packed, 64), byte, 64)
    element = tl.arange(0, DIM)
    tl.store(keys + page * (64 * DIM) + (row * DIM)[:, None] + element[None, :], value.to(keys.dtype.element_ty))


@triton.jit(do_not_specialize=["first_row", "num_rows", "row_step"])
def decode_queries_kernel(
    q,
    q_scale,
    weights,
    queries,
    scaled_weights,
    first_row,
    num_rows,
    row_step,
    weight_scale,
    q_row_stride,
    q_head_stride,
    scale_row_stride,
    scale_head_stride,
    weight_row_stride,
    weight_head_stride,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """One row's heads to bf16 [PADDED, 128] and its weights to fp32 [PADDED].

    Heads past HEADS are 0; rows past the last are the last again.
    """
    row = tl.program_id(0).to(tl.int64)
    source = first_row + tl.minimum(row, num_rows - 1) * row_step
    head = tl.arange(0, PADDED)
    live = head < HEADS
    offset = head.to(tl.int64)
    element = tl.arange(0, DIM)
    if QUANTIZED:
        b = tl.arange(0, PACKED)
        group = tl.arange(0, GROUPS)
        packed = tl.load(q + source * q_row_stride + (offset * q_head_stride)[:, None] + b[None, :], mask=live[:, None], other=0)
        code = unpack(packed, PADDED)
        byte = tl.load(
            q_scale + source * scale_row_stride + (offset * scale_head_stride)[:, None] + group[None, :],
            mask=live[:, None],
            other=0,
        ).to(tl.int32)
    else:
        x = tl.load(
            q + source * q_row_stride + (offset * q_head_stride)[:, None] + element[None, :], mask=live[:, None], other=0.0
        )
        code, byte = quantize(x.to(tl.float32), PADDED)
    value = dequantize(code, byte, PADDED)
    tl.store(queries + row * (PADDED * DIM) + (head * DIM)[:, None] + element[None, :], value.to(queries.dtype.element_ty))
    weight = tl.load(weights + source * weight_row_stride + offset * weight_head_stride, mask=live, other=0.0)
    tl.store(scaled_weights + row * PADDED + head, weight.to(tl.float32) * weight_scale)


@triton.jit(do_not_specialize=["window_first", "window_step", "num_rows", "first_key", "num_keys"])
def score_kernel(
    queries,
    weights,
    keys,
    ks,
    ke,
    logits,
    window_first,
    window_step,
    num_rows,
    first_key,
    num_keys,
    logits_stride,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Logits of ROWS rows against SPAN tiles of BLOCK keys.

    ``queries`` [rows, HEADS, 128], padded to whole tiles with copies of the last row, and ``keys`` [num_keys, 128], whole tiles
    too, are decoded. Column n of ``logits`` is key first_key + n of the request set; windows count from the set's first key.
    """
    block = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * (SPAN * BLOCK)
    end = tl.minimum(begin + SPAN * BLOCK, num_keys)
    # Rows past the last are the last again, in the queries too: they store the same bits to the same place.
    row = tl.minimum(block * ROWS + tl.arange(0, ROWS), num_rows - 1)
    start = tl.load(ks + window_first + row * window_step)
    stop = tl.load(ke + window_first + row * window_step)
    # Windows relative to the first key, cut to this span: the tiles of their hull are the only ones computed.
    start = tl.minimum(tl.maximum(start, first_key), first_key + num_keys) - first_key
    stop = tl.minimum(tl.maximum(stop, first_key), first_key + num_keys) - first_key
    low = tl.maximum(start, begin)
    high = tl.minimum(stop, end)
    crosses = low < high
    first_tile = tl.min(tl.where(crosses, low, end), axis=0) // BLOCK
    last_tile = (tl.max(tl.where(crosses, high, begin), axis=0) + BLOCK - 1) // BLOCK
    some = tl.max(crosses.to(tl.int32), axis=0) > 0
    target = logits + row * logits_stride
    column = tl.arange(0, BLOCK)
    if some:
        element = tl.arange(0, DIM)
        heads = tl.arange(0, ROWS * HEADS)
        q = tl.load(queries + block * (ROWS * HEADS * DIM) + (heads * DIM)[:, None] + element[None, :])
        q = tl.trans(q)
        weight = tl.load(weights + block * (ROWS * HEADS) + heads)
        key_ptrs = keys + (column * DIM)[:, None] + element[None, :]
        for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
            # Fits 32 bits: at most KEY_BYTES of keys are decoded at once.
            k = tl.load(key_ptrs + tile * (BLOCK * DIM))
            dot = tl.dot(k, q, input_precision="ieee")
            # NaN of a NaN scale must survive the ReLU.
            dot = tl.maximum(dot, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
            logit = tl.sum(tl.reshape(dot, [BLOCK, ROWS, HEADS]), axis=2) + 0.0
            n = tile * BLOCK + column
            tl.store(target[None, :] + n[:, None], logit)


@triton.jit(do_not_specialize=["first_key", "num_keys"])
def fill_kernel(ks, ke, logits, first_key, num_keys, logits_stride, BLOCK: tl.constexpr):
    """-inf in the columns of one row outside its window, over what the outermost tiles left there."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK
    start = tl.minimum(tl.maximum(tl.load(ks + row), first_key), first_key + num_keys) - first_key
    stop = tl.minimum(tl.maximum(tl.load(ke + row), first_key), first_key + num_keys) - first_key
    if (start > begin) | (stop < tl.minimum(begin + BLOCK, num_keys)) | (start >= stop):
        n = begin + tl.arange(0, BLOCK)
        outside = ((n < start) | (n >= stop)) & (n < num_keys)
        tl.store(logits + row * logits_stride + n, tl.full([BLOCK], float("-inf"), dtype=tl.float32), mask=outside)


def register_limit(registers):
    """Launch options that cap a thread's registers, where the compiler has such an option."""
    return {} if registers is None or torch.version.hip is not None else {"maxnreg": registers}


def _hopper():
    from . import score_hopper

    return score_hopper


def padded_heads(heads):
    """Heads a row takes in a tile."""
    return max(16, triton.next_power_of_2(heads))


@functools.cache
def config_for(device):
    """The scorer's tile on a device. It depends on nothing else, since a logit's bits depend on it."""
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0):
        try:
            _hopper()
        except (ImportError, AttributeError):  # Gluon is experimental: another Triton may lack what score_hopper uses
            return EXACT
        return HOPPER
    return EXACT


def rows_per_tile(config, heads):
    """Rows of a tile. Rows of 16 heads take half a tile on Hopper: a whole one's addresses overflow the registers."""
    return config.columns // heads // (2 if config.hopper and heads == 16 else 1)


class Operands:
    """Scratch of the scorer: decoded keys, and decoded queries with their scaled weights, reused from tile to tile."""

    def __init__(self, device, heads, rows, keys, precision="exact", config=None):
        # "fast" may take the exact route for any row or key; here every row and key takes it.
        self.precision = precision
        self.config = config = config_for(device) if config is None else config
        self.heads = padded_heads(heads)
        self.rows_per_tile = rows_per_tile(config, self.heads)
        block = config.block_keys
        self.max_keys = min(triton.cdiv(max(keys, 1), block) * block, KEY_BYTES // (2 * DIM.value) // block * block)
        step = self.rows_per_tile
        self.max_rows = min(triton.cdiv(max(rows, 1), step) * step, QUERY_BYTES // (2 * DIM.value * self.heads) // step * step)
        self.keys = torch.empty((self.max_keys, DIM.value), dtype=_OPERAND, device=device)
        self.queries = torch.empty((self.max_rows, self.heads, DIM.value), dtype=_OPERAND, device=device)
        self.weights = torch.empty((self.max_rows, self.heads), dtype=torch.float32, device=device)
        self._copied = None
        self._pages, self._first_key = None, -1

    def use(self, payload, scales):
        """Scores against these staged pages from now on."""
        self._pages, self._first_key = (payload, scales), -1

    def score_rows(self, q, q_scale, weights, weight_scale, first, count, step, ks, ke, window, logits, fill):
        """Logits of query rows first, first + step, ... against all staged keys, to ``logits`` [count, 64 * pages].

        Windows are read at ``window``, ``window + step``, ...; see :meth:`score` for ``fill``.
        """
        payload, scales = self._pages
        keys = payload.shape[0] * 64
        decoded = -1
        for first_key in range(0, keys, self.max_keys):
            num_keys = min(self.max_keys, keys - first_key)
            if first_key != self._first_key:
                self.decode_keys(payload, scales, first_key, num_keys)
                self._first_key = first_key
            for row in range(0, count, self.max_rows):
                rows = min(self.max_rows, count - row)
                if row != decoded:
                    self.decode_queries(q, q_scale, weights, weight_scale, first + row * step, rows, step)
                    decoded = row
                self.score(ks, ke, window + row * step, step, rows, first_key, num_keys, logits[row:, first_key:], fill)

    def decode_keys(self, payload, scales, first, count):
        """Decodes keys first .. first + count - 1; both are multiples of 64 and count is at most ``max_keys``."""
        page = first // 64
        decode_keys_kernel[(count // 64,)](payload[page:], scales[page:], self.keys, num_warps=4)

    def decode_queries(self, q, q_scale, weights, weight_scale, first, count, step):
        """Decodes ``count`` rows first, first + step, ...; at most ``max_rows``."""
        padded = triton.cdiv(count, self.rows_per_tile) * self.rows_per_tile
        scale = q if q_scale is None else q_scale
        decode_queries_kernel[(padded,)](
            q,
            scale,
            weights,
            self.queries,
            self.weights,
            first,
            count,
            step,
            weight_scale,
            q.stride(0),
            q.stride(1),
            scale.stride(0),
            scale.stride(1),
            weights.stride(0),
            weights.stride(1),
            HEADS=q.shape[1],
            PADDED=self.heads,
            QUANTIZED=q_scale is not None,
            num_warps=max(4, self.heads // 8),
        )

    def score(self, ks, ke, window_first, window_step, num_rows, first_key, num_keys, logits, fill):
        """Scores the decoded rows against the decoded keys; ``logits`` is [rows, columns] from key ``first_key`` on.

        ``num_keys`` is a multiple of 64, and logits has so many columns. With ``fill``, which takes a window step of 1, columns
        outside a window become -inf, else they are left undefined.
        """
        config = self.config
        if config.hopper and self.rows_per_tile * logits.stride(0) >= 2**31:
            # Past that kernel's 32-bit offsets; this one gives the same bits.
            config = EXACT
        grid = (triton.cdiv(num_rows, self.rows_per_tile), triton.cdiv(num_keys, config.block_keys * config.span))
        if config.hopper:
            kernel = _hopper().score_kernel
            queries, keys = self._descriptors()
            extra = {"WARPS": config.num_warps}
        else:
            kernel, queries, keys, extra = score_kernel, self.queries, self.keys, register_limit(config.max_registers)
        kernel[grid](
            queries,
            self.weights,
            keys,
            ks,
            ke,
            logits,
            window_first,
            window_step,
            num_rows,
            first_key,
            num_keys,
            logits.stride(0),
            HEADS=self.heads,
            ROWS=self.rows_per_tile,
            BLOCK=config.block_keys,
            SPAN=config.span,
            STAGES=config.num_stages,
            num_warps=config.num_warps,
            **extra,
        )
        if fill:
            width = 4096
            fill_kernel[(num_rows, triton.cdiv(num_keys, width))](
                ks[window_first:], ke[window_first:], logits, first_key, num_keys, logits.stride(0), BLOCK=width, num_warps=4
            )

    def _descriptors(self):
        if self._copied is None:
            half = self.rows_per_tile * self.heads // 2
            hopper = _hopper()
            queries = self.queries.view(-1, DIM.value)
            self._copied = hopper.descriptor(queries, half), hopper.descriptor(self.keys, self.config.block_keys)
        return self._copied


def score_keys(q, q_scale, payload, scales, weights, ks, ke, weight_scale, precision, config=None):
    rows, heads = q.shape[:2]
    keys = payload.shape[0] * 64
    logits = torch.empty((rows, keys), dtype=torch.float32, device=q.device)
    if rows == 0 or keys == 0:
        return logits
    operands = Operands(q.device, heads, rows, keys, precision, config)
    operands.use(payload, scales)
    operands.score_rows(q, q_scale, weights, weight_scale, 0, rows, 1, ks, ke, 0, logits, True)
    return logits
