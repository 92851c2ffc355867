"""Copies live KV blocks into a dense cache of another dtype."""

import torch


def stage_prefill_pages(cache, pages, dtype, k_scale, v_scale):
    dtype = getattr(torch, dtype)
    count, blocks = pages.shape[0], cache.shape[0]
    tokens, width = cache.shape[2], cache.shape[3]
    out = torch.zeros((count, 1, tokens, width), dtype=dtype, device=cache.device)
    if cache.dtype is torch.uint8:
        cache = cache.view(torch.float8_e4m3fn)
    # An entry that names no block gives zeros.
    valid = ((pages >= 0) & (pages < blocks)).nonzero().squeeze(1)
    for part in valid.split(max(1, (1 << 22) // max(tokens * width, 1))):
        # Bytes are gathered before they are converted: indexing has no fp8 kernel everywhere.
        block = _rows(cache, pages[part].to(torch.int64))
        if cache.dtype is torch.float8_e4m3fn:
            half = width // 2
            block = block.to(torch.float32)
            block[..., :half] *= k_scale
            block[..., half:] *= v_scale
        out[part] = block.to(dtype)
    return out


def _rows(cache, index):
    if cache.dtype is torch.float8_e4m3fn:
        return cache.view(torch.uint8)[index].view(torch.float8_e4m3fn)
    return cache[index]
