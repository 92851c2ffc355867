import pytest
import reference as ref
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import (
    ATTENTION_TOLERANCES,
    HISTORY_LAYOUTS,
    INT32_MAX,
    assert_attended,
    assert_same_bits,
    generator,
    int32,
    paged_set,
    random_regions,
)

import sparse_prefill as sp

FP8 = torch.float8_e4m3fn


def metadata(positions, regions, table, owners, cache, more_rows=0):
    """Page ids, indptr and last_page_len from the reference; ids past the live prefix are poison."""
    indptr, last_page_len = ref.compact_page_metadata(positions, regions.shape[1])
    pages = torch.full((indptr[-1] + 5,), INT32_MAX, dtype=torch.int32)
    ref.fill_prefill_pages(regions, table, owners, int32(indptr), pages, cache.shape[2], ref.kv_page_stride(cache))
    return pages, int32(indptr + [indptr[-1]] * more_rows), int32(last_page_len + [8] * more_rows)


def case(seed, positions_of, *, heads=3, dim=16, region_count=5, query_dtype=torch.bfloat16, shared=False, **options):
    """positions_of: for every request the positions of its rows; rows come in request order."""
    gen = generator(seed)
    lengths = [max([p + 1 for p in positions], default=0) for positions in positions_of]
    sample = paged_set(lengths, gen, dim=dim, **options)
    positions = [p for own in positions_of for p in own]
    owners = int32([r for r, own in enumerate(positions_of) for _ in own])
    regions = random_regions(gen, positions, region_count)
    query = torch.randn(len(positions), heads, dim, generator=gen).to(query_dtype)
    return sample, positions, owners, regions, query


def attend(query, cache, pages, indptr, last_page_len, owners, scale=0.3, **options):
    out = torch.full(query.shape, float("nan"), dtype=query.dtype)
    assert sp.paged_attention(query, cache, pages, indptr, last_page_len, owners, out, scale, **options) is None
    return out


ROWS = st.lists(st.lists(st.integers(-1, 150), max_size=8), min_size=1, max_size=3)


@given(
    st.integers(0, 2**32),
    ROWS,
    st.sampled_from([1, 3, 9, 16, 33]),
    st.sampled_from([1, 7, 64, 96, 100, 128, 192]),
    st.sampled_from([1, 2, 5, 20]),
    st.sampled_from(list(ATTENTION_TOLERANCES)),
    st.sampled_from(HISTORY_LAYOUTS),
    st.sampled_from([8, 16, 64]),
    st.integers(0, 7),
)
def test_attention_is_the_reference(seed, positions_of, heads, dim, region_count, dtype, layout, block_size, offset):
    sample, positions, owners, regions, query = case(
        seed,
        positions_of,
        heads=heads,
        dim=dim,
        region_count=region_count,
        query_dtype=dtype,
        dtype=dtype,
        layout=layout,
        block_size=block_size,
        group=1,
        offset=offset,
        tail=INT32_MAX,
    )
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    out = attend(query, sample.cache, pages, indptr, last_page_len, owners)
    assert_attended(out, ref.paged_attention(query, sample.cache, pages, indptr, last_page_len, 0.3))


