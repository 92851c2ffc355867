"""The paged path's Triton kernels against float64 references: on CUDA or ROCm tensors, or on CPU tensors in Triton's interpreter.

``TRITON_INTERPRET=1 pytest tests/test_pages_triton.py`` runs them in the interpreter. Without it and without a GPU, one test
starts that run in a process of its own and the others are skipped.
"""

import os
import subprocess
import sys

import pytest
import reference as ref
import torch
from samples import (
    HISTORY_LAYOUTS,
    INT32_MAX,
    assert_same_bits,
    generator,
    int32,
    paged_set,
    random_regions,
    strided_rows,
)

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRET else "cuda"
triton = pytest.importorskip("triton")
gpu = pytest.mark.skipif(not INTERPRET and not torch.cuda.is_available(), reason="needs a GPU or TRITON_INTERPRET=1")
gpu_only = pytest.mark.skipif(INTERPRET or not torch.cuda.is_available(), reason="needs a GPU")
FP8 = torch.float8_e4m3fn
# The interpreter multiplies matrices of bf16 wrongly: it takes their bits for integers.
HALVES = [torch.float16] if INTERPRET else [torch.float16, torch.bfloat16]
POISON = -123456
HOPPER = not INTERPRET and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
# (share, bulk_copies) of attention.launch: row by row, over unions in Triton, over unions on Hopper's copy engine.
WALKS = [(False, False), (True, False)] + ([(True, True)] if HOPPER else [])


@pytest.mark.skipif(INTERPRET, reason="this is the interpreter's process")
def test_in_interpreter():
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton before 3.7 needs NumPy before 2.4")
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="2", CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--import-mode=importlib", __file__]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def assert_close(out, expected):
    """Relative to the norm of all rows; no single row may be far off either."""
    assert out.isfinite().all()
    error = (out.double() - expected).flatten(1).norm(dim=1)
    assert error.norm() <= TOLERANCES[out.dtype] * expected.norm()
    assert (error <= 5 * TOLERANCES[out.dtype] * (expected.flatten(1).norm(dim=1) + 0.1 * expected.abs().max())).all()


def moved(tensor):
    """The tensor on the test's device with its strides and storage, whatever lies around it included."""
    if DEVICE == "cpu":
        return tensor
    raw = tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
    storage = torch.empty(0, dtype=raw.dtype).set_(raw.untyped_storage()).to(DEVICE)
    out = storage.as_strided(raw.shape, raw.stride(), raw.storage_offset())
    return out.view(FP8) if tensor.dtype == FP8 else out


def metadata(positions, regions, table, owners, cache):
    indptr, last_page_len = ref.compact_page_metadata(positions, regions.shape[1])
    pages = torch.full((max(indptr[-1], 1) + 5,), INT32_MAX, dtype=torch.int32)
    ref.fill_prefill_pages(regions, table, owners, int32(indptr), pages, cache.shape[2], ref.kv_page_stride(cache))
    return pages, int32(indptr), int32(last_page_len)


def neighbours(gen, positions, region_count, change=0.15):
    """Regions as a prompt's neighbouring rows pick them: each row keeps most of what the row before it picked."""
    regions, picked = torch.full((len(positions), region_count), -1, dtype=torch.int32), []
    for r, position in enumerate(positions):
        if position < 0:
            continue
        own = position // 8
        keep = [x for x in picked if x < own and torch.rand((), generator=gen) > change]
        rest = [x for x in torch.randperm(own, generator=gen).tolist() if x not in keep]
        picked = sorted((keep + rest)[: min(own, region_count - 1)])
        regions[r, : len(picked)] = int32(picked)
        regions[r, len(picked)] = own
    return regions


def case(seed, positions_of, *, heads=4, dim=64, region_count=6, dtype=torch.float16, query_dtype=None, alike=True, **options):
    gen = generator(seed)
    lengths = [max([p + 1 for p in positions], default=0) for positions in positions_of]
    sample = paged_set(lengths, gen, dim=dim, dtype=dtype, **options)
    positions = [p for own in positions_of for p in own]
    owners = int32([r for r, own in enumerate(positions_of) for _ in own])
    regions = torch.cat([(neighbours if alike else random_regions)(gen, own, region_count) for own in positions_of])
    query = torch.randn(len(positions), heads, dim, generator=gen).to(query_dtype or (torch.float16 if dtype == FP8 else dtype))
    return sample.cache, query, positions, owners, metadata(positions, regions, sample.table, owners, sample.cache)


