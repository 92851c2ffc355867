import numpy as np
import pytest
import reference as ref
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import INT32_MAX, generator, golden_case, int32, random_keys, random_query, strided_rows, windows

import sparse_prefill as sp

# Largest error over the logit's magnitude (the sum of the absolute products).
TOLERANCES = {"exact": 2e-6, "fast": 5e-4}


def assert_scores(actual, q, q_scale, payload, scales, weights, ks, ke, weight_scale, precision="exact"):
    """Within the tolerance of the float64 reference; -inf exactly outside the windows."""
    assert actual.dtype == torch.float32
    expected, magnitude = ref.score_keys(q, q_scale, payload, scales, weights, ks, ke, weight_scale, actual.shape[1])
    actual = actual.numpy().astype(np.float64)
    assert actual.shape == expected.shape
    outside = expected == -np.inf
    assert (actual[outside] == -np.inf).all()
    nan = np.isnan(expected)
    assert np.isnan(actual[nan]).all()
    # Products below the smallest fp32 denormal vanish: a floor of as many of them as were added.
    floor = 2.0**-149 * (128 + np.abs(weights.double().numpy() * weight_scale).sum(axis=1, keepdims=True) * 129)
    inside = ~outside & ~nan
    error = np.abs(actual - expected)
    limit = TOLERANCES[precision] * magnitude + floor
    assert (error[inside] <= limit[inside]).all(), (error[inside] / limit[inside]).max()


def random_case(seed, rows, heads, total, weight_dtype=torch.float32, scale_range=(120, 132)):
    gen = generator(seed)
    q, q_scale = random_query(gen, rows, heads, scale_range)
    payload, scales = ref.pages_of_keys(random_keys(gen, total, scale_range), total)
    weights = torch.randn(rows, heads, generator=gen).to(weight_dtype)
    ks, ke = windows(gen, rows, total)
    return q, q_scale, payload, scales, weights, ks, ke


def test_golden_logits():
    q, q_scale, keys, weights, ks, ke, weight_scale, expected = golden_case()
    payload, scales = ref.pages_of_keys(keys, len(keys))
    reference, magnitude = ref.score_keys(q, q_scale, payload, scales, weights, ks, ke, weight_scale, len(keys))
    inside = reference != -np.inf
    assert (np.abs(reference - expected.double().numpy())[inside] <= 2e-6 * magnitude[inside]).all()
    for dtype in (torch.float32, torch.bfloat16):
        actual = sp.score_keys((q, q_scale), payload, scales, weights.to(dtype), ks, ke, len(keys), weight_scale=weight_scale)
        assert_scores(actual, q, q_scale, payload, scales, weights.to(dtype), ks, ke, weight_scale)


@given(
    st.integers(0, 2**32),
    st.sampled_from([0, 1, 2, 5, 17]),
    st.sampled_from([1, 3, 9, 16, 33]),
    st.sampled_from([0, 1, 63, 64, 65, 130]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([1.0, 0.015625, -0.3, 0.0]),
)
def test_scores_are_the_reference(seed, rows, heads, total, weight_dtype, weight_scale):
    q, q_scale, payload, scales, weights, ks, ke = random_case(seed, rows, heads, total, weight_dtype)
    actual = sp.score_keys((q, q_scale), payload, scales, weights, ks, ke, total, weight_scale=weight_scale)
    assert_scores(actual, q, q_scale, payload, scales, weights, ks, ke, weight_scale)


@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 4, 9]),
    st.sampled_from([1, 3, 32]),
    st.sampled_from([1, 65, 130]),
    st.integers(75, 170),
)
def test_fast_scores_are_within_their_tolerance(seed, rows, heads, total, middle):
    """Groups of one token span at most 14 octaves."""
    case = random_case(seed, rows, heads, total, scale_range=(middle - 7, middle + 7))
    q, q_scale, payload, scales, weights, ks, ke = case
    actual = sp.score_keys((q, q_scale), payload, scales, weights, ks, ke, total, weight_scale=0.5, precision="fast")
    assert_scores(actual, q, q_scale, payload, scales, weights, ks, ke, 0.5, "fast")


