"""Exact index scoring: per-group dots that fp32 holds exactly, combined over groups and heads in one fixed order.

Sums of E2M1 products within a group of 32 are multiples of 1/4 up to 1152, so a matrix product gives the same bits in whatever
order it adds. Everything after it is elementwise, so a logit's bits depend on its row and key alone.
"""

import torch

from ..indexer.layout import PAGE, from_pages
from ..indexer.mxfp4 import GROUP, GROUPS, quantize_mxfp4, scale_to_float, unpack_e2m1

# Elements of the [rows, heads, keys] scratch a tile may hold: two fp32 buffers of it stay near a core's share of cache.
_SCRATCH = 1 << 19
_MAX_KEYS = 1024
# Keys decoded at once: 32 MiB of fp32, twice.
BLOCK = 1 << 15

# A group's dot is exact, whatever the order of its sum, while 2^(a + b - 254) keeps quarter steps above the smallest denormal and
# 1152 times it finite: scale bytes a + b within these bounds.
_MIN_BYTES, _MAX_BYTES = 107, 370


class Operand:
    """Decoded queries or keys: per group, element values [4, n, 32] and their scale bytes [4, n]."""

    def __init__(self, packed, scale):
        # packed [n, 64], scale [n, 4]
        values = unpack_e2m1(packed).view(-1, GROUPS, GROUP).transpose(0, 1)
        e = scale.transpose(0, 1).to(torch.int32)
        # A group of zeros has any scale but NaN: 127 keeps it out of the range check.
        empty = (values == 0).all(dim=-1)
        e = torch.where(empty & (e != 255), 127, e)
        self.raw = values
        self.bytes = e
        self.scaled = (values * scale_to_float(e).unsqueeze(-1)).contiguous()
        # Groups that are zero throughout, as where a shorter head is padded to 128: their dots add nothing, not even rounding.
        self.zero = (empty & (e != 255)).all(dim=1).tolist()
        number = torch.where(e == 255, 127, e)
        self.low, self.high = (int(v) for v in number.aminmax()) if e.numel() else (127, 127)


def decode_queries(q, q_scale):
    """Operand of all heads of query rows, row-major."""
    if q_scale is None:
        q, q_scale = quantize_mxfp4(q)
    return Operand(q.reshape(-1, q.shape[-1]), q_scale.reshape(-1, GROUPS))


