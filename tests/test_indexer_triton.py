"""The indexer's Triton kernels against plain references: on CUDA or ROCm tensors, and on CPU tensors in Triton's interpreter.

``TRITON_INTERPRET=1 pytest tests/test_indexer_triton.py`` runs every test here in the interpreter; without it and without a GPU,
one test starts that run in a process of its own and the others are skipped.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRET else "cuda"
triton = pytest.importorskip("triton")
gpu = pytest.mark.skipif(not INTERPRET and not torch.cuda.is_available(), reason="needs a GPU or TRITON_INTERPRET=1")
gpu_only = pytest.mark.skipif(INTERPRET or not torch.cuda.is_available(), reason="needs a GPU")

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)


@pytest.mark.skipif(INTERPRET, reason="this is the interpreter's process")
def test_in_interpreter():
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="2")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--import-mode=importlib", __file__]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


# References. They share nothing with the library: bytes are taken apart one at a time.


def decode_token(packed, scale):
    """float64 [128] of 64 packed bytes and 4 scale bytes."""
    codes = np.stack((packed & 15, packed >> 4), axis=1).reshape(128)
    values = np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]
    with np.errstate(over="ignore"):
        factor = np.where(scale == 255, np.nan, np.exp2(scale.astype(np.float64) - 127))
    return (values.reshape(4, 32) * factor[:, None]).reshape(128)


def quantize_token(x):
    """Packed bytes [64] and scale bytes [4] of float64 [128], by the definition: round up the scale, then to the nearest even."""
    codes, scales = np.zeros(128, dtype=np.int64), np.zeros(4, dtype=np.int64)
    for c in range(4):
        group = x[32 * c : 32 * c + 32]
        if not np.isfinite(group).all():
            scales[c] = 255
            continue
        amax = max(np.abs(group).max(), 6 * 2.0**-126)
        scales[c] = int(np.ceil(np.log2(amax / 6))) + 127
        for i, value in enumerate(group / 2.0 ** (scales[c] - 127)):
            distance = np.abs(E2M1 - abs(value))
            best = np.flatnonzero(distance == distance.min())
            code = best[0] if len(best) == 1 else next(b for b in best if b % 2 == 0)
            codes[32 * c + i] = code + (8 if value < 0 else 0)
    return codes[0::2] | codes[1::2] << 4, scales


def cache_key(cache, page, row):
    """Packed bytes [64] and scale bytes [4] of one key, from a numpy view of a cache whose rows are pages."""
    payload = np.concatenate([cache[page, c * 1024 + row * 16 : c * 1024 + row * 16 + 16] for c in range(4)])
    return payload, np.array([cache[page, 4096 + c * 64 + (row % 16) * 4 + row // 16] for c in range(4)])


def make_cache(blocks, page_stride, offset, generator, device=DEVICE):
    """A strided cache of random bytes (scale bytes near 127), and the numpy array of its pages."""
    storage = torch.randint(0, 256, (offset + blocks * page_stride + 16,), dtype=torch.uint8, generator=generator)
    pages = storage[offset : offset + blocks * page_stride].view(blocks, page_stride)
    pages[:, 4096:4352] = torch.randint(120, 134, (blocks, 256), dtype=torch.uint8, generator=generator)
    storage = storage.to(device)
    cache = storage.as_strided((blocks, 64, 68), (page_stride, 68, 1), offset)
    return cache, pages.numpy()


def make_table(lengths, blocks, generator, extra=1):
    """A block table of distinct blocks for requests of these lengths; the entries past a request's keys name no block."""
    width = max([-(-n // 64) for n in lengths], default=0) + extra
    order = torch.randperm(blocks, generator=generator)
    table, used = torch.full((len(lengths), width), -(2**31), dtype=torch.int32), 0
    for r, n in enumerate(lengths):
        count = -(-n // 64)
        table[r, :count] = order[used : used + count].to(torch.int32)
        used += count
    return table


def cumulative(lengths):
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def owners(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths, dtype=torch.int64))


def plain_stage(pages, table, lengths, total):
    """Compact pages of a request set as numpy arrays."""
    count = -(-total // 64)
    payload, scales = np.zeros((count, 4, 64, 16), np.uint8), np.zeros((count, 4, 64), np.uint8)
    g = 0
    for r, n in enumerate(lengths):
        for j in range(n):
            if g < total:
                packed, scale = cache_key(pages, int(table[r, j // 64]), j % 64)
                payload[g // 64, :, g % 64] = packed.reshape(4, 16)
                scales[g // 64, :, g % 16 * 4 + g % 64 // 16] = scale
            g += 1
    return payload, scales


def plain_logits(q, keys, weights, ks, ke):
    """float64 logits and magnitudes of decoded q [T, H, 128], keys [N, 128], weights [T, H]; -inf outside windows."""
    with np.errstate(invalid="ignore", over="ignore"):
        dot = np.einsum("thd,nd->thn", q, keys)
        logits = np.einsum("th,thn->tn", weights, np.where(np.isnan(dot), np.nan, np.maximum(dot, 0)))
        magnitude = np.einsum("th,thn->tn", np.abs(weights), np.einsum("thd,nd->thn", np.abs(q), np.abs(keys)))
    n = np.arange(keys.shape[0])
    logits[(n < ks[:, None]) | (n >= ke[:, None])] = -np.inf
    return logits, magnitude


def plain_select(logits, ks, ke, k, keep_first, keep_last):
    out = np.full((len(logits), k), -1, np.int64)
    for r, row in enumerate(logits):
        first, last = np.clip([ks[r], ke[r]], 0, len(row))
        window = [(-np.inf if np.isnan(x) else x) for x in row[first:last].tolist()]
        n = len(window)
        forced = [i for i in range(n) if i < keep_first or i >= n - keep_last]
        best = sorted(set(range(n)) - set(forced), key=lambda i: (-window[i], i))[: k - len(forced)]
        chosen = sorted((forced + best)[:k])
        out[r, : len(chosen)] = chosen
    return out


# store_index_keys


@gpu
@pytest.mark.parametrize("page_stride,offset", [(4352, 0), (4355, 7), (8704, 4352)])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_store_index_keys(page_stride, offset, slot_dtype):
    from sparse_prefill.triton.store_index_keys import store_index_keys

    g = torch.Generator().manual_seed(page_stride)
    cache, pages = make_cache(3, page_stride, offset, g)
    before = pages.copy()
    n = 70
    keys = (torch.randn((n, 160), generator=g) * torch.exp2(torch.randint(-30, 30, (n, 1), generator=g).float())).bfloat16()
    keys[3, 5], keys[4, 40], keys[5] = torch.inf, torch.nan, 0
    slots = torch.randperm(192, generator=g)[:n].to(slot_dtype)
    slots[7], slots[8], slots[9] = -1, 192, -(2**31)
    slots[20] = slots[60]  # given twice: one of the two keys, whole; here the later
    store_index_keys(keys.to(DEVICE)[:, :128], cache, slots.to(DEVICE))
    expected = before
    for i in range(n):
        if i in (7, 8, 9, 20):
            continue
        packed, scale = quantize_token(keys[i, :128].double().numpy())
        page, row = divmod(int(slots[i]), 64)
        for c in range(4):
            expected[page, c * 1024 + row * 16 : c * 1024 + row * 16 + 16] = packed[c * 16 : c * 16 + 16]
            expected[page, 4096 + c * 64 + (row % 16) * 4 + row // 16] = scale[c]
    got = cache.as_strided((3, page_stride), (page_stride, 1), offset).cpu().numpy()
    # Bytes up to the sign of zero, which a nibble of 8 has.
    positive = lambda b: np.where(b & 15 == 8, b & 0xF0, b) & np.where(b >> 4 == 8, 0x0F, 0xFF)  # noqa: E731
    assert (positive(got[:, :4096]) == positive(expected[:, :4096])).all()
    assert (got[:, 4096:] == expected[:, 4096:]).all()


# stage_keys, pack_keys, restore_keys

LENGTHS = [63, 1, 65, 0, 130]


@gpu
@pytest.mark.parametrize("page_stride,offset", [(4352, 0), (4353, 0), (4356, 4), (8704, 3 * 4352 + 128), (4368, 1)])
@pytest.mark.parametrize("lengths", [LENGTHS, [0, 0], [64], [], [200, 0, 64]])
def test_stage_keys(page_stride, offset, lengths):
    from sparse_prefill.triton.stage_keys import stage_keys

    g = torch.Generator().manual_seed(page_stride)
    cache, pages = make_cache(12, page_stride, offset, g)
    table = make_table(lengths, 12, g, extra=0)
    seq = owners(lengths)
    # The host's total may be an upper bound; rows past the device's own total are zero.
    seq = torch.cat((seq, torch.full((70,), 2**30, dtype=torch.int32)))
    payload, scales = stage_keys(cache, table.to(DEVICE), cumulative(lengths).to(DEVICE), seq.to(DEVICE))
    expected = plain_stage(pages, table, lengths, len(seq))
    assert payload.shape == (-(-len(seq) // 64), 1, 4, 64, 16) and scales.shape == (-(-len(seq) // 64), 1, 4, 64)
    assert (payload.cpu().numpy()[:, 0] == expected[0]).all() and (scales.cpu().numpy()[:, 0] == expected[1]).all()


@gpu
@pytest.mark.parametrize("world,interleave", [(2, 1), (4, 2), (8, 16), (2, 64), (3, 1)])
def test_pack_and_restore_equal_stage(world, interleave):
    from sparse_prefill.triton.stage_keys import pack_keys, restore_keys, stage_keys

    g = torch.Generator().manual_seed(world)
    caches = [make_cache(14, 4352 if rank % 2 else 4364, rank, g)[0] for rank in range(world)]
    whole, _ = make_cache(14, 4352, 0, g)
    table = make_table(LENGTHS, 14, g)
    count = [[sum(1 for p in range(n) if p // interleave % world == rank) for n in LENGTHS] for rank in range(world)]
    all_cu = torch.stack([cumulative(c) for c in count])
    local_table = make_table([max(c[r] for c in count) for r in range(len(LENGTHS))], 14, g)
    for r, n in enumerate(LENGTHS):
        for p in range(n):
            rank, local = p // interleave % world, p // (interleave * world) * interleave + p % interleave
            cache = caches[rank]
            source, row = int(table[r, p // 64]), p % 64
            target, to = int(local_table[r, local // 64]), local % 64
            a = whole.as_strided((14, 4352), (4352, 1))
            b = cache.as_strided((14, 4352), (cache.stride(0), 1), cache.storage_offset())
            for c in range(4):
                b[target, c * 1024 + to * 16 : c * 1024 + to * 16 + 16] = a[source, c * 1024 + row * 16 :][:16]
                b[target, 4096 + c * 64 + to % 16 * 4 + to // 16] = a[source, 4096 + c * 64 + row % 16 * 4 + row // 16]
    max_local = -(-int(all_cu[:, -1].max()) // 64) * 64
    packed = [pack_keys(caches[rank], local_table.to(DEVICE), all_cu[rank].to(DEVICE), max_local) for rank in range(world)]
    for rank in range(world):
        assert packed[rank].shape == (max_local, 68) and not packed[rank][int(all_cu[rank, -1]) :].any()
    seq, cu = owners(LENGTHS).to(DEVICE), cumulative(LENGTHS).to(DEVICE)
    expected = stage_keys(whole, table.to(DEVICE), cu, seq)
    gathered = torch.cat(packed)
    odd = torch.zeros(gathered.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].view(gathered.shape)
    odd.copy_(gathered)
    for rows in (gathered, odd):
        got = restore_keys(rows, seq, cu, all_cu.to(DEVICE), world, interleave)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@gpu
@pytest.mark.parametrize("bad", ["table", "cu", "seq", "all_cu"])
def test_wrong_values_stay_inside(bad):
    """Any value of a table or a length gives bytes of the cache or zeros, never an access outside (memcheck sees one)."""
    from sparse_prefill.triton.stage_keys import pack_keys, restore_keys, stage_keys

    g = torch.Generator().manual_seed(5)
    cache, _ = make_cache(6, 4352, 0, g)
    table, cu, seq = make_table([65, 100], 6, g), cumulative([65, 100]), owners([65, 100])
    all_cu = torch.stack((cu, cu))
    wild = torch.tensor([-(2**31), -1, 6, 2**31 - 1, 2**30, -7], dtype=torch.int32)
    target = {"table": table, "cu": cu, "seq": seq, "all_cu": all_cu}[bad]
    flat = target.view(-1)
    for i in range(0, flat.numel(), 2):
        flat[i] = wild[i // 2 % len(wild)]
    table, cu, seq, all_cu = (t.to(DEVICE) for t in (table, cu, seq, all_cu))
    stage_keys(cache, table, cu, seq)
    pack_keys(cache, table, cu, 192)
    restore_keys(torch.zeros((384, 68), dtype=torch.uint8, device=DEVICE), seq, cu, all_cu, 2, 1)
    if DEVICE == "cuda":
        torch.cuda.synchronize()


# score_keys


def staged_tokens(payload, scales):
    payload, scales = payload.cpu().numpy(), scales.cpu().numpy()
    return np.stack(
        [
            decode_token(payload[g // 64, 0, :, g % 64].reshape(64), scales[g // 64, 0, :, g % 16 * 4 + g % 64 // 16])
            for g in range(payload.shape[0] * 64)
        ]
    )


def make_scoring(rows, heads, pages, spread, generator):
    """Random queries, staged pages and weights with group scales over ``spread`` octaves."""
    low = 127 - spread // 2
    q = torch.randint(0, 256, (rows, heads, 64), dtype=torch.uint8, generator=generator)
    q_scale = torch.randint(low, low + spread, (rows, heads, 4), dtype=torch.uint8, generator=generator)
    payload = torch.randint(0, 256, (pages, 1, 4, 64, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(low, low + spread, (pages, 1, 4, 64), dtype=torch.uint8, generator=generator)
    weights = torch.randn((rows, heads), generator=generator)
    return q, q_scale, payload, scales, weights


def windows(rows, keys, generator):
    ks = torch.randint(0, keys, (rows,), dtype=torch.int32, generator=generator)
    ke = (ks + torch.randint(0, keys, (rows,), dtype=torch.int32, generator=generator)).clamp(max=keys).int()
    ks[0], ke[0] = 0, keys
    if rows > 2:
        ke[1] = ks[1]  # an empty window
        ks[2], ke[2] = -5, 2**31 - 1  # wrong values never leave the logits
    return ks, ke


@gpu
@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("rows,heads,pages", [(1, 64, 1), (6, 32, 3), (5, 1, 2), (3, 48, 2), (2, 128, 1), (9, 7, 1), (3, 20, 2)])
def test_score_keys(rows, heads, pages, precision):
    from sparse_prefill.triton.score_keys import score_keys

    g = torch.Generator().manual_seed(heads)
    q, q_scale, payload, scales, weights = make_scoring(rows, heads, pages, 12, g)
    ks, ke = windows(rows, pages * 64, g)
    scales[0, 0, 1, 5] = 255
    if rows > 4:
        q_scale[4, 0, 2] = 255
        q_scale[3, 0, :] = torch.tensor([90, 127, 140, 120], dtype=torch.uint8)
    arguments = [t.to(DEVICE) for t in (q, q_scale, payload, scales, weights, ks, ke)]
    got = score_keys(*arguments, 0.25, precision).cpu().numpy()
    decoded = np.array([[decode_token(q[t, h].numpy(), q_scale[t, h].numpy()) for h in range(heads)] for t in range(rows)])
    expected, magnitude = plain_logits(
        decoded, staged_tokens(payload, scales), weights.double().numpy() * 0.25, ks.numpy(), ke.numpy()
    )
    nan = np.isnan(expected)
    assert (np.isnan(got) == nan).all() and (np.isneginf(got) == np.isneginf(expected)).all()
    live = np.isfinite(expected)
    tolerance = 2e-6 if precision == "exact" else 5e-4
    assert (np.abs(got[live] - expected[live]) <= tolerance * magnitude[live] + 1e-30).all()


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_score_keys_quantizes_queries(dtype):
    from sparse_prefill.triton.score_keys import score_keys

    g = torch.Generator().manual_seed(2)
    _, _, payload, scales, weights = make_scoring(3, 20, 1, 6, g)
    x = torch.randn((3, 20, 2, 128), generator=g).to(dtype)[:, :, 0]
    pairs = [[quantize_token(x[t, h].double().numpy()) for h in range(20)] for t in range(3)]
    q = torch.tensor(np.array([[p[0] for p in row] for row in pairs]), dtype=torch.uint8)
    q_scale = torch.tensor(np.array([[p[1] for p in row] for row in pairs]), dtype=torch.uint8)
    ks, ke = torch.zeros(3, dtype=torch.int32), torch.full((3,), 64, dtype=torch.int32)
    rest = [t.to(DEVICE) for t in (payload, scales, weights.bfloat16(), ks, ke)]
    got = score_keys(x.to(DEVICE), None, *rest, 1.0, "exact")
    assert torch.equal(got, score_keys(q.to(DEVICE), q_scale.to(DEVICE), *rest, 1.0, "exact"))


@gpu_only  # the interpreter's dots are numpy's
@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("heads", [64, 32, 16, 7, 48, 128])
def test_logit_bits_depend_on_row_and_key_alone(heads, precision):
    """Bit equality over random row and key splits, scales spread over 12 octaves."""
    from sparse_prefill.triton.score_keys import score_keys

    rows, pages = 256, 64
    g = torch.Generator().manual_seed(heads)
    q, q_scale, payload, scales, weights = (t.to(DEVICE) for t in make_scoring(rows, heads, pages, 12, g))
    keys = pages * 64
    ks, ke = torch.zeros(rows, dtype=torch.int32, device=DEVICE), torch.full((rows,), keys, dtype=torch.int32, device=DEVICE)
    whole = score_keys(q, q_scale, payload, scales, weights, ks, ke, 1.0, precision)
    for trial in range(6):
        order = torch.randperm(rows, generator=g).to(DEVICE)
        start = int(torch.randint(0, rows, (1,), generator=g))
        some = order[start : start + 1 + int(torch.randint(0, rows, (1,), generator=g))]
        places = torch.randperm(keys, generator=g)[: 64 * int(torch.randint(1, pages + 1, (1,), generator=g))].to(DEVICE)
        tokens = payload[:, 0].transpose(1, 2).reshape(keys, 64)[places]
        bytes_ = scales[:, 0].view(pages, 4, 16, 4).permute(0, 3, 2, 1).reshape(keys, 4)[places]
        count = len(places) // 64
        shuffled = tokens.view(count, 64, 4, 16).transpose(1, 2).unsqueeze(1).contiguous()
        moved = bytes_.view(count, 4, 16, 4).permute(0, 3, 2, 1).reshape(count, 1, 4, 64).contiguous()
        part = score_keys(q[some], q_scale[some], shuffled, moved, weights[some], ks[some], ke[some], 1.0, precision)
        expected = whole[some][:, places]
        assert torch.equal(part.view(torch.int32), expected.view(torch.int32)), trial


# select_keys


def selection_rows(kind, rows, columns, generator):
    if kind == "random":
        return torch.randn((rows, columns), generator=generator)
    if kind == "tied":
        return torch.randint(0, 5, (rows, columns), generator=generator).float()
    if kind == "near-tied":
        return 1 + torch.randint(0, 40, (rows, columns), generator=generator).float() * 2.0**-23
    if kind == "equal":
        return torch.full((rows, columns), -3.5)
    if kind == "sorted":
        return torch.arange(columns).float().expand(rows, columns).contiguous()
    if kind == "reversed":
        return -torch.arange(columns).float().expand(rows, columns).contiguous()
    if kind == "infinite":
        x = torch.full((rows, columns), -torch.inf)
        x[:, ::7] = torch.nan
        x[:, 5::911] = torch.inf
        x[:, 3::517] = 0.0
        x[:, 4::517] = -0.0
        return x
    if kind == "spikes":  # the sample sees none of the large values, or almost only them
        x = torch.randn((rows, columns), generator=generator)
        step = max(1, columns // 1024)
        place = torch.arange(columns) % step
        x[:, (place >= 4) & (place < 8)] += 100
        x[1::2] *= -1
        return x
    raise AssertionError(kind)


@gpu
@pytest.mark.parametrize("kind", ["random", "tied", "near-tied", "equal", "sorted", "reversed", "infinite", "spikes"])
@pytest.mark.parametrize(
    "columns,k,keep", [(100, 16, (0, 0)), (4500, 512, (3, 5)), (2500, 1, (0, 0)), (6000, 2048, (1024, 1024))]
)
def test_select_keys(kind, columns, k, keep):
    from sparse_prefill.triton.select_keys import select_keys

    g = torch.Generator().manual_seed(columns)
    rows = 3
    x = torch.empty((rows, columns + 3))[:, :columns]
    x[:] = selection_rows(kind, rows, columns, g)
    ks, ke = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), columns, dtype=torch.int32)
    ks[1], ke[1] = columns // 9, columns - 2
    ks[2], ke[2] = columns // 2, columns // 2 + k // 2 + 1
    k_first, k_last = min(keep[0], k), min(keep[1], k)
    placed = torch.empty_strided(x.shape, x.stride(), device=DEVICE)
    placed.copy_(x)
    got = select_keys(placed, ks.to(DEVICE), ke.to(DEVICE), k, k_first, k_last)
    assert got.dtype == torch.int32
    assert (got.cpu().numpy() == plain_select(x, ks.numpy(), ke.numpy(), k, k_first, k_last)).all()


@gpu
def test_select_keys_wrong_windows():
    from sparse_prefill.triton.select_keys import select_keys

    x = torch.randn((4, 50))
    ks = torch.tensor([-9, 30, 60, 2**31 - 1], dtype=torch.int32)
    ke = torch.tensor([2**31 - 1, 20, 70, -(2**31)], dtype=torch.int32)
    got = select_keys(x.to(DEVICE), ks.to(DEVICE), ke.to(DEVICE), 8, 0, 0)
    assert (got.cpu().numpy() == plain_select(x, ks.numpy(), ke.numpy(), 8, 0, 0)).all()


# prefill_chunks


@gpu
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize(
    "query_lens,seq_lens,budget,keep", [([5, 0, 3], [70, 64, 3], 200, (0, 0)), ([4, 6], [100, 130], 130, (2, 3))]
)
def test_prefill_chunks(query_lens, seq_lens, budget, keep, quantized, monkeypatch):
    """The whole path against the CPU's, on sums that fp32 holds exactly, so that selections must be equal, ties included."""
    import sparse_prefill as sp
    from sparse_prefill.cpu import prefill_chunks as cpu
    from sparse_prefill.triton import prefill_chunks as chunks

    # A small tile, so that one takes several passes.
    monkeypatch.setattr(chunks, "LOGITS_BYTES", 4 * 192 * 3)
    g = torch.Generator().manual_seed(sum(seq_lens))
    cache, pages = make_cache(8, 4352 + 16, 32, g, device="cpu")
    pages[:, 4096:4352] = 127
    table = make_table(seq_lens, 8, g).clamp(min=0)
    rows, heads, k, offset = sum(query_lens), 20, 16, 2
    plan = sp.prepare_prefill_metadata(
        sp.PrefillMetadata(
            sp.build_prefill_chunks(query_lens, seq_lens, table, key_budget=budget, token_offset=offset), max(seq_lens)
        ),
        1,
        0,
        1,
    ).plans
    total = rows + offset + 1
    if quantized:
        q = torch.randint(0, 256, (total, heads, 64), dtype=torch.uint8, generator=g)
        q_scale = torch.full((total, heads, 4), 127, dtype=torch.uint8)
    else:
        q, q_scale = torch.randint(-6, 7, (total, heads, 128), generator=g).bfloat16(), None
    weights = torch.randint(-2, 3, (total, heads), generator=g).float()
    arguments = [plan.block_tables, plan.cu_seq_lens, plan.token_to_seq, plan.ks, plan.ke, plan.all_cu]
    host = [plan.sets, plan.chunks, plan.tiles]
    tail = (1, 1, 1.0, *keep, "exact")
    expected = torch.full((total, k), 7, dtype=torch.int32)
    cpu.prefill_chunks(q, q_scale, weights, cache, expected, *host, *arguments, *tail)
    out = torch.full((total, k), 7, dtype=torch.int32, device=DEVICE)
    moved = [None if t is None else t.to(DEVICE) for t in (q, q_scale, weights)]
    storage = cache.as_strided((8 * 4368 + 32,), (1,), 0).to(DEVICE)
    there = storage.as_strided(cache.shape, cache.stride(), 32)
    chunks.prefill_chunks(*moved, there, out, *host, *(t.to(DEVICE) for t in arguments), *tail)
    assert torch.equal(out.cpu(), expected)
    assert (out[:offset] == 7).all() and (out[-1] == 7).all()


# Sizes that 32-bit offsets cannot reach


@gpu_only
def test_logits_past_2_to_31_bytes():
    """The last row and column of a tile of 2^31 bytes and more, scored and selected."""
    from sparse_prefill.triton.score_keys import score_keys
    from sparse_prefill.triton.select_keys import select_keys

    rows, pages, heads = 4100, 2050, 16
    g = torch.Generator().manual_seed(1)
    q, q_scale, payload, scales, weights = (t.to(DEVICE) for t in make_scoring(rows, heads, pages, 6, g))
    keys = 64 * pages
    ks, ke = torch.zeros(rows, dtype=torch.int32, device=DEVICE), torch.full((rows,), keys, dtype=torch.int32, device=DEVICE)
    logits = score_keys(q, q_scale, payload, scales, weights, ks, ke, 1.0, "exact")
    last = score_keys(q[-3:], q_scale[-3:], payload[-2:], scales[-2:], weights[-3:], ks[:3], ke[:3], 1.0, "exact")
    assert logits.numel() * 4 > 2**31 and torch.equal(logits[-3:, -128:], last)
    got = select_keys(logits[-3:], ks[:3], ke[:3], 512, 0, 0)
    assert (got.cpu().numpy() == plain_select(logits[-3:].cpu(), [0] * 3, [keys] * 3, 512, 0, 0)).all()
    assert torch.equal(select_keys(logits, ks, ke, 512, 0, 0)[-3:], got)


@gpu_only
def test_stage_past_4_gib():
    from sparse_prefill.triton.stage_keys import stage_keys

    blocks, stride = 20_000, 230_400
    cache = torch.empty(blocks * stride + 13_184, dtype=torch.uint8, device=DEVICE)
    cache = cache.as_strided((blocks, 64, 68), (stride, 68, 1), 3 * 4352 + 128)
    table = torch.tensor([[blocks - 1, 0, 18_642, 9_400]], dtype=torch.int32, device=DEVICE)
    flat = cache.as_strided((blocks, 4352), (stride, 1))
    for block in table[0].tolist():
        flat[block] = torch.randint(0, 256, (4352,), dtype=torch.uint8, device=DEVICE)
    payload, scales = stage_keys(cache, table, cumulative([256]).to(DEVICE), owners([256]).to(DEVICE))
    assert torch.equal(payload.view(4, 4096), flat[table[0].long(), :4096])
    assert torch.equal(scales.view(4, 256), flat[table[0].long(), 4096:])
