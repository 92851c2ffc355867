"""Builders of inputs: caches of every physical order, block tables, request sets; poisoned wherever nothing may read."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import reference as ref
import torch

GOLDEN = json.loads((Path(__file__).parent / "golden" / "golden.json").read_text())
INT32_MAX = 2**31 - 1
STALE_ENTRIES = (-1, INT32_MAX, -(2**31), 10**6)
# Attention's error per dtype. The specification's 4e-3 (bf16) is for typical outputs, which sum many values; see assert_attended.
ATTENTION_TOLERANCES = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-5}
HISTORY_LAYOUTS = ("NHD", "HND", "layers between blocks", "padded tokens")


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random_bytes(gen, *shape, low=0, high=256):
    return torch.randint(low, high, shape, generator=gen, dtype=torch.int32).to(torch.uint8)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def bits(tensor):
    """Integers with the same bits: equality that tells NaNs and zeros apart."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(bits(actual), bits(expected))


def assert_attended(out, expected):
    """out [rows, heads, dim] against float64: relative to each row's and head's norm, floored where values cancel in the sum."""
    assert out.isfinite().all()
    error, norm = (out.double() - expected).norm(dim=-1), expected.norm(dim=-1)
    floor = 0.05 * expected.abs().amax() * expected.shape[-1] ** 0.5 if expected.numel() else 0.0
    worst = (error / norm.clamp_min(floor).clamp_min(1e-30)).max() if error.numel() else 0.0
    assert worst <= ATTENTION_TOLERANCES[out.dtype], float(worst)


def strided_rows(tensor, pad, offset=0, fill=None):
    """The same values with row stride (dim 0) enlarged by pad elements and a storage offset; everything between is `fill`."""
    inner = tensor[0].numel() if tensor.shape[0] else max(1, tensor.shape[1:].numel())
    stride = inner + pad
    storage = torch.empty(offset + tensor.shape[0] * stride + pad, dtype=tensor.dtype)
    if fill is not None:
        storage.fill_(fill)
    view = storage[offset:].as_strided(tensor.shape, (stride, *tensor[:1].contiguous().stride()[1:]), offset)
    view.copy_(tensor)
    return view


# FP4 index keys


def index_cache(blocks, stride=ref.PAGE_BYTES, offset=0, guard=64, fill=255):
    """uint8 [blocks, 64, 68] with strides (stride, 68, 1) at a storage offset, `guard` bytes on both sides; all bytes `fill`."""
    size = 2 * guard + offset + blocks * max(stride, ref.PAGE_BYTES)
    storage = torch.full((size,), fill, dtype=torch.uint8) if fill is not None else torch.empty(size, dtype=torch.uint8)
    return storage.as_strided((blocks, 64, 68), (stride, 68, 1), guard + offset)


def block_tables(lengths, blocks, gen, *, width=None, tail=-1, page_tokens=64):
    """int32 [R, width] of distinct random blocks; entries past a request's own are `tail`."""
    counts = [ref.cdiv(n, page_tokens) for n in lengths]
    width = max(counts, default=0) if width is None else width
    order = torch.randperm(blocks, generator=gen)[: sum(counts)].tolist()
    assert len(order) == sum(counts), "the sample needs more blocks"
    table = torch.full((len(lengths), width), tail, dtype=torch.int32)
    for r, count in enumerate(counts):
        table[r, :count] = int32(order[:count])
        order = order[count:]
    return table


