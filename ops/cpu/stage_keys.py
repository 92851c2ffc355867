"""Gathers a request set's index keys from the paged cache into compact pages."""

import torch

from ..indexer.layout import KEY_BYTES, PAGE, cache_planes, scale_column, to_pages
from ..indexer.mxfp4 import GROUPS, PACKED


def _gather(cache, block_table, cu_seq_lens, request, total, rows):
    """Token-major payload [rows, 4, 16] and scales [rows, 4] of the keys 0..total-1 of ``request`` [total]; zeros where none.

    Nothing is dereferenced for a key at or past the device's own total, or whose table entry names no block.
    """
    payload = torch.zeros((rows, GROUPS, 16), dtype=torch.uint8, device=cache.device)
    scales = torch.zeros((rows, GROUPS), dtype=torch.uint8, device=cache.device)
    requests, width = block_table.shape
    if total == 0 or requests == 0 or width == 0 or cache.shape[0] == 0:
        return payload, scales
    cu = cu_seq_lens.to(torch.int64)
    key = torch.arange(total, device=cache.device)
    request = request.to(torch.int64)
    live = (key < cu[-1]) & (request >= 0) & (request < requests)
    key, request = key[live], request[live]
    index = key - cu[request]
    inside = (index >= 0) & (key < cu[request + 1]) & (index < width * PAGE)
    key, request, index = key[inside], request[inside], index[inside]
    block = block_table[request, index // PAGE].to(torch.int64)
    valid = (block >= 0) & (block < cache.shape[0])
    key, block, row = key[valid], block[valid], (index % PAGE)[valid]
    cache_payload, cache_scales = cache_planes(cache)
    payload[key] = cache_payload[block, :, row]
    scales[key] = cache_scales[block, :, scale_column(row)]
    return payload, scales


def stage_keys(cache, block_table, cu_seq_lens, token_to_seq):
    total = token_to_seq.shape[0]
    pages = -(-total // PAGE)
    return to_pages(*_gather(cache, block_table, cu_seq_lens, token_to_seq, total, pages * PAGE))


def pack_keys(cache, block_table, local_cu_seq_lens, max_local_keys):
    key = torch.arange(max_local_keys, device=cache.device, dtype=torch.int32)
    request = torch.searchsorted(local_cu_seq_lens, key, right=True) - 1
    payload, scales = _gather(cache, block_table, local_cu_seq_lens, request, max_local_keys, max_local_keys)
    return torch.cat((payload.reshape(max_local_keys, PACKED), scales), dim=1)


def restore_keys(gathered, token_to_seq, cu_seq_lens, all_cu, world, interleave):
    total = token_to_seq.shape[0]
    rows = -(-total // PAGE) * PAGE
    keys = torch.zeros((rows, KEY_BYTES), dtype=torch.uint8, device=gathered.device)
    requests = cu_seq_lens.shape[0] - 1
    cu, every_cu = cu_seq_lens.to(torch.int64), all_cu.to(torch.int64)
    key = torch.arange(total, device=gathered.device)
    request = token_to_seq.to(torch.int64)
    live = (key < cu[-1]) & (request >= 0) & (request < requests)
    key, request = key[live], request[live]
    position = key - cu[request]
    inside = (position >= 0) & (key < cu[request + 1])
    key, request, position = key[inside], request[inside], position[inside]
    owner = (position // interleave) % world
    local = position // (interleave * world) * interleave + position % interleave
    max_local = gathered.shape[0] // world
    row = every_cu[owner, request] + local
    valid = (row >= 0) & (row < max_local)  # a wrong all_cu never reads past a rank's rows
    keys[key[valid]] = gathered[(owner * max_local + row)[valid]]
    return to_pages(keys[:, :PACKED].reshape(rows, GROUPS, 16), keys[:, PACKED:])
