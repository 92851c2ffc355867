"""Plain reference of every operation, written from the specification alone.

Nothing here imports the package: these functions are what the tests compare it with. They favour the shape of the specification's
sentences over speed: bytes are addressed one formula at a time, requests and rows are walked in loops, and wherever the
specification speaks of real numbers the arithmetic is float64.
"""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import torch

HEAD_DIM = 128
GROUPS = 4
GROUP_SIZE = 32
PAGE_TOKENS = 64
PAGE_BYTES = 4352
PLANE_BYTES = 4096
KEY_BYTES = 68
REGION_TOKENS = 8

E2M1_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def cdiv(a, b):
    return -(-a // b)


# MXFP4


def scale_byte(amax):
    """UE8M0 byte of a group whose largest magnitude is amax (a finite float)."""
    fraction, exponent = math.frexp(max(float(amax), 6.0 * 2.0**-126))
    mantissa, exponent = 2.0 * fraction, exponent - 1
    return exponent + 125 + (mantissa > 1.5)


def e2m1_code(magnitudes):
    """Nearest E2M1 code of non-negative magnitudes, ties to the even code."""
    grid = E2M1_VALUES[:8]
    codes = np.zeros(magnitudes.shape, dtype=np.uint8)
    for code in range(7):
        middle = (grid[code] + grid[code + 1]) / 2
        above = magnitudes > middle if code % 2 == 0 else magnitudes >= middle
        codes += above.astype(np.uint8)
    return codes


def quantize_mxfp4(x):
    """[..., 128] floating tensor -> (packed uint8 [..., 64], scale uint8 [..., 4])."""
    lead = tuple(x.shape[:-1])
    rows = x.detach().to(torch.float64).reshape(-1, HEAD_DIM).numpy()
    packed = np.zeros((len(rows), HEAD_DIM // 2), dtype=np.uint8)
    scale = np.zeros((len(rows), GROUPS), dtype=np.uint8)
    for i, row in enumerate(rows):
        for c in range(GROUPS):
            group = row[GROUP_SIZE * c : GROUP_SIZE * (c + 1)]
            if not np.isfinite(group).all():
                scale[i, c] = 255
                continue
            e = scale_byte(np.abs(group).max())
            scale[i, c] = e
            scaled = group * 2.0 ** (127 - e)
            codes = e2m1_code(np.abs(scaled)) | (np.signbit(scaled).astype(np.uint8) << 3)
            packed[i, 16 * c : 16 * (c + 1)] = codes[0::2] | (codes[1::2] << 4)
    return torch.from_numpy(packed).reshape(*lead, 64), torch.from_numpy(scale).reshape(*lead, GROUPS)


def decode_mxfp4(packed, scale):
    """(packed uint8 [..., 64], scale uint8 [..., 4]) -> float64 numpy [..., 128]; byte 255 gives NaN everywhere in its group."""
    packed = packed.numpy() if isinstance(packed, torch.Tensor) else packed
    scale = scale.numpy() if isinstance(scale, torch.Tensor) else scale
    values = np.empty((*packed.shape[:-1], HEAD_DIM))
    values[..., 0::2] = E2M1_VALUES[packed & 15]
    values[..., 1::2] = E2M1_VALUES[packed >> 4]
    factor = np.where(scale == 255, np.nan, 2.0 ** (scale.astype(np.float64) - 127))
    return values * np.repeat(factor, GROUP_SIZE, axis=-1)


def without_negative_zero(packed):
    """Packed bytes with code 8 (-0) written as code 0: codes compare up to the sign of zero."""
    low, high = packed & 15, packed >> 4
    low = torch.where(low == 8, torch.zeros_like(low), low)
    high = torch.where(high == 8, torch.zeros_like(high), high)
    return low | (high << 4)


# Pages of 64 tokens


def scale_column(row):
    return (row % 16) * 4 + row // 16


def payload_address(base, stride, page, row, group, byte):
    return base + page * stride + group * 1024 + row * 16 + byte


def scale_address(base, stride, page, row, group):
    return base + page * stride + PLANE_BYTES + group * PAGE_TOKENS + scale_column(row)


def storage_bytes(tensor):
    """The whole storage under a tensor as one flat uint8 tensor (shared memory)."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def read_key(cache, page, row):
    """68 bytes of one cached token: 64 payload bytes in natural order, then its 4 scale bytes."""
    memory, base, stride = storage_bytes(cache).numpy(), cache.storage_offset(), cache.stride(0)
    key = np.empty(KEY_BYTES, dtype=np.uint8)
    for c in range(GROUPS):
        first = payload_address(base, stride, page, row, c, 0)
        key[16 * c : 16 * (c + 1)] = memory[first : first + 16]
        key[64 + c] = memory[scale_address(base, stride, page, row, c)]
    return torch.from_numpy(key)


def write_key(cache, page, row, key):
    memory, base, stride = storage_bytes(cache).numpy(), cache.storage_offset(), cache.stride(0)
    key = key.numpy()
    for c in range(GROUPS):
        first = payload_address(base, stride, page, row, c, 0)
        memory[first : first + 16] = key[16 * c : 16 * (c + 1)]
        memory[scale_address(base, stride, page, row, c)] = key[64 + c]


def store_index_keys(keys, cache, slot_mapping):
    packed, scale = quantize_mxfp4(keys)
    for i, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            write_key(cache, slot // PAGE_TOKENS, slot % PAGE_TOKENS, torch.cat([packed[i], scale[i]]))


def pages_of_keys(keys, total):
    """Keys uint8 [n, 68] in chunk-global order -> (payload [pages,1,4,64,16], scales [pages,1,4,64]) for `total` >= n keys."""
    pages = cdiv(total, PAGE_TOKENS)
    payload = torch.zeros(pages, 1, GROUPS, PAGE_TOKENS, 16, dtype=torch.uint8)
    scales = torch.zeros(pages, 1, GROUPS, PAGE_TOKENS, dtype=torch.uint8)
    payload_bytes, scale_bytes = payload.numpy(), scales.numpy()  # the same memory, quicker to index
    for g, key in enumerate(keys.numpy()):
        for c in range(GROUPS):
            payload_bytes[g // 64, 0, c, g % 64] = key[16 * c : 16 * (c + 1)]
            scale_bytes[g // 64, 0, c, scale_column(g % 64)] = key[64 + c]
    return payload, scales


def keys_of_pages(payload, scales, total):
    """Inverse of pages_of_keys: uint8 [total, 68]."""
    payload, scales = payload.numpy(), scales.numpy()
    keys = np.zeros((total, KEY_BYTES), dtype=np.uint8)
    for g in range(total):
        for c in range(GROUPS):
            keys[g, 16 * c : 16 * (c + 1)] = payload[g // 64, 0, c, g % 64]
            keys[g, 64 + c] = scales[g // 64, 0, c, scale_column(g % 64)]
    return torch.from_numpy(keys)


def gather_keys(cache, block_table, cu_seq_lens):
    """Every key of a request set in chunk-global order, uint8 [cu[R], 68]."""
    cu = cu_seq_lens.tolist()
    keys = torch.zeros(cu[-1], KEY_BYTES, dtype=torch.uint8)
    for r in range(len(cu) - 1):
        for j in range(cu[r + 1] - cu[r]):
            keys[cu[r] + j] = read_key(cache, int(block_table[r, j // PAGE_TOKENS]), j % PAGE_TOKENS)
    return keys


def stage_keys(cache, block_table, cu_seq_lens, total):
    """total is the host's count (>= the device's cu[R]); rows past cu[R] are zero."""
    return pages_of_keys(gather_keys(cache, block_table, cu_seq_lens), total)


# Context parallel


def owner_of(position, world, interleave):
    return (position // interleave) % world


def local_of(position, world, interleave):
    return (position // (interleave * world)) * interleave + position % interleave


def position_of(local, rank, world, interleave):
    return ((local // interleave) * world + rank) * interleave + local % interleave


def local_count(n, rank, world, interleave):
    whole = n // (interleave * world)
    return whole * interleave + min(max(n - whole * interleave * world - rank * interleave, 0), interleave)


def local_counts(n, world, interleave):
    return [local_count(n, rank, world, interleave) for rank in range(world)]


def all_local_cu(lengths, world, interleave):
    """[world, R+1] int32: every rank's cumulative local count."""
    rows = []
    for rank in range(world):
        rows.append(cumulative([local_count(n, rank, world, interleave) for n in lengths]))
    return torch.tensor(rows, dtype=torch.int32).reshape(world, len(lengths) + 1)


def cumulative(counts):
    return [0, *itertools.accumulate(counts)]


def pack_keys(cache, block_table, local_cu_seq_lens, max_local_keys):
    packed = torch.zeros(max_local_keys, KEY_BYTES, dtype=torch.uint8)
    keys = gather_keys(cache, block_table, local_cu_seq_lens)
    packed[: len(keys)] = keys
    return packed


def restore_keys(gathered, cu_seq_lens, all_cu, world, interleave, total):
    cu = cu_seq_lens.tolist()
    max_local = gathered.shape[0] // world
    keys = torch.zeros(cu[-1], KEY_BYTES, dtype=torch.uint8)
    for r in range(len(cu) - 1):
        for p in range(cu[r + 1] - cu[r]):
            rank = owner_of(p, world, interleave)
            row = rank * max_local + int(all_cu[rank, r]) + local_of(p, world, interleave)
            keys[cu[r] + p] = gathered[row]
    return pages_of_keys(keys, total)


# Scoring and selection


def score_keys(q_packed, q_scale, payload, scales, weights, ks, ke, weight_scale, total_keys):
    """-> (logits float64 numpy [T, total_keys] with -inf outside the windows, magnitude of every logit)."""
    keys = keys_of_pages(payload, scales, total_keys)
    k = decode_mxfp4(keys[:, :64], keys[:, 64:])
    q = decode_mxfp4(q_packed, q_scale)
    w = weights.to(torch.float64).numpy() * weight_scale
    dot = np.einsum("thd,nd->thn", q, k)
    logits = np.einsum("th,thn->tn", w, np.maximum(dot, 0.0))
    magnitude = np.einsum("th,thn->tn", np.abs(w), np.einsum("thd,nd->thn", np.abs(q), np.abs(k)))
    column = np.arange(total_keys)
    inside = (column >= ks.numpy()[:, None]) & (column < ke.numpy()[:, None])
    return np.where(inside, logits, -np.inf), np.where(inside, magnitude, 0.0)


def select_row(row, lo, hi, k, keep_first=0, keep_last=0):
    """Selected window-local indices of one row of logits (any sequence of floats), padded with -1 to k."""
    n = hi - lo
    values = [-math.inf if math.isnan(v) else v for v in map(float, row[lo:hi])]
    if n <= k:
        chosen = list(range(n))
    else:
        forced = set(range(keep_first)) | set(range(n - keep_last, n))
        rest = sorted((i for i in range(n) if i not in forced), key=lambda i: (-values[i], i))
        chosen = sorted([*forced, *rest[: k - len(forced)]])
    return chosen + [-1] * (k - len(chosen))


def select_keys(logits, ks, ke, k, keep_first=0, keep_last=0):
    rows = [
        select_row(row, lo, hi, k, keep_first, keep_last)
        for row, lo, hi in zip(logits.tolist(), ks.tolist(), ke.tolist(), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), k)


# Chunks


def build_prefill_chunks(
    query_lens, seq_lens, *, key_budget, logits_bytes=2**29, compress_ratio=1, token_offset=0, own_region=False
):
    """Chunks without their tables: each names its requests [first, last), its set, rows and windows."""
    keys = [n // compress_ratio for n in seq_lens]
    chunks, first, token = [], 0, token_offset
    for request_set in itertools.count():
        if first == len(keys):
            return chunks
        last = first
        while last < len(keys):
            set_keys = sum(keys[first : last + 1])
            set_rows = sum(query_lens[first : last + 1])
            if set_keys > key_budget or set_rows * set_keys * 4 > logits_bytes:
                break
            last += 1
        last = max(last, first + 1)
        cu = cumulative(keys[first:last])
        total = cu[-1]
        ks, ke = [], []
        for r in range(first, last):
            for i in range(query_lens[r]):
                position = seq_lens[r] - query_lens[r] + i
                ks.append(cu[r - first])
                ke.append(cu[r - first] + (position if own_region else position + 1) // compress_ratio)
        rows = len(ks)
        if total:
            piece = max(1, logits_bytes // (4 * total))
            for a in range(0, rows, piece):
                b = min(a + piece, rows)
                chunks.append(
                    SimpleNamespace(
                        request_set=request_set,
                        first=first,
                        last=last,
                        cu_seq_lens=cu,
                        total_seq_lens=total,
                        token_to_seq=[r for r in range(last - first) for _ in range(keys[first + r])],
                        cu_seqlen_ks=ks[a:b],
                        cu_seqlen_ke=ke[a:b],
                        token_start=token + a,
                        token_end=token + b,
                        num_reqs=last - first,
                        max_seqlen_k=max(keys[first:last]),
                    )
                )
        token += rows
        first = last


def prefill_workspace_bytes(max_keys, max_reqs, world, interleave, max_rows=0, k=0, page_sets=1):
    pages = cdiv(max_keys, 64) * 64
    if world == 1:
        page_set = 68 * (max_keys + pages)
    else:
        local = cdiv(max_keys, world) + max_reqs * interleave
        page_set = 68 * ((world + 1) * local + pages)
    return 2**30 + page_sets * page_set + 8 * max_rows * k


# Sparse pages


def row_regions(positions, region_count):
    return [min(p // REGION_TOKENS + 1, region_count) for p in positions]


def compact_page_metadata(positions, region_count):
    """-> (indptr list, last_page_len list)."""
    return cumulative(row_regions(positions, region_count)), [p % REGION_TOKENS + 1 for p in positions]


def append_own_region(selected, positions):
    rows, k = selected.shape
    regions = torch.full((rows, k + 1), -1, dtype=torch.int32)
    for r, position in enumerate(positions.tolist()):
        own = position // REGION_TOKENS
        if position < 0:
            continue
        history = min(own, k)
        regions[r, :history] = selected[r, :history]
        regions[r, history] = own
    return regions


def kv_page_stride(cache):
    return cache.stride(0) // (REGION_TOKENS * cache.stride(2))


def view_size(cache):
    blocks, _, tokens, _ = cache.shape
    return ((blocks - 1) * cache.stride(0) + tokens * cache.stride(2)) // (REGION_TOKENS * cache.stride(2))


def page_id(region, table_row, block_size, page_stride):
    token = REGION_TOKENS * region
    return int(table_row[token // block_size]) * page_stride + (token % block_size) // REGION_TOKENS


def fill_prefill_pages(regions, table, owners, indptr, pages, block_size, page_stride):
    """Writes pages in place; indptr is the rows' own slice (its values are absolute offsets into pages)."""
    bounds = indptr.tolist()
    for r in range(regions.shape[0]):
        owner = int(owners[r]) if table.shape[0] > 1 else 0
        for j in range(bounds[r + 1] - bounds[r]):
            pages[bounds[r] + j] = page_id(int(regions[r, j]), table[owner], block_size, page_stride)


def plan_staged_prefill_pages(table, lengths, block_size):
    """-> (pages list, remapped table as nested lists)."""
    pages, remapped = [], []
    for row, length in zip(table.tolist(), lengths, strict=True):
        count = cdiv(length, block_size)
        remapped.append([*range(len(pages), len(pages) + count)] + [0] * (len(row) - count))
        pages += row[:count]
    return pages, remapped


def as_fp8(cache):
    return cache.view(torch.float8_e4m3fn) if cache.dtype == torch.uint8 else cache


def stage_prefill_pages(cache, pages, dtype, k_scale=None, v_scale=None):
    cache = as_fp8(cache)
    _, _, tokens, channels = cache.shape
    staged = torch.empty(len(pages), 1, tokens, channels, dtype=dtype)
    for i, block in enumerate(pages):
        values = cache[block].clone()
        if cache.dtype == torch.float8_e4m3fn:
            values = values.float()
            values[..., : channels // 2] *= k_scale
            values[..., channels // 2 :] *= v_scale
        staged[i] = values.to(dtype)
    return staged


def region_tokens(cache, page):
    """The 8 tokens of a page id of the cache's view, float64 [8, 2*dim]; addressed in elements from the slice's own offset."""
    flat = torch.empty(0, dtype=cache.dtype).set_(cache.untyped_storage())
    channels = cache.shape[3]
    rows = []
    for t in range(REGION_TOKENS):
        first = cache.storage_offset() + (page * REGION_TOKENS + t) * cache.stride(2)
        rows.append(flat[first : first + channels])
    return torch.stack(rows).to(torch.float64)


def attend(query, keys, values, scale):
    """One row: query float64 [heads, dim] over keys and values float64 [tokens, dim]."""
    logits = scale * query @ keys.T
    weights = torch.exp(logits - logits.max(dim=-1, keepdim=True).values)
    return (weights / weights.sum(dim=-1, keepdim=True)) @ values


def listed_tokens(cache, pages, last_page_len, k_scale=1.0, v_scale=1.0):
    """Keys and values float64 [tokens, dim] of one row's pages; the last page ends after last_page_len tokens."""
    dim = cache.shape[3] // 2
    tokens = torch.cat([region_tokens(cache, page) for page in pages])
    tokens = tokens[: REGION_TOKENS * (len(pages) - 1) + last_page_len]
    return tokens[:, :dim] * k_scale, tokens[:, dim:] * v_scale


def paged_attention(query, cache, pages, indptr, last_page_len, scale, k_scale=1.0, v_scale=1.0):
    """float64 [rows, heads, dim]; a row without pages is exactly zero."""
    cache = as_fp8(cache)
    out = torch.zeros(query.shape, dtype=torch.float64)
    bounds, ids = indptr.tolist(), pages.tolist()
    for r in range(query.shape[0]):
        own = ids[bounds[r] : bounds[r + 1]]
        if own:
            keys, values = listed_tokens(cache, own, int(last_page_len[r]), k_scale, v_scale)
            out[r] = attend(query[r].to(torch.float64), keys, values, scale)
    return out


def history(cache, table_row, length):
    """Every token of a request's first `length`, float64 [length, 2*dim], through the block table."""
    tokens = cache.shape[2]
    cache = as_fp8(cache)
    if not length:
        return torch.zeros(0, cache.shape[3], dtype=torch.float64)
    return torch.stack([cache[int(table_row[t // tokens]), 0, t % tokens].to(torch.float64) for t in range(length)])


def dense_attention(query, cache, table_rows, positions, scale):
    """Every row over all tokens 0..position of its request, float64."""
    dim = query.shape[2]
    out = torch.zeros(query.shape, dtype=torch.float64)
    for r, position in enumerate(positions):
        if position >= 0:
            tokens = history(cache, table_rows[r], position + 1)
            out[r] = attend(query[r].to(torch.float64), tokens[:, :dim], tokens[:, dim:], scale)
    return out