def attend(cache, query, owners, lists, walk=(True, False), scale=0.3, scales=None):
    """The output of one walk on the test's device, on the CPU; query and out have gaps between rows."""
    from sparse_prefill.triton.attention import launch

    pages, indptr, last_page_len = (x.to(DEVICE) for x in lists)
    query = moved(strided_rows(query, 8, 8, fill=float("nan")))
    out = moved(strided_rows(torch.full_like(query, float("nan"), device="cpu"), 16, 8, fill=7.0))
    k_scale, v_scale = (None, None) if scales is None else (torch.tensor([x], device=DEVICE) for x in scales)
    launch(query, moved(cache), pages, indptr, last_page_len, owners.to(DEVICE), out, scale, k_scale, v_scale, *walk)
    storage = torch.empty(0, dtype=out.dtype, device=DEVICE).set_(out.untyped_storage())
    assert (storage == 7.0).sum() >= storage.numel() - out.numel() - 16, "written between the rows"
    return out.cpu()


def ids(walk):
    return {(False, False): "rows", (True, False): "unions", (True, True): "bulk"}[walk]


SPREAD = [list(range(37, 62)), [3], [-1, 90, 91, 92, -1], list(range(100, 117)), [-1] * 9]


@gpu
@pytest.mark.parametrize("walk", WALKS, ids=ids)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_attention_is_the_reference(walk, dtype, dim):
    """Several requests, every residue of pos % 8, mixed lengths, dead rows, tiles that end in the middle of a request."""
    cache, query, _, owners, lists = case(dim, SPREAD, heads=16 if walk[1] else 6, dim=dim, dtype=dtype)
    out = attend(cache, query, owners, lists, walk)
    assert_close(out, ref.paged_attention(query, cache, *lists, 0.3))
    dead = lists[1].diff() == 0
    assert_same_bits(out[dead], torch.zeros_like(out[dead]))


@gpu
@pytest.mark.parametrize("walk", WALKS, ids=ids)
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 16, 33])
def test_any_group_of_heads(walk, heads):
    cache, query, _, owners, lists = case(heads, [list(range(40, 57))], heads=heads)
    assert_close(attend(cache, query, owners, lists, walk), ref.paged_attention(query, cache, *lists, 0.3))


@gpu
@pytest.mark.parametrize("walk", WALKS[:2], ids=ids)
@pytest.mark.parametrize("dim", [1, 7, 96, 100])
def test_any_head_dim(walk, dim):
    cache, query, _, owners, lists = case(dim, [list(range(40, 49))], dim=dim)
    assert_close(attend(cache, query, owners, lists, walk), ref.paged_attention(query, cache, *lists, 0.3))


@gpu
@pytest.mark.parametrize("walk", WALKS, ids=ids)
@pytest.mark.parametrize("block_size", [8, 24, 64])
@pytest.mark.parametrize("layout", HISTORY_LAYOUTS)
def test_any_layout_of_the_cache(walk, layout, block_size):
    options = dict(layout=layout, block_size=block_size, group=1, offset=8)
    cache, query, _, owners, lists = case(7, [list(range(60, 77))], heads=8, **options)
    assert_close(attend(cache, query, owners, lists, walk), ref.paged_attention(query, cache, *lists, 0.3))


@gpu
@pytest.mark.parametrize("walk", WALKS[:2], ids=ids)
@pytest.mark.parametrize("query_dtype", [*HALVES, torch.float32])
def test_fp8_cache_is_read_with_its_scales(walk, query_dtype):
    cache, query, _, owners, lists = case(3, [list(range(60, 77))], dtype=FP8, query_dtype=query_dtype)
    out = attend(cache, query, owners, lists, walk, scales=(0.5, 3.0))
    assert_close(out, ref.paged_attention(query, cache, *lists, 0.3, 0.5, 3.0))


