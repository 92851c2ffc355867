import math

import pytest
import reference as ref
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import GOLDEN, INT32_MAX, generator, golden_case, int32, strided_rows, windows

import sparse_prefill as sp

VALUES = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0, 2.0, 2.0, 1e-45, 3e38, -3e38]


def assert_selected(logits, ks, ke, k, keep_first=0, keep_last=0):
    actual = sp.select_keys(logits, ks, ke, k, keep_first=keep_first, keep_last=keep_last)
    expected = ref.select_keys(logits, ks, ke, k, keep_first, keep_last)
    assert actual.dtype == torch.int32 and actual.shape == expected.shape
    assert torch.equal(actual, expected)
    return actual


@pytest.mark.parametrize("case", GOLDEN["select"], ids=str)
def test_golden_selection(case):
    row = torch.tensor([[math.nan if v is None else v for v in case["row"]]], dtype=torch.float32)
    actual = assert_selected(row, int32([case["lo"]]), int32([case["hi"]]), case["k"])
    assert actual[0].tolist() == case["selected"]


def test_golden_selection_of_the_golden_logits():
    *_, ks, ke, _, logits = golden_case()
    assert assert_selected(logits, ks, ke, 3).tolist() == GOLDEN["logits"]["selected_top3"]


@given(
    st.integers(0, 2**32),
    st.sampled_from([0, 1, 2, 9]),
    st.sampled_from([0, 1, 5, 64, 130, 400]),
    st.sampled_from([1, 2, 7, 64, 200]),
    st.sampled_from(["normal", "ties", "special", "equal", "ascending", "descending"]),
    st.data(),
)
def test_selection_is_the_reference(seed, rows, total, k, kind, data):
    gen = generator(seed)
    logits = {
        "normal": lambda: torch.randn(rows, total, generator=gen),
        "ties": lambda: torch.randint(-2, 3, (rows, total), generator=gen).float(),
        "special": lambda: torch.tensor(VALUES)[torch.randint(0, len(VALUES), (rows, total), generator=gen)],
        "equal": lambda: torch.full((rows, total), 0.25),
        "ascending": lambda: torch.arange(total).float().expand(rows, total).contiguous(),
        "descending": lambda: -torch.arange(total).float().expand(rows, total).contiguous(),
    }[kind]()
    ks, ke = windows(gen, rows, total)
    keep_first = data.draw(st.integers(0, k))
    keep_last = data.draw(st.integers(0, k - keep_first))
    outside = (torch.arange(total) < ks[:, None]) | (torch.arange(total) >= ke[:, None])
    logits = logits.masked_fill(
        outside, float("nan") if seed % 2 else float("inf")
    )  # columns outside a window are never looked at
    assert_selected(logits, ks, ke, k)
    assert_selected(logits, ks, ke, k, keep_first, keep_last)


@given(st.integers(0, 2**32), st.integers(0, 100), st.integers(0, 9))
def test_any_row_stride_and_offset(seed, pad, offset):
    gen = generator(seed)
    logits = torch.randint(-3, 4, (5, 70), generator=gen).float()
    ks, ke = windows(gen, 5, 70)
    assert_selected(strided_rows(logits, pad, offset, fill=float("inf")), ks, ke, 6)


@pytest.mark.parametrize("n", [0, 1, 4, 5, 6])
def test_a_row_with_at_most_k_keys_gets_all_of_them(n):
    logits = torch.full((1, 20), float("nan"))
    actual = assert_selected(logits, int32([7]), int32([7 + n]), 5)
    assert actual[0].tolist()[: min(n, 5)] == list(range(min(n, 5)))


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 12))
def test_minus_infinity_and_nan_are_equal_and_prefer_the_smaller_index(seed, n, k):
    lowest = torch.tensor([float("nan"), float("-inf")])
    logits = lowest[torch.randint(0, 2, (1, n), generator=generator(seed))]
    actual = assert_selected(logits, int32([0]), int32([n]), k)
    assert actual[0].tolist() == list(range(min(n, k))) + [-1] * (k - min(n, k))


def test_nan_with_any_sign_and_payload_counts_as_minus_infinity():
    raw = torch.tensor([[0x7FC00000, 0x7F800001, 0x7FFFFFFF, -0x400000, -1, -0x7FFFFF]], dtype=torch.int32)
    nans = raw.view(torch.float32)
    assert nans.isnan().all()
    logits = torch.cat([nans, torch.tensor([[-3e38, -1.0, float("-inf")]])], dim=1)
    assert assert_selected(logits, int32([0]), int32([9]), 3)[0].tolist() == [0, 6, 7]


