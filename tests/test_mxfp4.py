import pytest
import reference as ref
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import GOLDEN, generator, random_bytes, strided_rows

import sparse_prefill as sp

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def assert_same_code(actual, expected):
    (packed, scale), (packed_expected, scale_expected) = actual, expected
    assert packed.dtype == scale.dtype == torch.uint8
    assert packed.shape == packed_expected.shape and scale.shape == scale_expected.shape
    assert torch.equal(scale, scale_expected)
    assert torch.equal(ref.without_negative_zero(packed), ref.without_negative_zero(packed_expected))


@pytest.mark.parametrize("amax, byte", GOLDEN["scale_byte"])
def test_golden_scale_byte(amax, byte):
    x = torch.zeros(1, 128)
    x[0, 3] = amax
    _, scale = sp.quantize_mxfp4(x)
    assert scale[0].tolist() == [byte, 1, 1, 1]
    _, scale = sp.quantize_mxfp4(-x)
    assert scale[0, 0] == byte


def test_golden_encode():
    cases = GOLDEN["encode"]
    for x, packed, scale in zip(cases["x"], cases["packed"], cases["scale"], strict=True):
        values = torch.frombuffer(bytearray(bytes.fromhex(x)), dtype=torch.float32)
        expected = (
            torch.tensor(list(bytes.fromhex(packed)), dtype=torch.uint8),
            torch.tensor(list(bytes.fromhex(scale)), dtype=torch.uint8),
        )
        assert_same_code(sp.quantize_mxfp4(values[None]), (expected[0][None], expected[1][None]))
        assert_same_code(sp.quantize_mxfp4(values[None].bfloat16()), (expected[0][None], expected[1][None]))
        assert_same_code(ref.quantize_mxfp4(values), expected)


def test_golden_e2m1_values():
    packed = torch.arange(64, dtype=torch.uint8)[None]
    packed[0, :16] = torch.arange(16, dtype=torch.uint8) | (torch.arange(16, dtype=torch.uint8) << 4)
    values = sp.dequantize_mxfp4(packed, torch.full((1, 4), 127, dtype=torch.uint8))
    expected = torch.tensor(GOLDEN["e2m1_values"])
    assert torch.equal(values[0, :32:2].view(torch.int32), expected.view(torch.int32))
    assert torch.equal(values[0, 1:32:2].view(torch.int32), expected.view(torch.int32))


@given(
    st.integers(0, 2**32),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 5), max_size=3),
    st.integers(-130, 126),
    st.integers(0, 30),
)
def test_quantize_is_the_reference(seed, dtype, lead, exponent, spread):
    gen = generator(seed)
    octaves = exponent + spread * torch.rand(*lead, 4, 1, generator=gen)
    x = (torch.randn(*lead, 4, 32, generator=gen) * torch.exp2(octaves)).reshape(*lead, 128)
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    assert_same_code(sp.quantize_mxfp4(x), ref.quantize_mxfp4(x))


@given(st.integers(0, 2**32), st.sampled_from(DTYPES), st.integers(-20, 10))
def test_quantize_rounds_ties_to_even(seed, dtype, exponent):
    gen = generator(seed)
    quarters = torch.randint(-24, 25, (6, 128), generator=gen)
    quarters[:, ::32] = 24  # pins every group's scale, so that quarters of it are exact ties
    x = (quarters / 4 * 2.0**exponent).to(dtype)
    assert_same_code(sp.quantize_mxfp4(x), ref.quantize_mxfp4(x))


def test_quantize_every_finite_bfloat16_as_the_largest_of_a_group():
    gen = generator(0)
    largest = torch.arange(0, 0x7F80, dtype=torch.int16).view(torch.bfloat16).reshape(-1, 4, 1)
    x = (largest.double() * torch.rand(*largest.shape[:2], 32, generator=gen)).bfloat16()
    x = x * torch.where(torch.rand(x.shape, generator=gen) < 0.5, -1, 1).bfloat16()
    x[..., 5:6] = largest
    x = x.reshape(-1, 128)
    packed, scale = sp.quantize_mxfp4(x)
    assert_same_code((packed, scale), ref.quantize_mxfp4(x))
    assert scale.min() == 1 and scale.max() == 253
    # No element saturates: half a step above the largest code would be 7.
    decoded = ref.decode_mxfp4(packed, scale)
    step = 2.0 ** (scale.double().numpy().repeat(32, axis=-1) - 127)
    assert (abs(decoded - x.double().numpy()) <= step).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_group_stores_nan_scale_and_zero_elements(dtype, value):
    x = torch.randn(3, 128, generator=generator(1)).to(dtype)
    x[1, 40] = value
    packed, scale = sp.quantize_mxfp4(x)
    assert scale[1, 1] == 255
    assert not (packed[1, 16:32] & 0x77).any()
    assert_same_code((packed, scale), ref.quantize_mxfp4(x))


@pytest.mark.parametrize("shape", [(0, 128), (128,), (2, 0, 128), (3, 5, 128)])
def test_quantize_any_leading_shape(shape):
    x = torch.randn(shape, generator=generator(2))
    assert_same_code(sp.quantize_mxfp4(x), ref.quantize_mxfp4(x))


def test_quantize_strided_input():
    x = torch.randn(6, 128, generator=generator(3)).bfloat16()
    assert_same_code(sp.quantize_mxfp4(strided_rows(x, 9, 5)), ref.quantize_mxfp4(x))
    columns = torch.randn(128, 6, generator=generator(4)).T
    assert_same_code(sp.quantize_mxfp4(columns), ref.quantize_mxfp4(columns))


def test_dequantize_every_byte_under_every_scale():
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8).reshape(4, 64).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat_interleave(4)[:, None].expand(-1, 4)
    values = sp.dequantize_mxfp4(packed, scale)
    expected = torch.from_numpy(ref.decode_mxfp4(packed, scale)).float()
    assert values.dtype == torch.float32 and values.shape == (1024, 128)
    finite = ~expected.isnan()
    assert torch.equal(values.isnan(), ~finite)
    assert torch.equal(values[finite].view(torch.int32), expected[finite].view(torch.int32))


@given(st.integers(0, 2**32), st.lists(st.integers(0, 4), max_size=3))
def test_dequantize_is_the_reference(seed, lead):
    gen = generator(seed)
    packed, scale = random_bytes(gen, *lead, 64), random_bytes(gen, *lead, 4, high=255)
    assert torch.equal(sp.dequantize_mxfp4(packed, scale), torch.from_numpy(ref.decode_mxfp4(packed, scale)).float())


def test_codes_survive_a_round_trip():
    gen = generator(5)
    x = torch.randn(8, 128, generator=gen)
    packed, scale = sp.quantize_mxfp4(x)
    again = sp.quantize_mxfp4(sp.dequantize_mxfp4(packed, scale))
    values = sp.dequantize_mxfp4(*again)
    assert torch.equal(values, sp.dequantize_mxfp4(packed, scale))
