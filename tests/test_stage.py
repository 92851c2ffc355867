import pytest
import reference as ref
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import GOLDEN, HISTORY_LAYOUTS, INT32_MAX, assert_same_bits, generator, int32, kv_cache, strided_rows

import sparse_prefill as sp

OPS = torch.ops.sparse_prefill
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn


def filled(cache, gen):
    """Random finite values in every live element, NaN in the gaps."""
    values = (torch.randn(cache.shape, generator=gen) * 20).to(cache.dtype)
    if cache.dtype == FP8:
        cache.view(torch.uint8).copy_(values.view(torch.uint8))
    else:
        cache.copy_(values)
    return cache


def assert_staged(staged, expected):
    assert staged.is_contiguous()
    assert_same_bits(staged, expected)


# The plan: which blocks, and the remapped table


def test_golden_plan():
    case = GOLDEN["plan_staged_prefill_pages"]
    staged = sp.plan_staged_prefill_pages(int32(case["table"]), case["lengths"], case["block_size"])
    assert isinstance(staged, sp.StagedPrefillPages)
    pages, table = staged
    assert pages.dtype == table.dtype == torch.int32
    assert pages.tolist() == case["pages"] and table.tolist() == case["remapped"]
    assert ref.plan_staged_prefill_pages(int32(case["table"]), case["lengths"], 64) == (case["pages"], case["remapped"])


@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from([0, 0, 1, 7, 8, 9, 15, 16, 17, 40, 64]), max_size=6),
    st.sampled_from([8, 16, 24, 64]),
    st.integers(0, 3),
    st.sampled_from([-1, INT32_MAX]),
    st.sampled_from([list, tuple]),
)
def test_plan_is_the_reference(seed, lengths, block_size, more, tail, kind):
    width = max((ref.cdiv(n, block_size) for n in lengths), default=0) + more
    table = torch.full((len(lengths), width), tail, dtype=torch.int32)
    for r, n in enumerate(lengths):
        count = ref.cdiv(n, block_size)
        table[r, :count] = torch.randint(0, 9, (count,), generator=generator(seed + r))  # shared blocks appear twice
    staged = sp.plan_staged_prefill_pages(strided_rows(table, more, more, fill=tail), kind(lengths), block_size)
    pages, remapped = ref.plan_staged_prefill_pages(table, lengths, block_size)
    assert staged.pages.tolist() == pages and staged.pages.dim() == 1
    assert staged.table.shape == table.shape and staged.table.tolist() == remapped


def test_plan_of_lengths_given_as_a_host_tensor_or_list_alike():
    staged = sp.plan_staged_prefill_pages(int32([[4, 5]]), [9], 8)
    assert staged.pages.tolist() == [4, 5] and staged.table.tolist() == [[0, 1]]


def test_a_table_narrower_than_its_lengths_is_refused():
    with pytest.raises(ValueError, match="table|lengths"):
        sp.plan_staged_prefill_pages(int32([[4, 5]]), [17], 8)


# The copy


@given(
    st.integers(0, 2**32),
    st.sampled_from(HISTORY_LAYOUTS),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.integers(1, 5),
    st.sampled_from([8, 16, 24]),
    st.sampled_from([1, 3, 8, 96]),
    st.integers(0, 2),
    st.integers(0, 8),
)
def test_a_float_cache_is_copied_or_cast(seed, layout, dtype, target, blocks, tokens, dim, group, count):
    gen = generator(seed)
    cache = filled(kv_cache(blocks, tokens, dim, dtype, layout=layout, groups=3, group=group, offset=5), gen)
    pages = torch.randint(0, blocks, (count,), generator=gen).to(torch.int32)
    before = ref.storage_bytes(cache).clone()
    staged = sp.StagedPrefillPages(pages, torch.zeros(1, 1, dtype=torch.int32))
    expected = ref.stage_prefill_pages(cache, pages.tolist(), target)
    assert_staged(sp.stage_prefill_pages(cache, staged, target), expected)
    # Scales of a cache that is not FP8 are ignored.
    assert_staged(sp.stage_prefill_pages(cache, staged, target, torch.tensor([3.0]), torch.tensor([5.0])), expected)
    assert torch.equal(ref.storage_bytes(cache), before)


@given(
    st.integers(0, 2**32),
    st.sampled_from(HISTORY_LAYOUTS),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.sampled_from([1, 3, 8, 96]),
    st.sampled_from([1.0, 0.37, 1e-3, 113.0]),
    st.sampled_from([2.0, 0.11]),
    st.booleans(),
)
def test_an_fp8_cache_is_scaled_in_fp32_and_rounded_once(seed, layout, target, as_bytes, dim, k_scale, v_scale, zero_dim):
    gen = generator(seed)
    cache = filled(kv_cache(4, 16, dim, FP8, layout=layout, group=1, offset=3), gen)
    pages = int32([3, 0, 3])
    shape = () if zero_dim else (1,)
    k, v = torch.full(shape, k_scale), torch.full(shape, v_scale)
    expected = ref.stage_prefill_pages(cache, pages.tolist(), target, k, v)
    staged = sp.StagedPrefillPages(pages, torch.zeros(1, 3, dtype=torch.int32))
    source = cache.view(torch.uint8) if as_bytes else cache
    assert_staged(sp.stage_prefill_pages(source, staged, target, k, v), expected)


