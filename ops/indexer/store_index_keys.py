from __future__ import annotations

import torch

from .. import validation
from .layout import LAYOUT


def store_index_keys(keys: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, *, layout: str = LAYOUT) -> None:
    """Quantizes index keys to MXFP4 and writes each to its slot of the paged cache. Mutates ``cache``.

    Args:
        keys: bf16 [n, 128], one index key a token or region; stride(1) = 1.
        cache: uint8 [num_blocks, 64, 68], strides (P, 68, 1) with P >= 4352 bytes. Its inner shape carries no per-token
            meaning: a page is a payload plane of 4096 bytes and a swizzled scale plane of 256.
        slot_mapping: int32 or int64 [n]: page * 64 + row. A slot below 0 or past the cache leaves it untouched. Of two keys
            with one slot, one is stored whole.
        layout: "preshuffled64", the only layout supported; bytes alone can't tell layouts apart.

    Raises:
        TypeError, ValueError: an argument is not as above; nothing is written.
    """
    validation.layout("store_index_keys", layout)
    for name, value in (("keys", keys), ("cache", cache), ("slot_mapping", slot_mapping)):
        validation.is_tensor("store_index_keys", name, value)
    torch.ops.sparse_prefill.store_index_keys(keys, cache, slot_mapping)
