import pytest
import reference as ref
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import GOLDEN, generator, index_cache, random_bytes, strided_rows

import sparse_prefill as sp

STRIDES = (4352, 4353, 4360, 4368, 8192, 13056)


def assert_stored(actual, expected, slots, cache):
    """Whole storages: what no key owns is untouched, payload bytes of written keys compare up to the sign of zero."""
    written = torch.zeros_like(ref.storage_bytes(cache))
    mask = written.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    for slot in slots:
        if slot >= 0:
            ref.write_key(mask, slot // 64, slot % 64, torch.tensor([1] * 64 + [2] * 4, dtype=torch.uint8))
    actual, expected = ref.storage_bytes(actual), ref.storage_bytes(expected)
    payload = written == 1
    assert torch.equal(actual[~payload], expected[~payload])
    assert torch.equal(ref.without_negative_zero(actual[payload]), ref.without_negative_zero(expected[payload]))


@given(
    st.integers(0, 2**32),
    st.integers(0, 90),
    st.integers(1, 4),
    st.sampled_from(STRIDES),
    st.integers(0, 200),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([0, 1, 8, 64]),
)
def test_store_is_the_reference(seed, n, blocks, stride, offset, dtype, pad):
    gen = generator(seed)
    n = min(n, 64 * blocks)
    cache = index_cache(blocks, stride, offset)
    ref.storage_bytes(cache).copy_(random_bytes(gen, ref.storage_bytes(cache).numel()))
    expected = cache.untyped_storage().clone()
    expected = torch.empty(0, dtype=torch.uint8).set_(expected, cache.storage_offset(), cache.shape, cache.stride())
    keys = (torch.randn(n, 128, generator=gen) * torch.exp2(torch.randn(n, 1, generator=gen) * 8)).bfloat16()
    slots = torch.randperm(64 * blocks, generator=gen)[:n].to(dtype)
    slots[torch.rand(n, generator=gen) < 0.2] = -1
    ref.store_index_keys(keys, expected, slots)
    assert sp.store_index_keys(strided_rows(keys, pad, 3, fill=float("nan")), cache, slots) is None
    assert_stored(cache, expected, slots.tolist(), cache)


def test_stored_bytes_lie_where_the_golden_formulas_say():
    for case in GOLDEN["page_bytes"]:
        guard = 64
        cache = index_cache(case["page"] + 1, case["stride"], case["base"], guard, fill=None)
        page, token, group = case["page"], case["token"], case["group"]
        memory = ref.storage_bytes(cache)
        first = guard + case["first_payload_byte"]
        byte = guard + case["scale_byte"]
        key = torch.zeros(1, 128)
        key[0, 32 * group : 32 * (group + 1)] = 6.0
        slots = torch.tensor([page * 64 + token])
        sp.store_index_keys(key.bfloat16(), cache, slots)
        assert memory[first : first + 16].tolist() == [0x77] * 16
        assert memory[byte] == 127
        other = (group + 1) % 4
        start = ref.payload_address(cache.storage_offset(), case["stride"], page, token, other, 0)
        assert not memory[start : start + 16].any()
        assert memory[ref.scale_address(cache.storage_offset(), case["stride"], page, token, other)] == 1


def test_slot_minus_one_leaves_the_cache_untouched():
    cache = index_cache(2)
    before = ref.storage_bytes(cache).clone()
    sp.store_index_keys(torch.randn(5, 128).bfloat16(), cache, torch.full((5,), -1))
    assert torch.equal(ref.storage_bytes(cache), before)


@pytest.mark.parametrize("slots", [[-2, 128], [-(2**31), 2**31 - 1], [-65, 129]])
def test_slots_outside_the_cache_write_nothing(slots):
    cache = index_cache(2, 5000, 7)
    before = ref.storage_bytes(cache).clone()
    for dtype in (torch.int32, torch.int64):
        try:
            sp.store_index_keys(torch.randn(2, 128).bfloat16(), cache, torch.tensor(slots, dtype=dtype))
        except (ValueError, IndexError):
            pass
        assert torch.equal(ref.storage_bytes(cache), before)


def test_slots_past_int32_write_nothing():
    cache = index_cache(2)
    before = ref.storage_bytes(cache).clone()
    try:
        sp.store_index_keys(torch.randn(2, 128).bfloat16(), cache, torch.tensor([2**62, 2**32]))
    except (ValueError, IndexError):
        pass
    assert torch.equal(ref.storage_bytes(cache), before)


@given(st.integers(0, 2**32))
def test_a_slot_given_twice_holds_one_of_the_keys_whole(seed):
    gen = generator(seed)
    cache = index_cache(1)
    n = 40
    keys = (
        torch.randn(n, 128, generator=gen) * torch.exp2(torch.randn(n, 4, generator=gen) * 4).repeat_interleave(32, 1)
    ).bfloat16()
    slots = torch.randint(0, 6, (n,), generator=gen)
    sp.store_index_keys(keys, cache, slots)
    packed, scale = ref.quantize_mxfp4(keys)
    candidates = torch.cat([ref.without_negative_zero(packed), scale], dim=1)
    for slot in range(6):
        stored = ref.read_key(cache, 0, slot)
        stored[:64] = ref.without_negative_zero(stored[:64])
        of_slot = candidates[slots == slot]
        if len(of_slot):
            assert (of_slot == stored).all(dim=1).any()


def test_a_negative_slot_beside_slot_zero_or_the_last_changes_neither():
    cache = index_cache(2)
    keys = torch.randn(4, 128, generator=generator(0)).bfloat16()
    slots = torch.tensor([-1, 0, 127, -1])
    sp.store_index_keys(keys, cache, slots)
    packed, scale = ref.quantize_mxfp4(keys)
    for i, (page, row) in {1: (0, 0), 2: (1, 63)}.items():
        stored = ref.read_key(cache, page, row)
        assert torch.equal(ref.without_negative_zero(stored[:64]), ref.without_negative_zero(packed[i]))
        assert torch.equal(stored[64:], scale[i])


def test_every_row_of_a_page_has_its_own_scale_column():
    cache = index_cache(1)
    exponents = torch.arange(64)[:, None, None] + 64 * torch.arange(4)[None, :, None] - 120
    keys = (6.0 * torch.exp2(exponents.double()).expand(64, 4, 32)).reshape(64, 128).bfloat16()
    keys = torch.where(keys.isfinite(), keys, 0)
    sp.store_index_keys(keys, cache, torch.arange(64))
    _, scale = ref.quantize_mxfp4(keys)
    plane = ref.storage_bytes(cache)[cache.storage_offset() + 4096 : cache.storage_offset() + 4352].reshape(4, 64)
    for row in range(64):
        column = GOLDEN["scale_column"][row]
        assert plane[:, column].tolist() == scale[row].tolist()


@pytest.mark.parametrize("blocks, n", [(0, 0), (1, 0), (0, 3)])
def test_no_keys_or_no_blocks(blocks, n):
    cache = index_cache(blocks)
    before = ref.storage_bytes(cache).clone()
    sp.store_index_keys(torch.randn(n, 128).bfloat16(), cache, torch.full((n,), -1))
    assert torch.equal(ref.storage_bytes(cache), before)


def test_non_finite_keys_store_the_nan_scale():
    cache = index_cache(1)
    key = torch.randn(1, 128, generator=generator(0)).bfloat16()
    key[0, 70] = float("inf")
    sp.store_index_keys(key, cache, torch.tensor([5]))
    stored = ref.read_key(cache, 0, 5)
    assert stored[66] == 255 and not (stored[32:48] & 0x77).any()


@pytest.mark.parametrize("layout", ["token_major", "preshuffled128", "", "PRESHUFFLED64"])
def test_other_layouts_are_refused_by_name(layout):
    cache = index_cache(1)
    before = ref.storage_bytes(cache).clone()
    with pytest.raises(ValueError, match="preshuffled64"):
        sp.store_index_keys(torch.zeros(1, 128).bfloat16(), cache, torch.tensor([0]), layout=layout)
    assert torch.equal(ref.storage_bytes(cache), before)
