"""Kernel that copies live KV blocks into a dense cache, converting an FP8 cache on the way."""

import torch
import triton
import triton.language as tl

from .fp8 import decode_e4m3, has_native_e4m3

# Elements of a program, and warps.
COPY = (2048, 4)


@triton.jit
def _stage_prefill_pages_kernel(
    cache,
    pages,
    k_scale,
    v_scale,
    out,
    blocks,
    tokens,
    stride_block,
    stride_token,
    WIDTH: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    size = tokens * WIDTH
    block = tl.load(pages + entry)
    # An entry that names no block gives zeros.
    live = (element < size) & (block >= 0) & (block < blocks)
    token = (element // WIDTH).to(tl.int64)
    column = element % WIDTH
    value = tl.load(cache + block.to(tl.int64) * stride_block + token * stride_token + column, mask=live, other=0)
    if FP8:
        scale = tl.where(column < WIDTH // 2, tl.load(k_scale), tl.load(v_scale))
        value = decode_e4m3(value, NATIVE).to(tl.float32) * scale
    tl.store(out + entry * size + element, value.to(out.dtype.element_ty), mask=element < size)


def stage_prefill_pages(cache, pages, dtype, k_scale, v_scale):
    count, tokens, width = pages.shape[0], cache.shape[2], cache.shape[3]
    out = torch.empty((count, 1, tokens, width), dtype=getattr(torch, dtype), device=cache.device)
    if out.numel() == 0:
        return out
    fp8 = cache.element_size() == 1
    if fp8:
        cache = cache.view(torch.uint8)
    block = min(triton.next_power_of_2(tokens * width), COPY[0])
    _stage_prefill_pages_kernel[(count, triton.cdiv(tokens * width, block))](
        cache,
        pages,
        k_scale,
        v_scale,
        out,
        cache.shape[0],
        tokens,
        cache.stride(0),
        cache.stride(2),
        WIDTH=width,
        FP8=fp8,
        NATIVE=fp8 and has_native_e4m3(cache.device),
        BLOCK=block,
        num_warps=COPY[1],
    )
    return out