@gpu
@pytest.mark.parametrize("walk", WALKS[:1], ids=ids)
def test_fp32(walk):
    cache, query, _, owners, lists = case(4, [list(range(60, 77))], dtype=torch.float32)
    assert_close(attend(cache, query, owners, lists, walk), ref.paged_attention(query, cache, *lists, 0.3))


@gpu
@pytest.mark.parametrize("walk", WALKS, ids=ids)
def test_attention_is_dense_while_every_region_fits(walk):
    positions = list(range(0, 48, 3))
    gen = generator(5)
    sample = paged_set([48], gen, dim=64, dtype=torch.float16)
    owners = torch.zeros(len(positions), dtype=torch.int32)
    lists = metadata(positions, random_regions(gen, positions, 6), sample.table, owners, sample.cache)
    query = torch.randn(len(positions), 8, 64, generator=gen).half()
    out = attend(sample.cache, query, owners, lists, walk)
    assert_close(out, ref.dense_attention(query, sample.cache, [sample.table[0]] * len(positions), positions, 0.3))


@gpu
@pytest.mark.parametrize("walk", WALKS[1:], ids=ids)
def test_which_tiles_are_walked_row_by_row(walk):
    """Alike rows of one request share a union; different requests, unlike rows and a page listed twice do not."""
    from sparse_prefill.triton.unions import build_unions

    cache, query, _, owners, lists = case(6, [list(range(200, 224))], heads=8, region_count=24)
    pages, indptr, last_page_len = (x.clone() for x in lists)
    owners[12] = 1
    pages[int(indptr[17]) + 3] = pages[int(indptr[17])]
    size = ref.view_size(cache)
    listed, bits, counts = (x.cpu() for x in build_unions(*(x.to(DEVICE) for x in (pages, indptr, owners)), 24, size))
    assert counts[0] > 0 and counts[1] == counts[2] == -1
    rows = [set(pages[int(indptr[r]) : int(indptr[r + 1]) - 1].tolist()) for r in range(8)]
    assert listed[0, :8].tolist() == [int(pages[int(indptr[r + 1]) - 1]) for r in range(8)]
    union = dict(zip(listed[0, 8 : 8 + counts[0]].tolist(), bits[0, 8 : 8 + counts[0]].tolist(), strict=True))
    assert len(union) == counts[0] and set(union) == set().union(*rows)
    assert all(union[page] == sum(1 << r for r in range(8) if page in rows[r]) for page in union)
    lists = (pages, indptr, last_page_len)
    assert_close(attend(cache, query, owners, lists, walk), ref.paged_attention(query, cache, *lists, 0.3))
    cache, query, _, owners, lists = case(8, [list(range(600, 608))], heads=8, region_count=9, alike=False)
    pages, indptr, _ = (x.to(DEVICE) for x in lists)
    assert build_unions(pages, indptr, owners.to(DEVICE), 8, ref.view_size(cache))[2].tolist() == [-1]
    assert_close(attend(cache, query, owners, lists, walk), ref.paged_attention(query, cache, *lists, 0.3))


