import pytest
import reference as ref
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import GOLDEN, INT32_MAX, generator, int32, random_regions, strided_rows

import sparse_prefill as sp

OPS = torch.ops.sparse_prefill
POISON = -123456


def step(seed, positions, requests, region_count, block_size, heads=2, dim=4, dtype=torch.bfloat16, wide=0):
    gen = generator(seed)
    regions = random_regions(gen, positions, region_count)
    tokens = max([p + 1 for p in positions], default=1)
    width = max(1, ref.cdiv(tokens, block_size))
    table = torch.randint(0, 1000, (requests, width), generator=gen).to(torch.int32)
    owners = torch.randint(0, requests, (len(positions),), generator=gen).to(torch.int32)
    query = torch.randn(len(positions), heads, dim, generator=gen).to(dtype)
    indptr, _ = ref.compact_page_metadata(positions, region_count)
    return regions, strided_rows(table, wide, wide, fill=POISON), owners, int32(indptr), query


def expected_pages(regions, table, owners, indptr, size, block_size, page_stride):
    pages = torch.full((size,), POISON, dtype=torch.int32)
    ref.fill_prefill_pages(regions, table, owners, indptr, pages, block_size, page_stride)
    return pages


@pytest.mark.parametrize("case", GOLDEN["fill_prefill_pages"], ids=lambda case: f"page_stride={case['page_stride']}")
def test_golden_pages(case):
    table, regions, owners, indptr = (int32(case[name]) for name in ("table", "regions", "owners", "indptr"))
    pages = torch.full((len(case["pages"]) + 3,), POISON, dtype=torch.int32)
    query = torch.randn(3, 2, 4).bfloat16()
    destination = torch.zeros(3, 2, 4).bfloat16()
    sp.fill_prefill_pages(regions, table, owners, indptr, pages, case["block_size"], query, destination, case["page_stride"])
    assert pages.tolist() == case["pages"] + [POISON] * 3
    assert torch.equal(destination, query)
    expected = expected_pages(regions, table, owners, indptr, len(pages), case["block_size"], case["page_stride"])
    assert torch.equal(pages, expected)


@given(
    st.integers(0, 2**32),
    st.lists(st.integers(-1, 200), max_size=12),
    st.integers(1, 3),
    st.sampled_from([1, 2, 5, 30]),
    st.sampled_from([8, 16, 24, 64]),
    st.sampled_from([1, 3, 9]),
    st.sampled_from([1, 5, 64]),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.integers(0, 4),
)
def test_fill_is_the_reference(seed, positions, requests, region_count, block_size, heads, dim, dtype, wide):
    regions, table, owners, indptr, query = step(seed, positions, requests, region_count, block_size, heads, dim, dtype, wide)
    regions = strided_rows(regions, wide, wide, fill=INT32_MAX)
    page_stride = block_size // 8 + seed % 3
    pages = torch.full((int(indptr[-1]) + 5,), POISON, dtype=torch.int32)
    destination = torch.full((len(positions) + 2, heads, dim), float("nan"), dtype=dtype)
    source = strided_rows(query, wide, 3, fill=float("nan"))
    sp.fill_prefill_pages(regions, table, owners, indptr, pages, block_size, source, destination, page_stride)
    assert torch.equal(pages, expected_pages(regions, table, owners, indptr, len(pages), block_size, page_stride))
    assert torch.equal(destination[: len(positions)], query)
    assert destination[len(positions) :].isnan().all()


@given(st.integers(0, 2**32), st.lists(st.integers(-1, 90), min_size=1, max_size=12), st.data())
def test_rows_of_whole_buffers_from_start(seed, positions, data):
    """A chunk's rows land at `start`: indptr and the query buffer are whole, nothing before or after is written."""
    regions, table, owners, indptr, query = step(seed, positions, 2, 4, 16)
    first = data.draw(st.integers(0, len(positions)))
    last = data.draw(st.integers(first, len(positions)))
    part = slice(first, last)
    size = int(indptr[-1]) + 2
    pages = torch.full((size,), POISON, dtype=torch.int32)
    destination = torch.full_like(query, float("nan"))
    sp.fill_prefill_pages(regions[part], table, owners[part], indptr, pages, 16, query[part], destination, 2, start=first)
    assert torch.equal(pages, expected_pages(regions[part], table, owners[part], indptr[first : last + 1], size, 16, 2))
    assert torch.equal(destination[part], query[part])
    assert destination[:first].isnan().all() and destination[last:].isnan().all()
    again, slices = torch.full_like(pages, POISON), torch.full_like(query, float("nan"))
    sp.fill_prefill_pages(regions[part], table, owners[part], indptr[first : last + 1], again, 16, query[part], slices[part], 2)
    assert torch.equal(again, pages) and torch.equal(slices[part], query[part])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int16])