def test_zeros_of_both_signs_are_equal():
    logits = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -0.0]])
    assert assert_selected(logits, int32([0]), int32([5]), 2)[0].tolist() == [0, 1]
    assert assert_selected(-logits, int32([0]), int32([5]), 3)[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("k", [512, 1024, 2048])
def test_equal_scores_at_the_cut_are_the_same_on_every_run(k):
    gen = generator(k)
    logits = torch.randint(0, 3, (4, 5000), generator=gen).float()
    ks, ke = int32([0, 1, 100, 4000]), int32([5000, 4999, 3000, 5000])
    first = assert_selected(logits, ks, ke, k)
    for _ in range(3):
        assert torch.equal(first, sp.select_keys(logits, ks, ke, k))
    for r in range(4):
        assert torch.equal(first[r : r + 1], sp.select_keys(logits[r : r + 1], ks[r : r + 1], ke[r : r + 1], k))


@pytest.mark.parametrize("keep_first, keep_last", [(0, 0), (1, 0), (0, 1), (3, 2), (5, 0), (0, 5)])
def test_kept_columns_count_within_k(keep_first, keep_last):
    logits = torch.arange(60).float().roll(30)[None].repeat(8, 1)
    logits[1] = float("nan")
    logits[2] = -logits[2]
    ks = int32([0, 0, 0, 5, 5, 5, 5, 60])
    ke = int32([60, 60, 60, 60, 11, 10, 9, 60])
    actual = assert_selected(logits, ks, ke, 5, keep_first, keep_last)
    assert set(range(keep_first)) <= set(actual[0].tolist())
    assert set(range(60 - keep_last, 60)) <= set(actual[0].tolist())


def test_nothing_before_a_windows_start_is_selected():
    """Resumed and fresh requests in one list, and an empty window: indices are the row's own and within its count."""
    logits = torch.full((4, 100), 5.0)
    ks, ke = int32([0, 40, 40, 99]), int32([40, 40, 47, 100])
    logits[:, :40] = 100.0
    actual = assert_selected(logits, ks, ke, 10)
    assert actual.min() >= -1 and (actual < (ke - ks)[:, None]).all()


@pytest.mark.parametrize("ks, ke", [(-5, 10), (0, INT32_MAX), (-(2**31), INT32_MAX), (50, 10), (500, 600), (INT32_MAX, -(2**31))])
def test_windows_outside_the_columns_are_memory_safe(ks, ke):
    logits = torch.randn(3, 64, generator=generator(0))
    ks, ke = int32([0, ks, 3]), int32([64, ke, 60])
    try:
        actual = sp.select_keys(logits, ks, ke, 8)
    except (ValueError, IndexError):
        return
    good = torch.tensor([0, 2])
    assert torch.equal(actual[good], ref.select_keys(logits[good], ks[good], ke[good], 8))
    assert actual[1].min() >= -1 and actual[1].max() < 64


def test_last_row_of_a_matrix_of_more_than_2_gib():
    """Row offsets are 64-bit: the second row starts 2^31 + 256 bytes in."""
    storage = torch.empty(2**29 + 64 + 70)
    logits = storage.as_strided((2, 70), (2**29 + 64, 1))
    logits.copy_(torch.randn(2, 70, generator=generator(1)))
    assert_selected(logits, int32([0, 3]), int32([70, 70]), 9)


@pytest.mark.parametrize("rows, total, k", [(0, 10, 3), (3, 0, 3), (0, 0, 1), (2, 5, 1)])
def test_zero_sizes(rows, total, k):
    logits = torch.zeros(rows, total)
    ks = torch.zeros(rows, dtype=torch.int32)
    assert_selected(logits, ks, ks + total, k)


def test_more_rows_than_any_tile():
    logits = torch.randint(0, 5, (513, 40), generator=generator(2)).float()
    ks = torch.zeros(513, dtype=torch.int32)
    assert_selected(logits, ks, ks + 40, 7)


def test_logits_are_not_changed():
    logits = torch.tensor([[1.0, float("nan"), 2.0, -0.0]])
    before = logits.clone()
    sp.select_keys(logits, int32([0]), int32([4]), 2)
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