class Keys:
    """Staged keys, decoded a block of pages at a time; the last block stays decoded."""

    def __init__(self, payload, scales):
        self._payload, self._scales = payload, scales
        self._block, self._operand = -1, None

    def __len__(self):
        return self._payload.shape[0] * PAGE

    def block(self, index):
        """Keys ``index * BLOCK`` onwards, at most BLOCK of them."""
        if index != self._block:
            self._operand = None  # before the next one is decoded
            pages = slice(index * (BLOCK // PAGE), (index + 1) * (BLOCK // PAGE))
            packed, scale = from_pages(self._payload[pages], self._scales[pages])
            self._operand, self._block = Operand(packed.reshape(-1, GROUPS * 16), scale), index
        return self._operand


def _group_dot(queries, q_rows, keys, k_cols, group, out):
    if queries.low + keys.low >= _MIN_BYTES and queries.high + keys.high <= _MAX_BYTES:
        return torch.mm(queries.scaled[group, q_rows], keys.scaled[group, k_cols].t(), out=out)
    # Far-apart scales: multiply the exact unscaled dot by 2^s in two halves of one sign, which rounds once and only at the end.
    torch.mm(queries.raw[group, q_rows], keys.raw[group, k_cols].t(), out=out)
    a, b = queries.bytes[group, q_rows].unsqueeze(1), keys.bytes[group, k_cols].unsqueeze(0)
    s = a + b - 254
    half = s >> 1
    nan = (a == 255) | (b == 255)
    for part in (half, s - half):
        out.mul_(scale_to_float(torch.where(nan, 255, part + 127)))
    return out


def _score_block(queries, keys, weights, heads, begin, end, out):
    """Logits of all ``queries`` against keys begin..end-1 of one decoded block, written to ``out`` [rows, end - begin]."""
    rows = weights.shape[0]
    step = max(1, _SCRATCH // (heads * _MAX_KEYS))
    for row in range(0, rows, step):
        stop = min(row + step, rows)
        q_rows = slice(row * heads, stop * heads)
        w = weights[row:stop].unsqueeze(-1)
        for column in range(begin, end, _MAX_KEYS):
            k_cols = slice(column, min(column + _MAX_KEYS, end))
            shape = ((stop - row) * heads, k_cols.stop - column)
            # A group of zeros adds zero, unless the other side's is NaN or overflows.
            groups = [g for g in range(GROUPS) if not (queries.zero[g] and keys.zero[g])] or [0]
            dot = _group_dot(queries, q_rows, keys, k_cols, groups[0], torch.empty(shape))
            part = torch.empty(shape)
            for group in groups[1:]:
                dot += _group_dot(queries, q_rows, keys, k_cols, group, part)
            x = dot.relu_().view(stop - row, heads, -1)
            x *= w
            # Heads are added as a binary tree over elementwise sums: torch.sum may order them by shape.
            n = heads
            while n > 1:
                half = n // 2
                x[:, :half] += x[:, n - half : n]
                n -= half
            # A zero's sign depends on the order of a product's sum: + 0 makes every zero positive.
            torch.add(x[:, 0], 0.0, out=out[row:stop, column - begin : k_cols.stop - begin])


def score_rows(q, q_scale, keys, weights, begin, end, out):
    """Logits of query rows against keys begin..end-1, written to ``out`` [rows, end - begin]. No window is applied.

    ``weights`` is fp32 [rows, heads], already multiplied by the weight scale; ``q`` and ``q_scale`` are the op's.
    """
    heads = weights.shape[1]
    queries = decode_queries(q, q_scale)
    for index in range(begin // BLOCK, -(-end // BLOCK)):
        base = index * BLOCK
        first, last = max(begin, base), min(end, base + BLOCK)
        block = keys.block(index)
        _score_block(queries, block, weights, heads, first - base, last - base, out[:, first - begin : last - begin])


def row_step(columns, heads):
    """Rows scored at once: few enough to follow a causal edge, a tile of at most 32 MiB, decoded queries of at most 64."""
    return max(1, min(256, (1 << 23) // max(columns, 1), (1 << 16) // heads))


def window_bounds(ks, ke):
    """The smallest range of columns that holds every non-empty window, or None."""
    live = ke > ks
    if not bool(live.any()):
        return None
    return int(ks[live].min()), int(ke[live].max())


def scaled_weights(weights, weight_scale):
    return weights.to(torch.float32) * weight_scale


def score_keys(q, q_scale, payload, scales, weights, ks, ke, weight_scale, precision):
    rows, heads = q.shape[:2]
    keys = Keys(payload, scales)
    logits = torch.full((rows, len(keys)), -torch.inf, device=q.device)
    ks, ke = ks.clamp(0, len(keys)), ke.clamp(0, len(keys))
    step = row_step(len(keys), heads)
    for first in range(0, rows, step):
        tile = slice(first, min(first + step, rows))
        bounds = window_bounds(ks[tile], ke[tile])
        if bounds is None:
            continue
        begin, end = bounds
        scale = None if q_scale is None else q_scale[tile]
        out = logits[tile, begin:end]
        score_rows(q[tile], scale, keys, scaled_weights(weights[tile], weight_scale), begin, end, out)
        column = torch.arange(begin, end, device=q.device)
        out.masked_fill_((column < ks[tile].unsqueeze(1)) | (column >= ke[tile].unsqueeze(1)), -torch.inf)
    return logits