def test_query_moves_bit_for_bit(dtype):
    raw = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).reshape(64, 8, 128)
    regions, table, owners, indptr, _ = step(0, [-1] * 64, 1, 1, 8)
    source = raw.view(dtype).permute(1, 0, 2).contiguous().permute(1, 0, 2)
    destination = torch.zeros(64, 8, 128, dtype=dtype)
    pages = torch.full((1,), POISON, dtype=torch.int32)
    sp.fill_prefill_pages(regions, table, owners, indptr, pages, 8, source, destination, 1)
    assert torch.equal(destination.view(torch.int16), raw)
    assert pages.tolist() == [POISON]


def test_query_of_any_strides():
    regions, table, owners, indptr, _ = step(1, [5, 20, 9], 2, 3, 16)
    base = torch.randn(4, 3, 6, generator=generator(0)).bfloat16()
    for source in (
        base.permute(1, 2, 0),
        base.permute(1, 0, 2),
        base.permute(1, 0, 2)[:, ::2, ::3],
        base[:3].flip(0)[:, :1].expand(3, 5, 6),
    ):
        destination = torch.zeros(source.shape, dtype=source.dtype)
        pages = torch.zeros(int(indptr[-1]), dtype=torch.int32)
        sp.fill_prefill_pages(regions, table, owners, indptr, pages, 16, source, destination, 2)
        assert torch.equal(destination, source)


@pytest.mark.parametrize("owner", [-1, 7, INT32_MAX])
def test_owners_are_not_read_when_one_table_row_is_shared(owner):
    positions = [3, 40, 17]
    regions, table, _, indptr, query = step(2, positions, 1, 4, 16)
    owners = int32([owner] * 3)
    pages = torch.full((int(indptr[-1]),), POISON, dtype=torch.int32)
    sp.fill_prefill_pages(regions, table, owners, indptr, pages, 16, query, torch.empty_like(query), 2)
    assert torch.equal(pages, expected_pages(regions, table, owners, indptr, len(pages), 16, 2))


def test_padding_rows_take_no_pages():
    positions = [-1, 9, -1, -1, 30, -1]
    regions, table, owners, indptr, query = step(3, positions, 2, 4, 16)
    pages = torch.full((int(indptr[-1]) + 1,), POISON, dtype=torch.int32)
    sp.fill_prefill_pages(regions, table, owners, indptr, pages, 16, query, torch.empty_like(query), 2)
    assert torch.equal(pages, expected_pages(regions, table, owners, indptr, len(pages), 16, 2))


def test_table_entries_behind_a_rows_tokens_are_not_read():
    """Stale tails: huge or negative entries past the last region do not reach pages."""
    regions, table, owners, indptr, query = step(4, [15, 31], 2, 4, 16)
    table = torch.cat([table, int32([[-1, INT32_MAX], [INT32_MAX, -1]])], dim=1)
    pages = torch.full((int(indptr[-1]),), POISON, dtype=torch.int32)
    sp.fill_prefill_pages(regions, table, owners, indptr, pages, 16, query, torch.empty_like(query), 2)
    assert torch.equal(pages, expected_pages(regions, table, owners, indptr, len(pages), 16, 2))


@pytest.mark.parametrize("bad", [-1, -2, INT32_MAX, -(2**31), 10**6])
@pytest.mark.parametrize("where", ["region", "table", "owner", "all"])
def test_ids_of_bad_values_stay_inside_num_pages(bad, where):
    regions, table, owners, indptr, query = step(5, [30, 31, 32], 2, 4, 16)
    if where in ("region", "all"):
        regions[1] = bad
    if where in ("table", "all"):
        table[:] = bad
    if where in ("owner", "all"):
        owners[1] = bad
    storage = torch.full((int(indptr[-1]) + 20,), POISON, dtype=torch.int32)
    pages = storage[10:-10]
    destination = torch.zeros(query.shape, dtype=query.dtype)
    try:
        sp.fill_prefill_pages(regions, table, owners, indptr, pages, 16, query, destination, 2, num_pages=50)
    except ValueError as error:  # checked mode names the row
        assert "row" in str(error)
        return
    assert pages.min() >= 0 and pages.max() < 50
    assert (storage[:10] == POISON).all() and (storage[-10:] == POISON).all()
    if where == "region":
        good = expected_pages(regions[:1], table, owners[:1], indptr[:2], len(pages), 16, 2)[: int(indptr[1])]
        assert torch.equal(pages[: int(indptr[1])], good.clamp(0, 49))