def test_every_fp8_byte():
    cache = torch.arange(256, dtype=torch.int32).to(torch.uint8).reshape(1, 1, 8, 32)
    staged = sp.StagedPrefillPages(int32([0]), int32([[0]]))
    k, v = torch.tensor([0.5]), torch.tensor([3.0])
    for dtype in DTYPES:
        actual = sp.stage_prefill_pages(cache, staged, dtype, k, v)
        expected = ref.stage_prefill_pages(cache, [0], dtype, k, v)
        nan = expected.isnan()
        assert nan.sum() == 2 and torch.equal(actual.isnan(), nan)
        assert_same_bits(actual.masked_fill(nan, 0), expected.masked_fill(nan, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_float_values_keep_their_bits(dtype):
    """NaN payloads aside, every value moves as it is: -0, infinities, denormals."""
    cache = (
        torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 1e-7, -6e-8, 65504.0, 1.0] * 4)
        .to(dtype)
        .repeat(8)
        .reshape(1, 1, 8, 32)
    )
    staged = sp.StagedPrefillPages(int32([0]), int32([[0]]))
    assert_staged(sp.stage_prefill_pages(cache, staged, dtype), cache)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_by_name(dtype):
    cache = filled(kv_cache(2, 8, 4, torch.float32), generator(0))
    staged = sp.StagedPrefillPages(int32([1]), int32([[0]]))
    assert sp.stage_prefill_pages(cache, staged, dtype).dtype == getattr(torch, dtype)


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("missing", ["k_scale", "v_scale", "both"])
def test_an_fp8_cache_without_scales_is_refused(as_bytes, missing):
    cache = filled(kv_cache(2, 8, 4, FP8), generator(0))
    cache = cache.view(torch.uint8) if as_bytes else cache
    staged = sp.StagedPrefillPages(int32([1]), int32([[0]]))
    scales = {name: torch.tensor([1.0]) for name in ("k_scale", "v_scale") if missing not in (name, "both")}
    with pytest.raises(ValueError, match="k_scale|v_scale"):
        sp.stage_prefill_pages(cache, staged, torch.bfloat16, **scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_no_pages_give_an_empty_tensor(dtype):
    cache = filled(kv_cache(2, 8, 4, dtype), generator(0))
    staged = sp.plan_staged_prefill_pages(torch.zeros(3, 2, dtype=torch.int32), [0, 0, 0], 8)
    out = sp.stage_prefill_pages(cache, staged, torch.float16, torch.tensor([1.0]), torch.tensor([1.0]))
    assert out.shape == (0, 1, 8, 8) and out.dtype == torch.float16


@pytest.mark.parametrize("bad", [-1, 3, INT32_MAX, -(2**31)])
def test_bad_block_ids_are_memory_safe(bad):
    cache = filled(kv_cache(3, 8, 4, torch.bfloat16, layout="HND", group=1), generator(0))
    staged = sp.StagedPrefillPages(int32([2, bad, 0]), int32([[0, 1, 2]]))
    try:
        out = sp.stage_prefill_pages(cache, staged, torch.bfloat16)
    except (ValueError, IndexError):
        return
    good = ref.stage_prefill_pages(cache, [2, 0], torch.bfloat16)
    assert torch.equal(out[[0, 2]], good)


def test_blocks_past_4_gib():
    """Block id 21,846 of 98,304-element blocks: the element offset no longer fits 32 bits."""
    cache = torch.empty(22_000 * 98_304, dtype=torch.bfloat16).as_strided((22_000, 1, 8, 8), (98_304, 98_304, 8, 1))
    gen = generator(1)
    for block in (0, 21_845, 21_846, 21_999):
        cache[block] = torch.randn(1, 8, 8, generator=gen)
    pages = int32([21_999, 21_846, 0, 21_845])
    staged = sp.StagedPrefillPages(pages, int32([[0, 1, 2, 3]]))
    assert_staged(
        sp.stage_prefill_pages(cache, staged, torch.bfloat16), ref.stage_prefill_pages(cache, pages.tolist(), torch.bfloat16)
    )


def test_attention_over_staged_pages_is_attention_over_the_cache():
    """After staging, page_stride is N/8 and the table is the remapped one: page ids lead to the same tokens."""
    gen = generator(2)
    cache = filled(kv_cache(9, 16, 4, torch.float32, layout="NHD", group=1), gen)
    table, lengths = int32([[7, 3, -1], [8, 3, 2]]), [20, 48]
    staged = sp.plan_staged_prefill_pages(table, lengths, 16)
    copied = sp.stage_prefill_pages(cache, staged, torch.float32)
    for r, n in enumerate(lengths):
        original = ref.history(cache, table[r], n)
        assert torch.equal(ref.history(copied, staged.table[r], n), original)
    assert sp.kv_page_stride(copied) == 2