@given(st.integers(0, 2**32), st.sampled_from([torch.bfloat16, torch.float16]), st.sampled_from([1, 3, 32]))
def test_a_plain_query_is_quantized_first(seed, dtype, heads):
    gen = generator(seed)
    _, _, payload, scales, _, ks, ke = random_case(seed, 3, 1, 65)
    q = torch.randn(3, heads, 128, generator=gen).to(dtype)
    weights = torch.randn(3, heads, generator=gen)
    packed, scale = ref.quantize_mxfp4(q)
    actual = sp.score_keys(q, payload, scales, weights, ks, ke, 65)
    assert_scores(actual, packed, scale, payload, scales, weights, ks, ke, 1.0)
    assert torch.equal(actual, sp.score_keys((packed, scale), payload, scales, weights, ks, ke, 65))
    assert torch.equal(actual, sp.score_keys(strided_rows(q, 24, 8), payload, scales, weights, ks, ke, 65))


def test_without_total_keys_every_staged_column_is_returned():
    q, q_scale, payload, scales, weights, ks, ke = random_case(1, 4, 2, 70)
    whole = sp.score_keys((q, q_scale), payload, scales, weights, ks, ke)
    assert whole.shape == (4, 128)
    assert (whole[:, 70:] == float("-inf")).all()
    assert torch.equal(whole[:, :70], sp.score_keys((q, q_scale), payload, scales, weights, ks, ke, 70))


