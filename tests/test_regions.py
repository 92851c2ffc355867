import pytest
import reference as ref
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import GOLDEN, generator, int32, strided_rows

import sparse_prefill as sp

POSITIONS = st.lists(
    st.one_of(st.integers(-1, 100), st.sampled_from([-1, 7, 8, 4095, 4103, 4104, 10**6, 2**31 - 9])), max_size=20
)


def selection(positions, k, gen):
    """What an indexer returns for candidates 0 .. pos//8 - 1: ascending, distinct, padded with -1."""
    selected = torch.full((len(positions), k), -1, dtype=torch.int32)
    for r, position in enumerate(positions):
        own = max(position // 8, 0)
        n = min(own, k)
        if own > 10_000:
            selected[r, :n] = torch.arange(n, dtype=torch.int32) * (own // max(k, 1))
        elif n:
            selected[r, :n] = torch.randperm(own, generator=gen)[:n].sort().values.to(torch.int32)
    return selected


@given(
    st.integers(0, 2**32),
    POSITIONS,
    st.sampled_from([0, 1, 3, 16]),
    st.sampled_from([torch.int32, torch.int64]),
    st.integers(0, 4),
)
def test_own_region_is_appended_as_in_the_reference(seed, positions, k, dtype, pad):
    selected = selection(positions, k, generator(seed))
    before = selected.clone()
    regions = sp.append_own_region(strided_rows(selected, pad, pad, fill=-5), torch.tensor(positions, dtype=dtype))
    assert regions.dtype == torch.int32 and regions.shape == (len(positions), k + 1) and regions.is_contiguous()
    assert torch.equal(regions, ref.append_own_region(selected, torch.tensor(positions)))
    assert torch.equal(selected, before)


@pytest.mark.parametrize("residue", range(8))
@pytest.mark.parametrize("own", [0, 1, 3, 4, 5, 90])
def test_own_region_is_last_for_every_residue(residue, own):
    k, position = 4, 8 * own + residue
    selected = selection([position], k, generator(own))
    regions = sp.append_own_region(selected, torch.tensor([position]))[0].tolist()
    at = min(own, k)
    assert regions[at] == own and regions[at + 1 :] == [-1] * (k - at)
    assert regions[:at] == selected[0, :at].tolist() and len(set(regions[: at + 1])) == at + 1


def test_padding_rows_have_no_regions():
    selected = int32([[-1, -1], [0, 1], [-1, -1]])
    assert sp.append_own_region(selected, torch.tensor([-1, 17, -1])).tolist() == [[-1] * 3, [0, 1, 2], [-1] * 3]


def test_a_padding_rows_selection_is_not_looked_at():
    selected = int32([[5, 6], [0, 1]])
    assert sp.append_own_region(selected, torch.tensor([-1, 16])).tolist() == [[-1] * 3, [0, 1, 2]]


@pytest.mark.parametrize("position", [-2, -9, -(2**31), 2**31 - 1])
def test_any_position_is_memory_safe(position):
    try:
        regions = sp.append_own_region(int32([[0, 1], [0, 1]]), torch.tensor([position, 20]))
    except (ValueError, IndexError):
        return
    assert regions.shape == (2, 3) and regions[1].tolist() == [0, 1, 2]


# Counts, indptr and last_page_len: on the host ...


@pytest.mark.parametrize("case", GOLDEN["compact_page_metadata"], ids=lambda case: f"region_count={case['region_count']}")
@pytest.mark.parametrize("kind", ["list", "tuple", torch.int32, torch.int64])
def test_golden_compact_page_metadata(case, kind):
    positions = case["positions"]
    positions = (
        torch.tensor(positions, dtype=kind) if isinstance(kind, torch.dtype) else {"list": list, "tuple": tuple}[kind](positions)
    )
    indptr, last_page_len = sp.compact_page_metadata(positions, case["region_count"])
    for tensor, expected in ((indptr, case["indptr"]), (last_page_len, case["last_page_len"])):
        assert tensor.dtype == torch.int32 and tensor.device.type == "cpu" and tensor.tolist() == expected
    expected = ref.compact_page_metadata(case["positions"], case["region_count"])
    assert expected == (case["indptr"], case["last_page_len"])


@given(POSITIONS, st.sampled_from([1, 2, 4, 65, 513]))
def test_compact_page_metadata_is_the_reference(positions, region_count):
    indptr, last_page_len = sp.compact_page_metadata(torch.tensor(positions, dtype=torch.int64), region_count)
    assert (indptr.tolist(), last_page_len.tolist()) == ref.compact_page_metadata(positions, region_count)


def test_no_rows():
    indptr, last_page_len = sp.compact_page_metadata([], 4)
    assert indptr.tolist() == [0] and last_page_len.tolist() == []
    assert sp.append_own_region(torch.zeros(0, 3, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)).shape == (0, 4)


# ... and on the device


@given(POSITIONS, st.sampled_from([1, 2, 4, 513]), st.integers(0, 5), st.sampled_from([torch.int32, torch.int64]))
def test_fixup_is_the_reference_and_empties_the_rows_past_the_last(positions, region_count, more, dtype):
    n = len(positions)
    indptr = torch.full((n + 1 + more,), -77, dtype=torch.int32)
    last_page_len = torch.full((n + more,), -77, dtype=torch.int32)
    assert sp.fixup_positions(torch.tensor(positions, dtype=dtype), indptr, last_page_len, region_count) is None
    expected_indptr, expected_last = ref.compact_page_metadata(positions, region_count)
    assert indptr.tolist() == expected_indptr + [expected_indptr[-1]] * more
    assert last_page_len.tolist() == expected_last + [8] * more


def test_fixup_writes_nothing_beside_its_buffers():
    storage = torch.full((40,), -77, dtype=torch.int32)
    indptr, last_page_len = storage[5:12], storage[20:26]
    sp.fixup_positions(torch.tensor([3, -1, 30]), indptr, last_page_len, 3)
    assert indptr.tolist() == [0, 1, 1, 4, 4, 4, 4] and last_page_len.tolist() == [4, 8, 7, 8, 8, 8]
    assert (storage[:5] == -77).all() and (storage[12:20] == -77).all() and (storage[26:] == -77).all()


def test_exact_positions_below_their_bounds_take_fewer_pages():
    bounds, exact = [40, 41, 42], [3, -1, 42]
    indptr, last_page_len = sp.compact_page_metadata(bounds, 4)
    sp.fixup_positions(torch.tensor(exact), indptr, last_page_len, 4)
    assert (indptr.tolist(), last_page_len.tolist()) == ref.compact_page_metadata(exact, 4)