@pytest.mark.parametrize(
    "indptr",
    [
        [0, 10**6, 12, 15],
        [-5, 2, 3, 4],
        [0, 4, 2, 8],
        [9, 5, 1, 0],
        [INT32_MAX] * 4,
        [-(2**31), INT32_MAX, 0, 0],
        [0, 100, 200, 300],
    ],
)
def test_bad_indptr_writes_nothing_outside_pages(indptr):
    regions, table, owners, _, query = step(6, [30, 31, 32], 2, 4, 16)
    storage = torch.full((300,), POISON, dtype=torch.int32)
    pages = storage[100:112]
    destination = torch.zeros(query.shape, dtype=query.dtype)
    try:
        sp.fill_prefill_pages(regions, table, owners, int32(indptr), pages, 16, query, destination, 2, num_pages=2000)
    except (ValueError, IndexError):
        pass
    assert (storage[:100] == POISON).all() and (storage[112:] == POISON).all()


def test_ids_past_2_gib_of_elements():
    """98,304-element blocks: a block id of 21,846 and more; page ids themselves fit int32, element offsets do not."""
    regions, owners = int32([[0, 7, -1]]), int32([0])
    table = int32([[21_846, 60_000], [0, 0]])
    pages = torch.zeros(2, dtype=torch.int32)
    query = torch.zeros(1, 1, 2).bfloat16()
    sp.fill_prefill_pages(regions, table, owners, int32([0, 2]), pages, 32, query, torch.empty_like(query), 48)
    assert pages.tolist() == [21_846 * 48, 60_000 * 48 + 3]


@pytest.mark.parametrize("rows", [0, 1, 513])
def test_row_counts(rows):
    positions = [(7 * r) % 90 - 1 for r in range(rows)]
    regions, table, owners, indptr, query = step(7, positions, 3, 4, 16)
    pages = torch.full((int(indptr[-1]),), POISON, dtype=torch.int32)
    destination = torch.zeros(query.shape, dtype=query.dtype)
    sp.fill_prefill_pages(regions, table, owners, indptr, pages, 16, query, destination, 2)
    assert torch.equal(pages, expected_pages(regions, table, owners, indptr, len(pages), 16, 2))
    assert torch.equal(destination, query)


def test_four_chunks_fill_what_one_call_fills():
    positions = list(range(40, 60))
    regions, table, owners, indptr, query = step(8, positions, 3, 4, 16)
    whole, parts = torch.zeros(int(indptr[-1]), dtype=torch.int32), torch.zeros(int(indptr[-1]), dtype=torch.int32)
    destination = torch.zeros_like(query)
    sp.fill_prefill_pages(regions, table, owners, indptr, whole, 16, query, torch.empty_like(query), 2)
    for first in range(0, 20, 5):
        part = slice(first, first + 5)
        sp.fill_prefill_pages(regions[part], table, owners[part], indptr, parts, 16, query[part], destination, 2, start=first)
    assert torch.equal(whole, parts) and torch.equal(destination, query)


def test_inputs_are_not_changed():
    regions, table, owners, indptr, query = step(9, [30, 31], 2, 4, 16)
    before = [t.clone() for t in (regions, table, owners, indptr, query)]
    sp.fill_prefill_pages(
        regions, table, owners, indptr, torch.zeros(8, dtype=torch.int32), 16, query, torch.empty_like(query), 2
    )
    assert all(torch.equal(a, b) for a, b in zip((regions, table, owners, indptr, query), before, strict=True))


# The owners a plan keeps


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 4))
def test_store_owners_writes_its_rows_only(n, start, more):
    storage = torch.full((start + n + more + 8,), POISON, dtype=torch.int32)
    kept = storage[4 : 4 + start + n + more]
    owners = torch.arange(n, dtype=torch.int32) + 50
    OPS.store_owners(owners, kept, start)
    expected = [POISON] * (4 + start) + owners.tolist() + [POISON] * (more + 4)
    assert storage.tolist() == expected


@pytest.mark.parametrize("start", [-1, 3, 10**9, -(10**9)])
def test_store_owners_past_the_kept_rows_is_refused(start):
    storage = torch.full((20,), POISON, dtype=torch.int32)
    with pytest.raises(ValueError, match="start|kept|owners"):
        OPS.store_owners(int32([1, 2]), storage[8:12], start)
    assert (storage == POISON).all()