def test_logit_bits_depend_on_row_and_key_alone():
    """256 rows by 4,096 keys, scales over 12 octaves: any split of rows and keys, any window, the same bits."""
    rows, heads, total = 256, 4, 4096
    gen = generator(11)
    q, q_scale = random_query(gen, rows, heads, (121, 132))
    keys = random_keys(gen, total, (121, 132))
    weights = torch.randn(rows, heads, generator=gen)
    columns = torch.arange(64)
    swizzled = torch.tensor([ref.scale_column(c) for c in range(64)])

    def pages(keys):
        """Vectorized twin of reference.pages_of_keys for whole pages."""
        payload = keys[:, :64].reshape(-1, 64, 4, 16).transpose(1, 2)[:, None].contiguous()
        scales = torch.empty(len(keys) // 64, 1, 4, 64, dtype=torch.uint8)
        scales[..., swizzled] = keys[:, 64:].reshape(-1, 64, 4).transpose(1, 2)[:, None]
        return payload, scales

    small = pages(keys[:128])
    for a, e in zip(small, ref.pages_of_keys(keys[:128], 128), strict=True):
        assert torch.equal(a, e)
    assert len(columns) == 64

    def score(some_rows, some_keys, lo, hi):
        n = len(some_rows)
        return sp.score_keys(
            (q[some_rows], q_scale[some_rows]),
            *pages(keys[some_keys]),
            weights[some_rows],
            torch.full((n,), lo, dtype=torch.int32),
            torch.full((n,), hi, dtype=torch.int32),
            weight_scale=0.37,
        )

    every = torch.arange(rows)
    whole = score(every, torch.arange(total), 0, total)
    assert torch.equal(whole, score(every, torch.arange(total), 0, total))
    for _ in range(12):
        some_rows = torch.randperm(rows, generator=gen)[: int(torch.randint(1, 40, (1,), generator=gen))]
        count = 64 * int(torch.randint(1, 20, (1,), generator=gen))
        some_keys = torch.randperm(total, generator=gen)[:count]
        lo, hi = sorted(torch.randint(0, count + 1, (2,), generator=gen).tolist())
        part = score(some_rows, some_keys, lo, hi)
        assert torch.equal(part[:, lo:hi], whole[some_rows][:, some_keys[lo:hi]])
    for first in range(0, total, 1024):
        part = score(every[::3], torch.arange(first, first + 1024), 0, 1024)
        assert torch.equal(part, whole[::3, first : first + 1024])
    one = score(every[200:201], torch.arange(64), 0, 64)
    assert torch.equal(one, whole[200:201, :64])


def test_logit_bits_do_not_depend_on_the_number_of_threads():
    q, q_scale, payload, scales, weights, ks, ke = random_case(16, 300, 9, 1000, scale_range=(121, 132))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            results.append(sp.score_keys((q, q_scale), payload, scales, weights, ks, ke, 1000))
        finally:
            torch.set_num_threads(1)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("heads", [1, 9, 33])
def test_logit_bits_are_the_same_for_any_number_of_other_rows(heads):
    q, q_scale, payload, scales, weights, _, _ = random_case(3, 40, heads, 128, scale_range=(115, 135))
    ks, ke = torch.zeros(40, dtype=torch.int32), torch.full((40,), 128, dtype=torch.int32)
    whole = sp.score_keys((q, q_scale), payload, scales, weights, ks, ke)
    for first, last in [(0, 1), (39, 40), (3, 20), (17, 19)]:
        part = slice(first, last)
        again = sp.score_keys((q[part], q_scale[part]), payload, scales, weights[part], ks[part], ke[part])
        assert torch.equal(again, whole[part])


@pytest.mark.parametrize("byte", [0, 1, 252])
@pytest.mark.parametrize("of", ["query", "key"])
def test_extreme_scale_bytes_score_exactly(byte, of):
    """Down to 2^-127 (a denormal, not flushed on the CPU) and up to 2^125, the other side near 1."""
    q, q_scale, payload, scales, weights, ks, ke = random_case(4, 6, 3, 70, scale_range=(100, 104) if byte > 1 else (150, 160))
    (q_scale if of == "query" else scales)[:] = byte
    ks, ke = torch.zeros_like(ks), torch.full_like(ke, 70)
    actual = sp.score_keys((q, q_scale), payload, scales, weights, ks, ke, 70)
    assert_scores(actual, q, q_scale, payload, scales, weights, ks, ke, 1.0)
    assert actual.isfinite().all() and (actual != 0).any()


def test_one_extreme_group_beside_ordinary_ones():
    q, q_scale, payload, scales, weights, _, _ = random_case(5, 5, 2, 64)
    scales[0, 0, 1] = 0
    scales[0, 0, 3, :30] = 1
    q_scale[2, :, 0] = 0
    ks, ke = torch.zeros(5, dtype=torch.int32), torch.full((5,), 64, dtype=torch.int32)
    actual = sp.score_keys((q, q_scale), payload, scales, weights, ks, ke)
    assert_scores(actual, q, q_scale, payload, scales, weights, ks, ke, 1.0)


def test_tiny_dots_are_not_flushed():
    """2^-127 times 2^20: the products are normal numbers although the key is a denormal of bf16."""
    q = torch.full((1, 1, 64), 0x22, dtype=torch.uint8)  # 1.0 everywhere
    q_scale = torch.full((1, 1, 4), 147, dtype=torch.uint8)
    keys = torch.full((1, 68), 0x11, dtype=torch.uint8)  # 0.5 everywhere
    keys[:, 64:] = 0
    payload, scales = ref.pages_of_keys(keys, 1)
    one = torch.ones(1, 1)
    actual = sp.score_keys((q, q_scale), payload, scales, one, int32([0]), int32([1]), 1)
    assert actual.item() == 128 * 0.5 * 2.0 ** (20 - 127)


@pytest.mark.parametrize("of", ["query", "key"])
def test_scale_byte_255_makes_every_dot_it_enters_nan(of):
    q, q_scale, payload, scales, weights, _, _ = random_case(6, 5, 3, 70)
    ks, ke = torch.zeros(5, dtype=torch.int32), torch.full((5,), 70, dtype=torch.int32)
    clean = sp.score_keys((q, q_scale), payload, scales, weights, ks, ke, 70)
    expected = clean.clone()
    if of == "query":
        q_scale[2, 1, 3] = 255
        q[2, 1, 48:] = 0  # 0 * NaN is NaN as well
        expected[2] = float("nan")
    else:
        scales[0, 0, 2, ref.scale_column(37)] = 255
        payload[0, 0, 2, 37] = 0
        expected[:, 37] = float("nan")
    for weight in (1.0, -1.0, 0.0):
        actual = sp.score_keys((q, q_scale), payload, scales, weights * weight, ks, ke, 70)
        assert torch.equal(actual.isnan(), expected.isnan())
    actual = sp.score_keys((q, q_scale), payload, scales, weights, ks, ke, 70)
    assert torch.equal(torch.nan_to_num(actual, nan=7.0), torch.nan_to_num(expected, nan=7.0))
    ke = torch.full((5,), 30, dtype=torch.int32)
    narrow = sp.score_keys((q, q_scale), payload, scales, weights, ks, ke, 70)
    assert (narrow[:, 30:] == float("-inf")).all()


@pytest.mark.parametrize("byte", [253, 254, 255])
def test_largest_scale_bytes_touch_no_other_logit(byte):
    q, q_scale, payload, scales, weights, _, _ = random_case(7, 5, 3, 128)
    ks, ke = torch.zeros(5, dtype=torch.int32), torch.full((5,), 128, dtype=torch.int32)
    clean = sp.score_keys((q, q_scale), payload, scales, weights, ks, ke)
    scales[1, 0, :, ref.scale_column(9)] = byte
    q_scale[3, 0] = byte
    actual = sp.score_keys((q, q_scale), payload, scales, weights, ks, ke)
    others = torch.ones(5, 128, dtype=torch.bool)
    others[3] = False
    others[:, 64 + 9] = False
    assert torch.equal(actual[others], clean[others])


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_every_pair_of_scale_bytes_returns(precision):
    rows = torch.arange(256, dtype=torch.int32)
    q = torch.full((256, 1, 64), 0x77, dtype=torch.uint8)
    q_scale = rows.to(torch.uint8)[:, None, None].expand(256, 1, 4).contiguous()
    keys = torch.full((256, 68), 0x77, dtype=torch.uint8)
    keys[:, 64:] = rows.to(torch.uint8)[:, None]
    payload, scales = ref.pages_of_keys(keys, 256)
    ks, ke = torch.zeros(256, dtype=torch.int32), torch.full((256,), 256, dtype=torch.int32)
    weights = torch.ones(256, 1)
    actual = sp.score_keys((q, q_scale), payload, scales, weights, ks, ke, precision=precision)
    exponent = rows[:, None] + rows[None, :] - 254
    exact = 128 * 36 * torch.exp2(exponent.double())
    settled = (exact < 2.0**127) & (exact > 2.0**-126) & (rows[:, None] <= 252) & (rows[None, :] <= 252)
    assert ((actual.double() - exact).abs()[settled] <= TOLERANCES[precision] * exact[settled]).all()
    # Byte 255 is NaN; whatever else overflows is infinite (or NaN), never a wrong finite number.
    assert actual[255].isnan().all() and actual[:, 255].isnan().all()
    overflow = exact[:255, :255] >= 2.0**128
    assert not actual[:255, :255][overflow].isfinite().any()


def test_relu_comes_before_the_weight():
    """A negative dot contributes nothing, whatever the weight; a negative weight keeps its sign."""
    keys = torch.zeros(2, 68, dtype=torch.uint8)
    keys[0, :64] = 0x22
    keys[1, :64] = 0xAA  # -1.0 everywhere
    keys[:, 64:] = 127
    payload, scales = ref.pages_of_keys(keys, 2)
    q = torch.full((1, 2, 64), 0x22, dtype=torch.uint8)
    q[0, 1] = 0xAA
    q_scale = torch.full((1, 2, 4), 127, dtype=torch.uint8)
    weights = torch.tensor([[-2.0, 0.5]])
    actual = sp.score_keys((q, q_scale), payload, scales, weights, int32([0]), int32([2]), 2)
    assert actual.tolist() == [[-256.0, 64.0]]


def test_windows_of_several_requests_in_one_list():
    q, q_scale, payload, scales, weights, _, _ = random_case(8, 6, 2, 130)
    ks, ke = int32([0, 0, 63, 63, 64, 130]), int32([63, 0, 64, 63, 130, 130])
    actual = sp.score_keys((q, q_scale), payload, scales, weights, ks, ke, 130)
    assert_scores(actual, q, q_scale, payload, scales, weights, ks, ke, 1.0)


@pytest.mark.parametrize("ks, ke", [(-5, 10), (0, INT32_MAX), (-(2**31), INT32_MAX), (64, 10), (500, 600)])
def test_windows_outside_the_keys_are_memory_safe(ks, ke):
    q, q_scale, payload, scales, weights, _, _ = random_case(9, 3, 2, 64)
    try:
        actual = sp.score_keys((q, q_scale), payload, scales, weights, int32([ks] * 3), int32([ke] * 3))
    except (ValueError, IndexError):
        return
    column = torch.arange(64)
    inside = (column >= ks) & (column < ke)
    assert (actual[:, ~inside] == float("-inf")).all()
    assert actual[:, inside].isfinite().all()


def test_undefined_bytes_past_the_keys_do_not_matter():
    q, q_scale, payload, scales, weights, ks, ke = random_case(10, 5, 3, 70)
    first = sp.score_keys((q, q_scale), payload, scales, weights, ks, ke, 70)
    payload[1, 0, :, 6:] = 0x7F
    for row in range(6, 64):
        scales[1, 0, :, ref.scale_column(row)] = 255
    assert torch.equal(sp.score_keys((q, q_scale), payload, scales, weights, ks, ke, 70), first)


@pytest.mark.parametrize("rows, heads, total", [(0, 2, 64), (3, 2, 0), (0, 1, 0)])
def test_zero_sizes(rows, heads, total):
    q, q_scale, payload, scales, weights, ks, ke = random_case(12, rows, heads, total)
    assert sp.score_keys((q, q_scale), payload, scales, weights, ks, ke, total).shape == (rows, total)


def test_more_rows_than_any_tile():
    q, q_scale, payload, scales, weights, _, _ = random_case(13, 513, 1, 64)
    ks, ke = torch.zeros(513, dtype=torch.int32), torch.full((513,), 64, dtype=torch.int32)
    actual = sp.score_keys((q, q_scale), payload, scales, weights, ks, ke)
    assert_scores(actual, q, q_scale, payload, scales, weights, ks, ke, 1.0)


def test_strided_inputs():
    q, q_scale, payload, scales, weights, ks, ke = random_case(14, 6, 3, 130)
    expected = sp.score_keys((q, q_scale), payload, scales, weights, ks, ke, 130)
    wide = torch.zeros(6, 2, 3, 64, dtype=torch.uint8)
    wide[:, 1] = q
    wide_scale = torch.full((6, 3, 2, 4), 255, dtype=torch.uint8)
    wide_scale[:, :, 0] = q_scale
    actual = sp.score_keys(
        (wide[:, 1], wide_scale[:, :, 0]), payload, scales, strided_rows(weights, 5, 1, fill=float("nan")), ks, ke, 130
    )
    assert torch.equal(actual, expected)


def test_inputs_are_not_changed():
    case = random_case(15, 4, 3, 70)
    before = [t.clone() for t in case]
    q, q_scale, *rest = case
    sp.score_keys((q, q_scale), *rest, 70)
    assert all(torch.equal(a, b) for a, b in zip(case, before, strict=True))
