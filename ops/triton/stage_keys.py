"""Moves a request set's index keys from the strided cache into compact pages: directly, or packed for an exchange between ranks.

Every kernel reads a key only after checking its request, its table column and its block, so no value of a table or of a
cumulative length leads outside a tensor, and nothing past a request's keys is dereferenced.

Triton widens a byte access to 16 bytes where the launcher finds the base and the page stride multiples of 16 and to one byte
otherwise, so odd page strides and offsets are as safe as packed caches.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .mxfp4 import GROUPS


@dataclass(frozen=True)
class StageConfig:
    """Programs for each multiprocessor, and their warps."""

    per_sm: int
    num_warps: int
    gpu: str
    date: str


STAGE = StageConfig(per_sm=32, num_warps=2, gpu="NVIDIA H200", date="2026-11-30")


@functools.cache
def multiprocessors(device):
    """Multiprocessors of a GPU; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _source_page(key, live, request, cu_seq_lens, block_table, table_stride, num_requests, table_width, num_blocks):
    """Block and row of each key of the chunk-global list ``key``, and whether it has one."""
    live = live & (request >= 0) & (request < num_requests)
    first = tl.load(cu_seq_lens + request, mask=live, other=0)
    last = tl.load(cu_seq_lens + request + 1, mask=live, other=0)
    index = key - first
    live = live & (index >= 0) & (key < last) & (index // 64 < table_width)
    block = tl.load(block_table + request.to(tl.int64) * table_stride + index // 64, mask=live, other=-1)
    live = live & (block >= 0) & (block < num_blocks)
    return block.to(tl.int64), index % 64, live


@triton.jit
def _page_sources(
    page, row, end, block_table, cu_seq_lens, token_to_seq, table_stride, num_requests, table_width, num_blocks, page_stride
):
    """Offset of each source page, source row and liveness of the keys at rows ``row`` of compact page ``page``."""
    key = (page * 64 + row).to(tl.int32)
    request = tl.load(token_to_seq + key, mask=key < end, other=-1)
    block, source, live = _source_page(
        key, key < end, request, cu_seq_lens, block_table, table_stride, num_requests, table_width, num_blocks
    )
    return block * page_stride, source, live


@triton.jit(do_not_specialize=["total", "num_requests", "table_width", "num_blocks", "table_stride"])
def stage_kernel(
    cache,
    block_table,
    cu_seq_lens,
    token_to_seq,
    payload,
    scales,
    total,
    num_requests,
    table_width,
    num_blocks,
    table_stride,
    page_stride,
):
    """Fills every num_programs-th page from ``program_id`` on; finds the next page's keys while this page's bytes move."""
    end = tl.minimum(tl.load(cu_seq_lens + num_requests), total)
    num_pages = (total + 63) // 64
    row = tl.arange(0, 64)
    # Output column 4*low + high of the scales holds row 16*high + low, so keys are found in that order too.
    column = row % 4 * 16 + row // 4
    group = tl.arange(0, GROUPS)
    b = tl.arange(0, 16)
    first = tl.program_id(0)
    base, source, live = _page_sources(
        first, row, end, block_table, cu_seq_lens, token_to_seq, table_stride, num_requests, table_width, num_blocks,
        page_stride,
    )  # fmt: skip
    scale_base, scale_source, scale_live = _page_sources(
        first, column, end, block_table, cu_seq_lens, token_to_seq, table_stride, num_requests, table_width, num_blocks,
        page_stride,
    )  # fmt: skip
    for page in range(first, num_pages, tl.num_programs(0)):
        place = (base + source * 16)[None, :, None] + (group * 1024)[:, None, None] + b[None, None, :]
        value = tl.load(cache + place, mask=live[None, :, None], other=0)
        place = (scale_base + 4096 + scale_source % 16 * 4 + scale_source // 16)[None, :] + (group * 64)[:, None]
        scale = tl.load(cache + place, mask=scale_live[None, :], other=0)
        following = page + tl.num_programs(0)
        base, source, live = _page_sources(
            following, row, end, block_table, cu_seq_lens, token_to_seq, table_stride, num_requests, table_width,
            num_blocks, page_stride,
        )  # fmt: skip
        scale_base, scale_source, scale_live = _page_sources(
            following, column, end, block_table, cu_seq_lens, token_to_seq, table_stride, num_requests, table_width,
            num_blocks, page_stride,
        )  # fmt: skip
        target = payload + tl.cast(page, tl.int64) * 4096
        tl.store(target + (group * 1024)[:, None, None] + (row * 16)[None, :, None] + b[None, None, :], value)
        target = scales + tl.cast(page, tl.int64) * 256
        tl.store(target + (group * 64)[:, None] + row[None, :], scale)


def _empty_pages(total, device):
    pages = triton.cdiv(total, 64)
    payload = torch.empty((pages, 1, 4, 64, 16), dtype=torch.uint8, device=device)
    return pages, payload, torch.empty((pages, 1, 4, 64), dtype=torch.uint8, device=device)


def stage_keys(cache, block_table, cu_seq_lens, token_to_seq, config=STAGE):
    total = token_to_seq.shape[0]
    pages, payload, scales = _empty_pages(total, cache.device)
    if total == 0:
        return payload, scales
    stage_kernel[(min(pages, config.per_sm * multiprocessors(cache.device)),)](
        cache,
        block_table,
        cu_seq_lens,
        token_to_seq,
        payload,
        scales,
        total,
        block_table.shape[0],
        block_table.shape[1],
        cache.shape[0],
        block_table.stride(0),
        cache.stride(0),
        num_warps=config.num_warps,
    )
    return payload, scales


@triton.jit(do_not_specialize=["max_keys", "num_requests", "table_width", "num_blocks", "table_stride"])
def pack_kernel(
    cache,
    block_table,
    cu_seq_lens,
    packed,
    max_keys,
    num_requests,
    table_width,
    num_blocks,
    table_stride,
    page_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < max_keys
    key = row.to(tl.int32)
    # The request of a key is the last one that starts at or before it: a binary search in the cumulative lengths. Lengths that
    # are not ascending only change which request is found; every use of it is checked.
    low = tl.zeros([BLOCK], dtype=tl.int32)
    high = low + num_requests
    span = num_requests
    while span > 0:
        middle = (low + high + 1) // 2
        start = tl.load(cu_seq_lens + middle, mask=inside & (low < high), other=0)
        up = start <= key
        low = tl.where(up & (low < high), middle, low)
        high = tl.where(up, high, tl.minimum(high, middle - 1))
        span = span // 2
    block, source, live = _source_page(
        key, inside, low, cu_seq_lens, block_table, table_stride, num_requests, table_width, num_blocks
    )
    base = cache + block * page_stride
    b = tl.arange(0, 64)
    value = tl.load(base[:, None] + (source * 16)[:, None] + (b // 16 * 1024 + b % 16)[None, :], mask=live[:, None], other=0)
    tl.store(packed + row[:, None] * 68 + b[None, :], value, mask=inside[:, None])
    group = tl.arange(0, GROUPS)
    column = 4096 + source % 16 * 4 + source // 16
    value = tl.load(base[:, None] + column[:, None] + (group * 64)[None, :], mask=live[:, None], other=0)
    tl.store(packed + row[:, None] * 68 + 64 + group[None, :], value, mask=inside[:, None])


def pack_keys(cache, block_table, local_cu_seq_lens, max_local_keys):
    packed = torch.empty((max_local_keys, 68), dtype=torch.uint8, device=cache.device)
    if max_local_keys == 0:
        return packed
    block = 64
    pack_kernel[(triton.cdiv(max_local_keys, block),)](
        cache,
        block_table,
        local_cu_seq_lens,
        packed,
        max_local_keys,
        block_table.shape[0],
        block_table.shape[1],
        cache.shape[0],
        block_table.stride(0),
        cache.stride(0),
        BLOCK=block,
        num_warps=4,
    )
    return packed


@triton.jit
def _gathered_row(key, live, token_to_seq, cu_seq_lens, all_cu, num_requests, max_local, world, interleave, gathered_stride):
    request = tl.load(token_to_seq + key, mask=live, other=-1)
    live = live & (request >= 0) & (request < num_requests)
    first = tl.load(cu_seq_lens + request, mask=live, other=0)
    last = tl.load(cu_seq_lens + request + 1, mask=live, other=0)
    position = tl.where(live, key - first, -1)
    live = live & (position >= 0) & (key < last)
    position = tl.maximum(position, 0)
    owner = position // interleave % world
    local = position // (interleave * world) * interleave + position % interleave
    start = tl.load(all_cu + owner.to(tl.int64) * (num_requests + 1) + request, mask=live, other=-1)
    row = start.to(tl.int64) + local
    # A wrong all_cu never reads past a rank's rows.
    live = live & (row >= 0) & (row < max_local)
    return (owner.to(tl.int64) * max_local + row) * gathered_stride, live


@triton.jit(do_not_specialize=["total", "num_requests", "max_local", "world", "interleave"])
def restore_kernel(
    gathered,
    gathered_scales,
    token_to_seq,
    cu_seq_lens,
    all_cu,
    payload,
    scales,
    total,
    num_requests,
    max_local,
    world,
    interleave,
    gathered_stride,
    WORD: tl.constexpr,
):
    """One page. ``gathered`` and ``payload`` hold words of WORD bytes; ``gathered_scales`` is the bytes of ``gathered``."""
    page = tl.program_id(0).to(tl.int64)
    end = tl.minimum(tl.load(cu_seq_lens + num_requests), total)
    row = tl.arange(0, 64)
    key = (page * 64 + row).to(tl.int32)
    source, live = _gathered_row(
        key, key < end, token_to_seq, cu_seq_lens, all_cu, num_requests, max_local, world, interleave, gathered_stride
    )
    word = tl.arange(0, 64 // WORD)
    value = tl.load(gathered + source[:, None] // WORD + word[None, :], mask=live[:, None], other=0)
    group_words: tl.constexpr = 16 // WORD
    place = (word // group_words * (1024 // WORD) + word % group_words)[None, :] + (row * group_words)[:, None]
    tl.store(payload + page * (4096 // WORD) + place, value)
    column = tl.arange(0, 64)
    key = (page * 64 + column % 4 * 16 + column // 4).to(tl.int32)
    source, live = _gathered_row(
        key, key < end, token_to_seq, cu_seq_lens, all_cu, num_requests, max_local, world, interleave, gathered_stride
    )
    group = tl.arange(0, GROUPS)
    value = tl.load(gathered_scales + source[None, :] + 64 + group[:, None], mask=live[None, :], other=0)
    tl.store(scales + page * 256 + (group * 64)[:, None] + column[None, :], value)


def restore_keys(gathered, token_to_seq, cu_seq_lens, all_cu, world, interleave):
    total = token_to_seq.shape[0]
    pages, payload, scales = _empty_pages(total, gathered.device)
    if total == 0:
        return payload, scales
    # Rows of 68 bytes are words of four where the gathered rows start at a multiple of four.
    word = 4 if gathered.data_ptr() % 4 == 0 and gathered.stride(0) % 4 == 0 and gathered.storage_offset() % 4 == 0 else 1
    restore_kernel[(pages,)](
        gathered.view(torch.int32) if word == 4 else gathered,
        gathered,
        token_to_seq,
        cu_seq_lens,
        all_cu.contiguous(),
        payload.view(torch.int32) if word == 4 else payload,
        scales,
        total,
        cu_seq_lens.shape[0] - 1,
        gathered.shape[0] // world,
        world,
        interleave,
        gathered.stride(0),
        WORD=word,
        num_warps=4,
    )
    return payload, scales