@given(
    st.integers(0, 2**32),
    st.lists(st.integers(-1, 39), min_size=1, max_size=12),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_attention_is_dense_while_every_region_fits(seed, own, dtype):
    """pos < 8 * region_count: all tokens up to the row's own, each once."""
    own = sorted(own)
    sample, positions, owners, regions, query = case(seed, [own, own[::2]], region_count=5, query_dtype=dtype, dtype=dtype)
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    out = attend(query, sample.cache, pages, indptr, last_page_len, owners, scale=0.25)
    rows = [sample.table[owner] for owner in owners.tolist()]
    assert_attended(out, ref.dense_attention(query, sample.cache, rows, positions, 0.25))


@pytest.mark.parametrize("residue", range(8))
def test_own_region_ends_with_the_rows_own_token(residue):
    """Later tokens of the own region, and everything behind them, are NaN here: seen by nobody."""
    position = 32 + residue
    sample, positions, owners, regions, query = case(
        residue, [[position]], region_count=3, dtype=torch.float32, query_dtype=torch.float32
    )
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    out = attend(query, sample.cache, pages, indptr, last_page_len, owners)
    tokens = [t for region in regions[0].tolist() for t in range(8 * region, 8 * region + 8) if t <= position]
    kept = ref.history(sample.cache, sample.table[0], position + 1)[tokens]
    assert_attended(out, ref.attend(query[0].double(), kept[:, :16], kept[:, 16:], 0.3)[None])


def test_relative_error_of_a_typical_geometry():
    """16 heads of dim 192, 40 regions: the error of the whole output over its norm, as the specification states it."""
    positions = list(range(480, 512, 4))
    for dtype, tolerance in ATTENTION_TOLERANCES.items():
        sample, _, owners, regions, query = case(
            31, [positions], heads=16, dim=192, region_count=40, dtype=dtype, query_dtype=dtype, block_size=64
        )
        pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
        out = attend(query, sample.cache, pages, indptr, last_page_len, owners, scale=192**-0.5)
        expected = ref.paged_attention(query, sample.cache, pages, indptr, last_page_len, 192**-0.5)
        assert (out.double() - expected).norm() <= tolerance * expected.norm()


def test_rows_without_pages_are_exactly_zero():
    sample, positions, owners, regions, query = case(1, [[-1, 5, -1], [-1, 40, -1]])
    query[[0, 2]] = float("nan")
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    out = attend(query, sample.cache, pages, indptr, last_page_len, owners)
    dead = torch.tensor([p < 0 for p in positions])
    assert_same_bits(out[dead], torch.zeros_like(out[dead]))
    assert_attended(out[~dead], ref.paged_attention(query, sample.cache, pages, indptr, last_page_len, 0.3)[~dead])


@pytest.mark.parametrize("pages", [0, 3])
def test_only_rows_without_pages(pages):
    sample, positions, owners, _, query = case(2, [[-1] * 4, [9]])
    zeros = torch.zeros(6, dtype=torch.int32)
    out = attend(query[:4], sample.cache, torch.full((pages,), -1, dtype=torch.int32), zeros, zeros[:5] + 8, owners)
    assert_same_bits(out, torch.zeros_like(out))


def test_whole_buffers_longer_than_the_rows():
    """indptr, last_page_len and owners of a plan for more rows; what lies past the live rows is poison."""
    sample, positions, owners, regions, query = case(3, [[5, 60], [33]])
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    expected = attend(query, sample.cache, pages, indptr, last_page_len, owners)
    tail = int32([INT32_MAX, -1, 7])
    out = attend(
        query,
        sample.cache,
        torch.cat([pages, tail]),
        torch.cat([indptr, tail]),
        torch.cat([last_page_len, tail]),
        torch.cat([owners, tail]),
    )
    assert_same_bits(out, expected)


def test_each_row_alone_over_a_cache_that_holds_only_its_pages():
    """Every element of the cache but the row's own listed pages is NaN."""
    sample, positions, owners, regions, query = case(4, [[70], [81], [20]], region_count=4, layout="NHD", group=1)
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    expected = ref.paged_attention(query, sample.cache, pages, indptr, last_page_len, 0.3)
    for row in range(3):
        listed = pages[int(indptr[row]) : int(indptr[row + 1])]
        storage = torch.full_like(torch.empty(0, dtype=sample.cache.dtype).set_(sample.cache.untyped_storage()), float("nan"))
        cache = storage.as_strided(sample.cache.shape, sample.cache.stride(), sample.cache.storage_offset())
        for page in listed.tolist():
            block, first = divmod(page, ref.kv_page_stride(sample.cache))
            part = slice(8 * first, 8 * first + 8)
            cache[block, 0, part] = sample.cache[block, 0, part]
        one = slice(row, row + 1)
        out = attend(query[one], cache, listed, int32([0, len(listed)]), last_page_len[one], owners[one])
        assert_attended(out, expected[one])


def test_poisoning_every_other_request_of_one_batch_changes_no_bit():
    sample, positions, owners, regions, query = case(5, [[70, 71, 72], [81, 3]], region_count=4)
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    whole = attend(query, sample.cache, pages, indptr, last_page_len, owners)
    for n in range(ref.cdiv(82, 16)):
        sample.cache[int(sample.table[1, n])] = float("nan")
    query[3:] = float("nan")
    assert_same_bits(attend(query, sample.cache, pages, indptr, last_page_len, owners)[:3], whole[:3])


def test_nan_in_a_page_that_only_a_neighbour_selects_stays_there():
    """Rows walk shared pages together, masked: 0 * NaN would be NaN."""
    positions = [40, 41, 42, 43]
    sample, _, owners, regions, query = case(6, [positions], region_count=3)
    regions = int32([[0, 1, 5], [0, 2, 5], [0, 1, 5], [1, 3, 5]])
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    whole = attend(query, sample.cache, pages, indptr, last_page_len, owners)
    sample.cache[int(sample.table[0, 1]), 0, 0:8] = float("nan")  # region 2: only the second row's
    out = attend(query, sample.cache, pages, indptr, last_page_len, owners)
    assert out[1].isnan().all()
    assert_same_bits(out[[0, 2, 3]], whole[[0, 2, 3]])


def test_tokens_behind_a_row_in_a_shared_own_region_stay_unseen():
    positions = [40, 41, 47]
    sample, _, owners, _, query = case(7, [positions], region_count=2)
    regions = int32([[1, 5]] * 3)
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    whole = attend(query, sample.cache, pages, indptr, last_page_len, owners)
    sample.cache[int(sample.table[0, 2]), 0, 10:16] = float("inf")  # tokens 42 to 47
    out = attend(query, sample.cache, pages, indptr, last_page_len, owners)
    assert_same_bits(out[:2], whole[:2])


@pytest.mark.parametrize("shared", [0, 1])
def test_the_owner_only_groups_rows(shared):
    """Page ids are physical: rows of different owners that list the same page get what each listed."""
    positions = [20, 21, 22]
    sample, _, owners, regions, query = case(8, [positions], region_count=3)
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    for owners in (int32([0, 0, 0]), int32([0, 1, 2]), int32([2, 0, 2]), int32([-1, INT32_MAX, 5])):
        out = attend(query, sample.cache, pages, indptr, last_page_len, owners)
        assert_attended(out, ref.paged_attention(query, sample.cache, pages, indptr, last_page_len, 0.3))


def test_a_page_listed_twice_weighs_twice():
    sample, positions, owners, _, query = case(9, [[30]], dtype=torch.float32, query_dtype=torch.float32)
    regions = int32([[1, 1, 2, 3]])
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    out = attend(query, sample.cache, pages, indptr, last_page_len, owners)
    assert_attended(out, ref.paged_attention(query, sample.cache, pages, indptr, last_page_len, 0.3))


def test_pages_of_a_row_in_any_order():
    """Physical ids are not sorted; only the last page is trimmed."""
    sample, positions, owners, regions, query = case(10, [[60]], region_count=6, dtype=torch.float32, query_dtype=torch.float32)
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    pages[:5] = pages[:5][torch.randperm(5, generator=generator(0))]
    out = attend(query, sample.cache, pages, indptr, last_page_len, owners)
    assert_attended(out, ref.paged_attention(query, sample.cache, pages, indptr, last_page_len, 0.3))


@pytest.mark.parametrize("magnitude", [1e2, 1e4, 1e18])
def test_extreme_logits_stay_finite(magnitude):
    sample, positions, owners, regions, query = case(11, [[60, 61, 3]], dtype=torch.float32, query_dtype=torch.float32)
    query *= magnitude
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    for sign in (1.0, -1.0):
        out = attend(sign * query, sample.cache, pages, indptr, last_page_len, owners)
        expected = ref.paged_attention(sign * query, sample.cache, pages, indptr, last_page_len, 0.3)
        assert out.isfinite().all()
        if magnitude < 1e4:
            assert (out - expected).norm() <= 1e-2 * expected.norm()


def test_all_logits_far_below_zero():
    """Keys opposed to the query: every logit is hugely negative, the softmax is not empty."""
    sample, positions, owners, regions, query = case(12, [[30, 9]], dtype=torch.float32, query_dtype=torch.float32, dim=4)
    query[:] = 3e4
    for n in range(2):
        block = sample.cache[int(sample.table[0, n]), 0]
        block[:, :4] = -3e4
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    out = attend(query, sample.cache, pages, indptr, last_page_len, owners)
    assert_attended(out, ref.paged_attention(query, sample.cache, pages, indptr, last_page_len, 0.3))


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("layout", HISTORY_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_caches_with_scales(as_bytes, layout, dtype):
    sample, positions, owners, regions, query = case(
        13, [[60, 9], [20, -1]], dtype=FP8, query_dtype=dtype, layout=layout, group=1
    )
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    expected = ref.paged_attention(query, sample.cache, pages, indptr, last_page_len, 0.3, k_scale=0.7, v_scale=1.9)
    cache = sample.cache.view(torch.uint8) if as_bytes else sample.cache
    out = attend(query, cache, pages, indptr, last_page_len, owners, k_scale=torch.tensor([0.7]), v_scale=torch.tensor([1.9]))
    live = torch.tensor([p >= 0 for p in positions])
    assert_attended(out[live], expected[live])
    assert not out[~live].any()


@pytest.mark.parametrize("as_bytes", [False, True])
def test_an_fp8_cache_without_scales_is_refused(as_bytes):
    sample, positions, owners, regions, query = case(13, [[60, 9]], dtype=FP8)
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    cache = sample.cache.view(torch.uint8) if as_bytes else sample.cache
    out = torch.full(query.shape, 7.0, dtype=query.dtype)
    with pytest.raises(ValueError, match="k_scale|v_scale"):
        sp.paged_attention(query, cache, pages, indptr, last_page_len, owners, out, 0.3)
    assert (out == 7.0).all()


def test_strided_query_and_out():
    sample, positions, owners, regions, query = case(14, [[60, 9, 30]])
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    expected = attend(query, sample.cache, pages, indptr, last_page_len, owners)
    wide = torch.full((3, 2, 3, 16), float("nan"), dtype=query.dtype)
    wide[:, 1] = query
    target = torch.full((3, 3, 3, 16), 7.0, dtype=query.dtype)
    sp.paged_attention(wide[:, 1], sample.cache, pages, indptr, last_page_len, owners, target[:, 1], 0.3)
    assert_same_bits(target[:, 1].contiguous(), expected)
    assert (target[:, ::2] == 7.0).all()


@pytest.mark.parametrize("rows", [0, 1, 513])
def test_row_counts(rows):
    positions = [(11 * r) % 130 - 1 for r in range(rows)]
    sample, _, owners, regions, query = case(
        15, [positions], heads=2, dim=8, region_count=2, dtype=torch.float32, query_dtype=torch.float32
    )
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    out = attend(query, sample.cache, pages, indptr, last_page_len, owners)
    assert_attended(out, ref.paged_attention(query, sample.cache, pages, indptr, last_page_len, 0.3))


def test_same_batch_same_bits():
    sample, positions, owners, regions, query = case(16, [list(range(60, 100)), list(range(20))])
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    first = attend(query, sample.cache, pages, indptr, last_page_len, owners)
    for _ in range(3):
        assert_same_bits(attend(query, sample.cache, pages, indptr, last_page_len, owners), first)


def test_blocks_past_4_gib():
    cache = torch.empty(22_000 * 98_304, dtype=torch.bfloat16).as_strided((22_000, 1, 8, 16), (98_304, 98_304, 16, 1))
    gen = generator(17)
    blocks = [21_999, 21_846, 5]
    for block in blocks:
        cache[block] = torch.randn(1, 8, 16, generator=gen)
    pages = int32([block * ref.kv_page_stride(cache) for block in blocks])
    query = torch.randn(1, 3, 8, generator=gen).bfloat16()
    out = attend(query, cache, pages, int32([0, 3]), int32([5]), int32([0]))
    assert_attended(out, ref.paged_attention(query, cache, pages, int32([0, 3]), int32([5]), 0.3))


@pytest.mark.parametrize("length", [9, 64, INT32_MAX])
def test_a_last_page_longer_than_a_region_is_refused_or_clamped(length):
    sample, positions, owners, regions, query = case(18, [[31]])
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    expected = attend(query, sample.cache, pages, indptr, last_page_len, owners)
    try:
        out = attend(query, sample.cache, pages, indptr, int32([length]), owners)
    except ValueError as error:
        assert "last_page_len" in str(error)
        return
    assert_same_bits(out, expected)


@pytest.mark.parametrize("bad", [-1, INT32_MAX, -(2**31), 10**7])
@pytest.mark.parametrize("where", ["pages", "indptr", "last_page_len", "owners", "all"])
def test_bad_values_are_memory_safe(bad, where):
    sample, positions, owners, regions, query = case(19, [[60, 9], [31]])
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    good = attend(query, sample.cache, pages, indptr, last_page_len, owners)
    for name, tensor in (("pages", pages), ("indptr", indptr), ("last_page_len", last_page_len), ("owners", owners)):
        if where in (name, "all"):
            tensor[1] = bad
    storage = torch.full((2 * query.numel() + query.numel(),), 7.0, dtype=query.dtype)
    out = storage[query.numel() : 2 * query.numel()].view(query.shape)
    before = ref.storage_bytes(sample.cache).clone()
    try:
        sp.paged_attention(query, sample.cache, pages, indptr, last_page_len, owners, out, 0.3)
    except (ValueError, IndexError):
        pass
    assert (storage[: query.numel()] == 7.0).all() and (storage[2 * query.numel() :] == 7.0).all()
    assert torch.equal(ref.storage_bytes(sample.cache), before)
    if where in ("pages", "owners") and not (out == 7.0).all():
        assert_same_bits(out[2], good[2])


def test_a_cache_of_no_blocks_serves_rows_without_pages():
    cache, zeros = torch.zeros(0, 1, 16, 32).bfloat16(), torch.zeros(4, dtype=torch.int32)
    query = torch.randn(3, 2, 16).bfloat16()
    out = attend(query, cache, zeros[:0], zeros, zeros[:3] + 8, zeros[:3])
    assert not out.any()


def test_a_slice_as_the_output_inside_a_graph_is_right_or_refused(fresh_compile):
    """Views made inside a graph as mutated arguments are where compilers go wrong; a step-1 slice of rows is one they handle."""
    sample, positions, owners, regions, query = case(22, [[60, 9], [31]])
    inputs = metadata(positions, regions, sample.table, owners, sample.cache)

    def step(query, whole):
        sp.paged_attention(query, sample.cache, *inputs, owners, whole[2:5], 0.3)
        return whole + 1

    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        whole = torch.full((8, *query.shape[1:]), 7.0, dtype=query.dtype)
        results.append((function(query, whole), whole))
    for actual, expected in zip(*results, strict=True):
        assert_same_bits(actual, expected)


def test_backends_by_name():
    sample, positions, owners, regions, query = case(20, [[31]])
    pages, indptr, last_page_len = metadata(positions, regions, sample.table, owners, sample.cache)
    expected = attend(query, sample.cache, pages, indptr, last_page_len, owners)
    assert_same_bits(attend(query, sample.cache, pages, indptr, last_page_len, owners, backend="torch"), expected)
    for backend in ("triton", "flashinfer", "cuda", ""):
        with pytest.raises(ValueError, match="backend"):
            attend(query, sample.cache, pages, indptr, last_page_len, owners, backend=backend)


def test_inputs_are_not_changed():
    sample, positions, owners, regions, query = case(21, [[60, 9], [31]])
    inputs = [query, *metadata(positions, regions, sample.table, owners, sample.cache), owners]
    before, memory = [t.clone() for t in inputs], ref.storage_bytes(sample.cache).clone()
    attend(query, sample.cache, *inputs[1:])
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert torch.equal(ref.storage_bytes(sample.cache), memory)