@gpu
@pytest.mark.parametrize("walk", WALKS, ids=ids)
def test_shared_prefixes_share_pages(walk):
    """Two requests whose tables begin with the same blocks; a third owner's rows read the same physical pages again."""
    gen = generator(9)
    sample = paged_set([64, 64], gen, dim=64, dtype=torch.float16)
    sample.table[1, :2] = sample.table[0, :2]
    positions = list(range(40, 56)) * 2
    owners = int32([0] * 16 + [1] * 16)
    regions = torch.cat([neighbours(gen, positions[:16], 5), neighbours(gen, positions[16:], 5)])
    for p in range(64):  # the second request's own tokens behind the prefix
        sample.cache[int(sample.table[1, p // 16]), 0, p % 16] = torch.randn(128, generator=gen).half()
    lists = metadata(positions, regions, sample.table, owners, sample.cache)
    query = torch.randn(32, 8, 64, generator=gen).half()
    assert_close(attend(sample.cache, query, owners, lists, walk), ref.paged_attention(query, sample.cache, *lists, 0.3))


@gpu
@pytest.mark.parametrize("walk", WALKS, ids=ids)
def test_poisoning_what_no_row_sees_changes_no_bit(walk):
    """Other groups, gaps, later tokens of own regions and other requests' pages; NaN at first, then infinity."""
    cache, query, positions, owners, lists = case(10, [list(range(41, 58)), list(range(30, 44))], heads=8, layout="HND", group=1)
    whole = attend(cache, query, owners, lists, walk)
    pages, indptr, last_page_len = lists
    seen = torch.zeros(cache.shape[0], cache.shape[2], dtype=torch.bool)
    stride = ref.kv_page_stride(cache)
    for r in range(len(positions)):
        own = pages[int(indptr[r]) : int(indptr[r + 1])].tolist()
        for page in own:
            count = int(last_page_len[r]) if page == own[-1] else 8
            seen[page // stride, page % stride * 8 : page % stride * 8 + count] = True
    storage = torch.empty(0, dtype=cache.dtype).set_(cache.untyped_storage())
    kept = cache.clone()
    storage.fill_(float("inf"))
    cache.copy_(torch.where(seen[:, None, :, None], kept, torch.full_like(kept, float("inf"))))
    assert_same_bits(attend(cache, query, owners, lists, walk), whole)
    # Everything of the second request.
    rows = owners == 0
    for page in set(pages[int(indptr[17]) : int(indptr[-1])].tolist()):
        cache[page // stride, 0, page % stride * 8 : page % stride * 8 + 8] = float("nan")
    query[17:] = float("nan")
    out = attend(cache, query, owners, lists, walk)
    # The tile that holds rows of both is walked row by row in either case.
    assert_same_bits(out[rows], whole[rows])


@gpu
@pytest.mark.parametrize("walk", WALKS, ids=ids)
def test_nan_in_a_page_that_only_a_neighbour_selects_stays_there(walk):
    """Rows walk shared pages together, masked: 0 * NaN would be NaN. Such a tile is walked again row by row."""
    gen = generator(11)
    sample = paged_set([48], gen, dim=64, dtype=torch.float16)
    positions = [40 + r % 8 for r in range(16)]
    regions = int32([[0, 1, 3, 5]] * 16)
    regions[1] = int32([0, 2, 3, 5])
    owners = torch.zeros(16, dtype=torch.int32)
    lists = metadata(positions, regions, sample.table, owners, sample.cache)
    query = torch.randn(16, 8, 64, generator=gen).half()
    expected = ref.paged_attention(query, sample.cache, *lists, 0.3)
    sample.cache[int(sample.table[0, 1]), 0, 0:8] = float("nan")  # region 2
    out = attend(sample.cache, query, owners, lists, walk)
    others = torch.arange(16) != 1
    assert out[1].isnan().all()
    assert_close(out[others], expected[others])


@gpu
@pytest.mark.parametrize("walk", WALKS, ids=ids)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_logits_stay_finite(walk, sign):
    cache, query, _, owners, lists = case(12, [list(range(40, 57))], heads=8)
    out = attend(cache, sign * query * 3e3, owners, lists, walk)
    assert out.isfinite().all()


@gpu
@pytest.mark.parametrize("walk", WALKS, ids=ids)
def test_garbage_never_leaves_the_buffers(walk):
    """Whatever indptr, pages, lengths and owners hold, the call ends and writes nothing but out."""
    cache, query, _, owners, lists = case(13, [list(range(40, 56))], heads=8)
    gen = generator(14)
    for trial in range(4):
        pages = torch.randint(-(2**31), 2**31 - 1, lists[0].shape, generator=gen).to(torch.int32)
        indptr = torch.randint(-50, 200, lists[1].shape, generator=gen).to(torch.int32)
        if trial == 1:
            indptr = torch.randint(-(2**31), 2**31 - 1, lists[1].shape, generator=gen).to(torch.int32)
        lengths = torch.randint(-20, 20, lists[2].shape, generator=gen).to(torch.int32)
        attend(torch.nan_to_num(cache) if trial == 2 else cache, query, owners * INT32_MAX, (pages, indptr, lengths), walk)


@gpu
@pytest.mark.parametrize("walk", WALKS, ids=ids)
def test_same_batch_same_bits(walk):
    cache, query, _, owners, lists = case(15, SPREAD, heads=16, region_count=9)
    first = attend(cache, query, owners, lists, walk)
    for _ in range(3):
        assert_same_bits(attend(cache, query, owners, lists, walk), first)


# fill_prefill_pages, store_owners


@gpu
@pytest.mark.parametrize("requests,block_size,region_count", [(1, 64, 5), (3, 8, 30), (2, 24, 1), (3, 64, 700)])
@pytest.mark.parametrize("heads,dim", [(3, 5), (16, 192), (1, 64)])
def test_fill_is_the_reference(requests, block_size, region_count, heads, dim):
    from sparse_prefill.triton.fill import fill_prefill_pages

    gen = generator(region_count)
    positions = [-1, 0, 7, 8, 300, 299, -1, 45, 1000]
    regions = random_regions(gen, positions, region_count)
    table = strided_rows(torch.randint(0, 10**6, (requests, 130), generator=gen).to(torch.int32), 3, 1, fill=POISON)
    owners = torch.randint(0, requests, (9,), generator=gen).to(torch.int32)
    indptr = int32(ref.compact_page_metadata(positions, region_count)[0])
    storage = torch.randn(9, dim, heads + 2, generator=gen).half()
    query = storage.transpose(1, 2)[:, 1 : 1 + heads]
    pages = torch.full((int(indptr[-1]) + 5,), POISON, dtype=torch.int32)
    expected = pages.clone()
    ref.fill_prefill_pages(regions, table, owners, indptr, expected, block_size, 13)
    start = 2
    whole = torch.cat([torch.full((start,), INT32_MAX, dtype=torch.int32), indptr, int32([POISON])]).to(DEVICE)
    destination = torch.full((14, heads, dim), 9.0, dtype=torch.float16, device=DEVICE)
    pages = pages.to(DEVICE)
    fill_prefill_pages(
        moved(strided_rows(regions, 2, 1, fill=INT32_MAX)), moved(table), owners.to(DEVICE), whole, pages, block_size,
        moved(query), destination, 13, start, 0,
    )  # fmt: skip
    assert torch.equal(pages.cpu(), expected)
    assert_same_bits(destination[start : start + 9].cpu(), query.contiguous())
    assert (destination[:start] == 9).all() and (destination[start + 9 :] == 9).all()


@gpu
def test_fill_with_garbage_stays_in_bounds():
    from sparse_prefill.triton.fill import fill_prefill_pages, store_owners

    gen = generator(1)
    wild = lambda *shape: torch.randint(-(2**31), 2**31 - 1, shape, generator=gen).to(torch.int32).to(DEVICE)  # noqa: E731
    query = torch.randn(6, 2, 8, generator=gen).half().to(DEVICE)
    pages = torch.full((40,), POISON, dtype=torch.int32, device=DEVICE)
    guarded = torch.full((60,), POISON, dtype=torch.int32, device=DEVICE)
    pages = guarded[10:50]
    for indptr in (wild(7), torch.arange(7, dtype=torch.int32, device=DEVICE) * 7):
        fill_prefill_pages(wild(6, 9), wild(3, 4), wild(6), indptr, pages, 16, query, torch.empty_like(query), 2**20, 0, 77)
        written = pages[pages != POISON]
        assert ((written >= 0) & (written < 77)).all()
        assert (guarded[:10] == POISON).all() and (guarded[50:] == POISON).all()
    kept = torch.full((9,), POISON, dtype=torch.int32, device=DEVICE)
    store_owners(int32([5, 6]).to(DEVICE), kept, 3)
    assert kept.tolist() == [POISON] * 3 + [5, 6] + [POISON] * 4


# stage_prefill_pages


@gpu
@pytest.mark.parametrize("layout", HISTORY_LAYOUTS)
@pytest.mark.parametrize("target", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [FP8, torch.float16, torch.bfloat16])
def test_stage_is_the_reference(layout, dtype, target):
    from sparse_prefill.triton.stage import stage_prefill_pages

    if INTERPRET and target == "bfloat16" and dtype != torch.bfloat16:
        target = "float16"  # the interpreter truncates to bf16
    gen = generator(2)
    sample = paged_set([50, 40], gen, dim=24, dtype=dtype, layout=layout, block_size=24, group=1, offset=8)
    pages = int32([3, 0, 3, 1])
    scales = (torch.tensor([0.7]), torch.tensor([1.9])) if dtype == FP8 else (None, None)
    expected = ref.stage_prefill_pages(sample.cache, pages, getattr(torch, target), *scales)
    ids = torch.cat([pages, int32([-1, 10**6])]).to(DEVICE)
    on_device = [None if x is None else x.to(DEVICE) for x in scales]
    out = stage_prefill_pages(moved(sample.cache), ids, target, *on_device).cpu()
    assert torch.equal(out[:4].nan_to_num(123.0), expected.nan_to_num(123.0))
    assert (out[4:] == 0).all()
    assert stage_prefill_pages(moved(sample.cache), ids[:0], target, *on_device).shape == (0, 1, 24, 48)


@gpu
@pytest.mark.parametrize("native", [False, True])
def test_every_fp8_byte_is_decoded(native):
    """The conversion instruction and the shifts agree with torch on all 256 bytes."""
    if native and INTERPRET:
        pytest.skip("the interpreter has no conversion instruction")
    import triton
    import triton.language as tl

    from sparse_prefill.triton.fp8 import decode_e4m3, has_native_e4m3

    if native and not has_native_e4m3(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("this GPU has no conversion instruction")
    data = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    out = torch.empty(256, dtype=torch.float16, device=DEVICE)

    @triton.jit
    def kernel(source, target, NATIVE: tl.constexpr):
        at = tl.arange(0, 256)
        tl.store(target + at, decode_e4m3(tl.load(source + at), NATIVE))

    kernel.fn.__globals__.update(decode_e4m3=decode_e4m3, tl=tl)
    kernel[(1,)](data.to(DEVICE), out, native)
    assert torch.equal(out.cpu().float().nan_to_num(9e9), data.view(FP8).float().nan_to_num(9e9))


# append_own_region, fixup_positions


@gpu
@pytest.mark.parametrize("k", [0, 1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_append_own_region_is_the_reference(k, dtype):
    from sparse_prefill.triton.regions import append_own_region

    gen = generator(k)
    positions = [-1, 0, 7, 8, 15, 16, 100, 500, -1, 39, 40]
    regions = random_regions(gen, positions, k + 1)
    selected = torch.full((len(positions), k), -1, dtype=torch.int32)
    for r, position in enumerate(positions):
        live = min(max(position // 8, 0), k)
        selected[r, :live] = regions[r, :live]
    out = append_own_region(moved(strided_rows(selected, 3, 1, fill=POISON)), torch.tensor(positions, dtype=dtype, device=DEVICE))
    assert torch.equal(out.cpu(), regions)
    assert torch.equal(regions, ref.append_own_region(selected, torch.tensor(positions)))


@gpu
@pytest.mark.parametrize("rows,capacity", [(0, 4), (11, 11), (11, 30), (5000, 6000)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_fixup_positions_is_the_reference(rows, capacity, dtype):
    from sparse_prefill.triton.regions import fixup_positions

    positions = torch.randint(-1, 200, (rows,), generator=generator(rows))
    guard = torch.full((capacity + 4,), POISON, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((capacity + 2,), POISON, dtype=torch.int32, device=DEVICE)
    fixup_positions(positions.to(dtype).to(DEVICE), guard[1 : capacity + 2], lengths[1 : capacity + 1], 9)
    indptr, last_page_len = ref.compact_page_metadata(positions.tolist(), 9)
    assert guard.tolist() == [POISON] + indptr + [indptr[-1]] * (capacity - rows) + [POISON] * 2
    assert lengths.tolist() == [POISON] + list(last_page_len) + [8] * (capacity - rows) + [POISON]


# On a GPU only


@gpu_only
@pytest.mark.parametrize("walk", WALKS, ids=ids)
def test_offsets_past_two_gib(walk):
    """Blocks whose byte and element offsets need 64 bits."""
    from sparse_prefill.triton.attention import launch
    from sparse_prefill.triton.stage import stage_prefill_pages

    blocks, dim = 23000, 192
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of GPU memory")
    cache = torch.zeros(blocks, 4, 64, 2 * dim, dtype=torch.bfloat16, device=DEVICE)[:, 3:4]
    gen = generator(3)
    used = [22999, 22000, 21846, 5]
    small = torch.randn(4, 1, 64, 2 * dim, generator=gen).bfloat16()
    for i, block in enumerate(used):
        cache[block] = small[i]
    positions = list(range(200, 216))
    regions = neighbours(gen, positions, 12)
    owners = torch.zeros(16, dtype=torch.int32)
    far = metadata(positions, regions, int32([used]), owners, cache)
    near = metadata(positions, regions, int32([[0, 1, 2, 3]]), owners, small)
    query = torch.randn(16, 16, dim, generator=gen).bfloat16()
    out = torch.empty_like(query, device=DEVICE)
    launch(query.to(DEVICE), cache, *(x.to(DEVICE) for x in far), owners.to(DEVICE), out, 0.07, None, None, *walk)
    assert_close(out.cpu(), ref.paged_attention(query, small, *near, 0.07))
    assert torch.equal(stage_prefill_pages(cache, int32(used).to(DEVICE), "bfloat16", None, None).cpu(), small)


@gpu_only
@pytest.mark.parametrize("walk", WALKS, ids=ids)
def test_captured_once_and_replayed(walk):
    """One graph of fixup, fill and attention; replayed with new positions, regions, owners, queries and cache contents."""
    from sparse_prefill.triton.attention import launch
    from sparse_prefill.triton.fill import fill_prefill_pages
    from sparse_prefill.triton.regions import fixup_positions

    rows, region_count, dim, heads = 40, 7, 128, 16
    steps = []
    for seed in range(3):
        gen = generator(seed)
        sample = paged_set([150, 150], gen, dim=dim, dtype=torch.bfloat16, block_size=16)
        live = rows - 8 * seed
        positions = [60 + r for r in range(live - 9)] + [100 + r for r in range(9)] + [-1] * (rows - live)
        owners = int32([0] * (live - 9) + [1] * (rows - live + 9))
        regions = neighbours(gen, positions, region_count)
        query = torch.randn(rows, heads, dim, generator=gen).bfloat16()
        lists = metadata(positions, regions, sample.table, owners, sample.cache)
        expected = ref.paged_attention(query, sample.cache, *lists, 0.1)
        steps.append((moved(sample.cache), sample.table, positions, owners, regions, query, expected))
    cache, table, positions, owners, regions, query, _ = steps[0]
    cache = cache.contiguous().clone()
    on_device = [torch.tensor(positions), owners, regions, table, query]
    positions, owners, regions, table, query = (x.to(DEVICE) for x in on_device)
    indptr = torch.zeros(rows + 1, dtype=torch.int32, device=DEVICE)
    last_page_len, pages = torch.zeros_like(indptr[1:]), torch.zeros(rows * region_count, dtype=torch.int32, device=DEVICE)
    dense, out = torch.empty_like(query), torch.empty_like(query)

    def step():
        fixup_positions(positions, indptr, last_page_len, region_count)
        stride = ref.kv_page_stride(cache)
        fill_prefill_pages(regions, table, owners, indptr, pages, 16, query, dense, stride, 0, ref.view_size(cache))
        launch(dense, cache, pages, indptr, last_page_len, owners, out, 0.1, None, None, *walk)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for new_cache, *new, expected in (*steps, steps[0]):
        cache.copy_(new_cache)
        for target, value in zip((table, positions, owners, regions, query), new, strict=True):
            target.copy_(torch.as_tensor(value))
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out.cpu(), expected)


# The public functions on a GPU: registration, plan, backends


def prepared(seed, rows, region_count=7, heads=16, dim=128, block_size=16):
    gen = generator(seed)
    sample = paged_set([rows + 60], gen, dim=dim, dtype=torch.bfloat16, block_size=block_size, layout="HND", group=1)
    positions = [60 + r for r in range(rows - 3)] + [-1] * 3
    owners = torch.zeros(rows, dtype=torch.int32)
    regions = neighbours(gen, positions, region_count)
    query = torch.randn(rows, heads, dim, generator=gen).bfloat16()
    lists = metadata(positions, regions, sample.table, owners, sample.cache)
    return sample, positions, owners, regions, query, ref.paged_attention(query, sample.cache, *lists, 0.1)


def backends():
    try:
        import flashinfer  # noqa: F401
    except ImportError:
        return ["auto", "triton"]
    return ["auto", "triton", "flashinfer"]


@gpu_only
@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("contiguous_query", [False, True])
def test_two_plans_in_flight(backend, contiguous_query):
    """Plan A, plan B, then both steps behind a long kernel; positions are bounds that the device makes exact."""
    import sparse_prefill as sp

    steps = [prepared(seed, rows) for seed, rows in ((1, 40), (2, 33))]
    busy = torch.randn(4096, 4096, device=DEVICE)
    plans, outs = [], []
    for _ in range(20):
        busy = busy @ busy / 64
    for _, positions, _, _, query, _ in steps:
        plan = sp.CompactPagedPrefill(None, max_rows=50, backend=backend)
        bounds = [p + 5 if p >= 0 else 3 for p in positions]
        plan.plan(query.shape, query.dtype, DEVICE, bounds, 7, 0.1, 16, contiguous_query=contiguous_query)
        plans.append(plan)
        outs.append(torch.full_like(query, float("nan"), device=DEVICE))
    for plan, out, (sample, positions, owners, regions, query, _) in zip(plans, outs, steps, strict=True):
        cache, table, owners, regions, query = (moved(x) for x in (sample.cache, sample.table, owners, regions, query))
        plan.fixup_positions(torch.tensor(positions, device=DEVICE))
        if contiguous_query:
            pages = plan.page_metadata(table, owners, sp.kv_page_stride(cache))
            dense = torch.empty_like(query)
            sp.fill_prefill_pages(regions, table, owners, pages.indptr, pages.pages, 16, query, dense, pages.page_stride)
        else:
            plan.prepare_chunk(0, query[:20], cache, regions[:20], table, owners[:20])
            plan.prepare_chunk(20, query[20:], cache, regions[20:], table, owners[20:])
        plan.finish(query if contiguous_query else None, cache, out)
    for out, step in zip(outs, steps, strict=True):
        assert_close(out.cpu(), step[-1])
        assert_same_bits(out[-3:].cpu(), torch.zeros_like(out[-3:]).cpu())


@gpu_only
@pytest.mark.parametrize("backend", backends())
def test_a_warm_plan_is_captured_and_replayed(backend):
    import sparse_prefill as sp

    steps = [prepared(seed, 40) for seed in (3, 4)]
    sample, positions, owners, regions, query, _ = steps[0]
    cache = moved(sample.cache).clone(memory_format=torch.contiguous_format)
    table, owners, regions, query = (moved(x).clone() for x in (sample.table, owners, regions, query))
    positions = torch.tensor(positions, device=DEVICE)
    out = torch.empty_like(query)
    plan = sp.CompactPagedPrefill(None, max_rows=40, backend=backend)
    plan.plan(query.shape, query.dtype, DEVICE, [10**5] * 40, 7, 0.1, 16, contiguous_query=False)
    plan.warmup(cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.fixup_positions(positions)
        plan.prepare_chunk(0, query, cache, regions, table, owners)
        plan.finish(None, cache, out)
        with pytest.raises(RuntimeError, match="CompactPagedPrefill.plan"):
            plan.plan(query.shape, query.dtype, DEVICE, [1] * 40, 7, 0.1, 16)
        with pytest.raises(RuntimeError, match="CompactPagedPrefill.warmup"):
            plan.warmup(cache)
    for sample, new_positions, _, new_regions, new_query, expected in (*steps, steps[0]):
        cache.copy_(moved(sample.cache))
        positions.copy_(torch.tensor(new_positions))
        table.copy_(sample.table), regions.copy_(new_regions), query.copy_(new_query)
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out.cpu(), expected)


@gpu_only
def test_what_a_backend_cannot_do_is_named():
    import sparse_prefill as sp

    cache, query, _, owners, lists = case(1, [[9, 10]], dim=264)
    out = torch.empty_like(query, device=DEVICE)
    tensors = [moved(query), moved(cache), *(x.to(DEVICE) for x in (*lists, owners)), out]
    with pytest.raises(ValueError, match="head_dim 264, must have at most 256"):
        sp.paged_attention(*tensors, 0.1)
    with pytest.raises(ValueError, match="head_dim 264, must have one of"):
        sp.paged_attention(*tensors, 0.1, backend="flashinfer")
    with pytest.raises(ValueError, match="backend was 'torch' on cuda"):
        sp.paged_attention(*tensors, 0.1, backend="torch")
