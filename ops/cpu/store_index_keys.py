"""Quantizes index keys and writes each to its slot of the paged cache."""

import torch

from ..indexer.layout import PAGE, cache_planes, scale_column
from ..indexer.mxfp4 import GROUPS, quantize_mxfp4


def store_index_keys(keys, cache, slot_mapping):
    # A slot given twice must hold one of its keys whole, but a scatter with duplicates may mix them: keep each slot's last key.
    slots, order = slot_mapping.to(torch.int64).sort(stable=True)
    last = torch.ones_like(slots, dtype=torch.bool)
    torch.ne(slots[1:], slots[:-1], out=last[:-1]) if slots.numel() > 1 else None
    keep = last & (slots >= 0) & (slots < cache.shape[0] * PAGE)
    slots, order = slots[keep], order[keep]
    packed, scale = quantize_mxfp4(keys[order])
    payload, scales = cache_planes(cache)
    page, row = slots // PAGE, slots % PAGE
    payload[page, :, row] = packed.view(-1, GROUPS, 16)
    scales[page, :, scale_column(row)] = scale
