"""Quantizes index keys and writes each to its slot of the paged cache."""

import triton
import triton.language as tl

from .mxfp4 import DIM, GROUPS, PACKED, pack, quantize

_BLOCK = 32
_SCAN = 128


@triton.jit(do_not_specialize=["num_keys", "num_slots"])
def store_kernel(keys, cache, slots, num_keys, num_slots, key_stride, page_stride, BLOCK: tl.constexpr, SCAN: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row, mask=row < num_keys, other=-1).to(tl.int64)
    keep = (slot >= 0) & (slot < num_slots)
    # A slot given twice must hold one of its keys whole, so the last one alone is written.
    for start in range(tl.program_id(0) * BLOCK, num_keys, SCAN):
        later = start + tl.arange(0, SCAN)
        other = tl.load(slots + later, mask=later < num_keys, other=-1).to(tl.int64)
        again = (other[None, :] == slot[:, None]) & (later[None, :] > row[:, None])
        keep = keep & (tl.max(again.to(tl.int32), axis=1) == 0)
    element = tl.arange(0, DIM)
    x = tl.load(keys + row.to(tl.int64)[:, None] * key_stride + element[None, :], mask=keep[:, None], other=0.0)
    code, byte = quantize(x.to(tl.float32), BLOCK)
    page, token = slot // 64, slot % 64
    base = cache + page * page_stride
    b = tl.arange(0, PACKED)
    payload = base[:, None] + (b // 16 * 1024 + b % 16)[None, :] + (token * 16)[:, None]
    tl.store(payload, pack(code, BLOCK), mask=keep[:, None])
    group = tl.arange(0, GROUPS)
    scale = base[:, None] + 4096 + (group * 64)[None, :] + (token % 16 * 4 + token // 16)[:, None]
    tl.store(scale, byte.to(tl.uint8), mask=keep[:, None])


def store_index_keys(keys, cache, slot_mapping):
    n = keys.shape[0]
    if n == 0 or cache.shape[0] == 0:
        return
    slots = slot_mapping.contiguous()
    store_kernel[(triton.cdiv(n, _BLOCK),)](
        keys, cache, slots, n, cache.shape[0] * 64, keys.stride(0), cache.stride(0), BLOCK=_BLOCK, SCAN=_SCAN, num_warps=8
    )