def write_index_keys(cache, table, lengths, keys):
    """Writes uint8 [sum(lengths), 68] through the table, by the byte formulas."""
    g = 0
    for r, n in enumerate(lengths):
        for j in range(n):
            ref.write_key(cache, int(table[r, j // 64]), j % 64, keys[g])
            g += 1


def index_set(lengths, gen, *, stride=ref.PAGE_BYTES, offset=0, spare=2, width=None, tail=-1, keys=None, scale_range=(120, 132)):
    """One request set over a poisoned cache: every byte that belongs to no key of the set is 0xFF (scale 255 is NaN)."""
    blocks = sum(ref.cdiv(n, 64) for n in lengths) + spare
    cache = index_cache(blocks, stride, offset)
    table = block_tables(lengths, blocks, gen, width=width, tail=tail)
    total = sum(lengths)
    if keys is None:
        keys = random_keys(gen, total, scale_range)
    write_index_keys(cache, table, lengths, keys)
    token_to_seq = int32([r for r, n in enumerate(lengths) for _ in range(n)])
    return SimpleNamespace(
        cache=cache,
        block_table=table,
        keys=keys,
        lengths=list(lengths),
        cu_seq_lens=int32(ref.cumulative(lengths)),
        token_to_seq=token_to_seq,
        num_reqs=len(lengths),
        total_seq_lens=total,
        max_seqlen_k=max(lengths, default=0),
    )


def random_keys(gen, n, scale_range=(120, 132)):
    keys = random_bytes(gen, n, ref.KEY_BYTES)
    low, high = scale_range
    keys[:, 64:] = random_bytes(gen, n, 4, low=low, high=high + 1)
    return keys


def random_query(gen, rows, heads, scale_range=(120, 132)):
    low, high = scale_range
    return random_bytes(gen, rows, heads, 64), random_bytes(gen, rows, heads, 4, low=low, high=high + 1)


def golden_case():
    """The golden logits: (q, q_scale, keys [N, 68], weights, ks, ke, weight_scale, expected fp32 logits)."""
    case = GOLDEN["logits"]
    rows, heads, total = (case["shape"][name] for name in "THN")

    def as_bytes(name, *shape):
        return torch.tensor(list(bytes.fromhex(case[name])), dtype=torch.uint8).reshape(shape)

    q, q_scale = as_bytes("q_packed", rows, heads, 64), as_bytes("q_scale", rows, heads, 4)
    keys = torch.cat([as_bytes("k_packed", total, 64), as_bytes("k_scale", total, 4)], dim=1)
    logits = torch.tensor([[float("-inf") if v is None else v for v in row] for row in case["logits"]])
    return q, q_scale, keys, torch.tensor(case["weights"]), int32(case["ks"]), int32(case["ke"]), case["weight_scale"], logits


def windows(gen, rows, total):
    """Random [ks, ke) inside [0, total], empty ones among them."""
    ends = torch.randint(0, total + 1, (rows, 2), generator=gen).sort(dim=1).values.to(torch.int32)
    empty = torch.rand(rows, generator=gen) < 0.15
    ks, ke = ends[:, 0].contiguous(), ends[:, 1].contiguous()
    return ks, torch.where(empty, ks, ke)


# The golden pages of stage_keys


def golden_keys(total):
    g = torch.arange(total)[:, None]
    payload = (31 * g + 7 * torch.arange(64)) % 256
    scale = (5 * g + 11 * torch.arange(4)) % 254 + 1
    return torch.cat([payload, scale], dim=1).to(torch.uint8)


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def assert_golden_pages(payload, scales):
    case = GOLDEN["stage_keys"]
    assert list(payload.shape) == case["payload_shape"] and list(scales.shape) == case["scales_shape"]
    for sample in case["samples"]:
        page, token, column = sample["payload_page"], sample["token"], sample["scale_column"]
        assert payload[page, 0, :, token].flatten().tolist() == list(bytes.fromhex(sample["payload"]))
        assert scales[page, 0, :, column].tolist() == sample["scales"]
    assert digest(payload) == case["payload_sha256"]
    assert digest(scales) == case["scales_sha256"]


def assert_pages(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == torch.uint8 and a.shape == e.shape and a.is_contiguous()
        assert torch.equal(a, e)


# Key-value caches


def kv_cache(blocks, tokens, dim, dtype, *, layout="NHD", groups=2, group=0, layers=2, offset=0, fill=float("nan")):
    """One KV group's slice [blocks, 1, tokens, 2*dim] of a larger cache in a physical order; every element is `fill`."""
    channels = 2 * dim
    if layout == "NHD":
        shape, strides = (blocks, tokens, groups, channels), (tokens * groups * channels, channels, groups * channels)
    elif layout == "HND":
        shape, strides = (blocks, groups, tokens, channels), (groups * tokens * channels, tokens * channels, channels)
    elif layout == "layers between blocks":
        shape = (blocks, layers, tokens, groups, channels)
        strides = (layers * tokens * groups * channels, channels, groups * channels)
    elif layout == "padded tokens":
        shape, strides = (blocks, tokens, channels + 8), (tokens * (channels + 8), 0, channels + 8)
        groups = 1
    size = offset + torch.Size(shape).numel()
    storage = torch.empty(size, dtype=torch.uint8 if dtype == torch.float8_e4m3fn else dtype)
    if fill is not None:
        storage.fill_(127 if storage.dtype == torch.uint8 else fill)  # 127 is a NaN of float8_e4m3fn
    stride_block, stride_group, stride_token = strides
    group = group % groups
    layer = (layers - 1) * tokens * groups * channels if layout == "layers between blocks" else 0
    cache = storage.as_strided(
        (blocks, 1, tokens, channels),
        (stride_block, stride_group or stride_block, stride_token, 1),
        offset + layer + group * stride_group,
    )
    return cache.view(torch.float8_e4m3fn) if dtype == torch.float8_e4m3fn else cache


def write_history(cache, table, lengths, gen, *, scale=1.0):
    """Random keys and values for every token of every request, through the table; returns nothing."""
    tokens, channels = cache.shape[2], cache.shape[3]
    raw = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
    for r, n in enumerate(lengths):
        for first in range(0, n, tokens):
            count = min(tokens, n - first)
            values = (torch.randn(count, channels, generator=gen) * scale).to(cache.dtype)
            block = int(table[r, first // tokens])
            raw[block, 0, :count] = values.view(torch.uint8) if raw.dtype == torch.uint8 else values


def random_regions(gen, positions, region_count):
    """int32 [rows, region_count]: ascending distinct history, the own region last of the live prefix, padding -1."""
    regions = torch.full((len(positions), region_count), -1, dtype=torch.int32)
    for r, position in enumerate(positions):
        own = position // 8
        live = min(own, region_count - 1)
        if position >= 0:
            regions[r, :live] = torch.randperm(own, generator=gen)[:live].sort().values.to(torch.int32)
            regions[r, live] = own
    return regions


def paged_set(
    lengths,
    gen,
    *,
    dim=16,
    block_size=16,
    dtype=torch.bfloat16,
    layout="NHD",
    group=0,
    groups=2,
    spare=2,
    extra_width=1,
    tail=-1,
    offset=0,
    scale=1.0,
):
    """Requests over a NaN-poisoned KV cache; table tails are stale."""
    counts = [ref.cdiv(n, block_size) for n in lengths]
    blocks = sum(counts) + spare
    cache = kv_cache(blocks, block_size, dim, dtype, layout=layout, group=group, groups=groups, offset=offset)
    table = block_tables(lengths, blocks, gen, width=max(counts, default=0) + extra_width, tail=tail, page_tokens=block_size)
    write_history(cache, table, lengths, gen, scale=scale)
    return SimpleNamespace(cache=cache, table=table, lengths=list(lengths), block_size=block_size)


# A step of the indexer


def prefill_step(
    requests,
    gen,
    *,
    heads=2,
    k=5,
    key_budget=10**6,
    logits_bytes=2**29,
    compress_ratio=1,
    own_region=False,
    token_offset=0,
    extra_tokens=0,
    stride=ref.PAGE_BYTES,
    offset=0,
    keep_first=0,
    keep_last=0,
    tail=-1,
):
    """Requests given as (rows, tokens before them), their cache, token buffers and expected selections.

    Scales and weights are small powers of two, so every logit is exact in fp32 as in float64: selections compare exactly, and the
    many equal logits (ReLU's zeros) test the rule for ties. Rows outside every request keep the poison -9.
    """
    query_lens = [rows for rows, _ in requests]
    seq_lens = [rows + past for rows, past in requests]
    lengths = [n // compress_ratio for n in seq_lens]
    index = index_set(
        lengths,
        gen,
        stride=stride,
        offset=offset,
        width=max((ref.cdiv(n, 64) for n in lengths), default=0) + 1,
        tail=tail,
        scale_range=(126, 128),
    )
    tokens = token_offset + sum(query_lens) + extra_tokens
    q, q_scale = random_query(gen, tokens, heads, (126, 128))
    weights = torch.tensor([-1.0, 0.5, 1.0, 2.0])[torch.randint(0, 4, (tokens, heads), generator=gen)]
    expected = torch.full((tokens, k), -9, dtype=torch.int32)
    token, first = token_offset, ref.cumulative(lengths)
    for r, (rows, past) in enumerate(requests):
        if not rows:
            continue
        part = slice(token, token + rows)
        counts = int32([(past + i + (0 if own_region else 1)) // compress_ratio for i in range(rows)])
        keys = index.keys[first[r] : first[r + 1]]
        logits, _ = ref.score_keys(
            q[part],
            q_scale[part],
            *ref.pages_of_keys(keys, len(keys)),
            weights[part],
            torch.zeros_like(counts),
            counts,
            0.5,
            len(keys),
        )
        expected[part] = ref.select_keys(torch.from_numpy(logits), torch.zeros_like(counts), counts, k, keep_first, keep_last)
        token += rows
    options = dict(
        key_budget=key_budget,
        logits_bytes=logits_bytes,
        compress_ratio=compress_ratio,
        own_region=own_region,
        token_offset=token_offset,
    )
    return SimpleNamespace(
        q=(q, q_scale),
        weights=weights,
        cache=index.cache,
        block_table=index.block_table,
        query_lens=query_lens,
        seq_lens=seq_lens,
        lengths=lengths,
        options=options,
        expected=expected,
        keys=index.keys,
        out=torch.full_like(expected, -9),
        weight_scale=0.5,
        k=k,
    )
