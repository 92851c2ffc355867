"""Where a key's bytes lie in a 64-token index page: a payload plane [4 groups, 64 tokens, 16 bytes], then a scale plane.

The scale plane is "swizzled": the byte of token t and group c stands in column (t % 16) * 4 + t // 16 of row c.
"""

from __future__ import annotations

import torch

from .mxfp4 import GROUPS

PAGE = 64
PAYLOAD_BYTES = 4096
PAGE_BYTES = 4352
KEY_BYTES = 68
LAYOUT = "preshuffled64"


def scale_column(row: torch.Tensor) -> torch.Tensor:
    """The column of a token's scale byte, from its row 0..63 in the page."""
    return (row % 16) * 4 + row // 16


def cache_planes(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The payload [B, 4, 64, 16] and scale [B, 4, 64] planes of a cache [B, 64, 68], as views."""
    blocks, stride = cache.shape[0], cache.stride(0)
    offset = cache.storage_offset()
    payload = cache.as_strided((blocks, GROUPS, PAGE, 16), (stride, 1024, 16, 1), offset)
    scales = cache.as_strided((blocks, GROUPS, PAGE), (stride, PAGE, 1), offset + PAYLOAD_BYTES)
    return payload, scales


def to_pages(payload: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compact pages from token-major keys: [n*64, 4, 16] and [n*64, 4] to [n, 1, 4, 64, 16] and [n, 1, 4, 64] (swizzled)."""
    pages = payload.shape[0] // PAGE
    payload = payload.reshape(pages, PAGE, GROUPS, 16).transpose(1, 2).unsqueeze(1)
    # Token t = 16*high + low stands in column 4*low + high.
    scales = scales.reshape(pages, 4, 16, GROUPS).permute(0, 3, 2, 1).reshape(pages, 1, GROUPS, PAGE)
    # Copies: of no keys, reshape would return views of the arguments, which may share one storage.
    return payload.clone(memory_format=torch.contiguous_format), scales.clone(memory_format=torch.contiguous_format)


def from_pages(payload: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of :func:`to_pages`."""
    pages = payload.shape[0]
    keys = payload.reshape(pages, GROUPS, PAGE, 16).transpose(1, 2).reshape(pages * PAGE, GROUPS, 16)
    scale = scales.reshape(pages, GROUPS, 16, 4).permute(0, 3, 2, 1).reshape(pages * PAGE, GROUPS)
    return keys, scale
