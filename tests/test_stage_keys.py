from types import SimpleNamespace

import pytest
import reference as ref
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import (
    GOLDEN,
    INT32_MAX,
    STALE_ENTRIES,
    assert_golden_pages,
    assert_pages,
    generator,
    golden_keys,
    index_cache,
    index_set,
    int32,
    random_bytes,
    strided_rows,
)

import sparse_prefill as sp

OPS = torch.ops.sparse_prefill
LENGTHS = st.lists(st.sampled_from([0, 0, 1, 2, 63, 64, 65, 127, 128, 130, 200]), max_size=6)
STRIDES = st.sampled_from([4352, 4353, 4356, 4368, 8192, 17408])


@pytest.mark.parametrize("stride, offset", [(4352, 0), (4352, 13184), (4353, 1), (8192, 128), (230400, 13184)])
def test_golden_pages(stride, offset):
    lengths = GOLDEN["stage_keys"]["lengths"]
    total = sum(lengths)
    sample = index_set(lengths, generator(1), stride=stride, offset=offset, keys=golden_keys(total))
    assert_golden_pages(*sp.stage_keys(sample.cache, sample))
    expected = ref.stage_keys(sample.cache, sample.block_table, sample.cu_seq_lens, total)
    assert_golden_pages(*expected)


@given(
    st.integers(0, 2**32),
    LENGTHS,
    STRIDES,
    st.integers(0, 300),
    st.sampled_from([None, 0, 3]),
    st.sampled_from(STALE_ENTRIES),
    st.integers(0, 5),
)
def test_stage_is_the_reference(seed, lengths, stride, offset, extra_width, tail, pad):
    gen = generator(seed)
    width = None if extra_width is None else max((ref.cdiv(n, 64) for n in lengths), default=0) + extra_width
    sample = index_set(lengths, gen, stride=stride, offset=offset, width=width, tail=tail)
    sample.block_table = strided_rows(sample.block_table, pad, pad, fill=tail)
    before = ref.storage_bytes(sample.cache).clone()
    expected = ref.pages_of_keys(sample.keys, sample.total_seq_lens)
    assert_pages(sp.stage_keys(sample.cache, sample), expected)
    assert_pages(OPS.stage_keys(sample.cache, sample.block_table, sample.cu_seq_lens, sample.token_to_seq), expected)
    assert torch.equal(ref.storage_bytes(sample.cache), before)


@given(st.integers(0, 2**32), LENGTHS, st.integers(1, 200), st.sampled_from([-1, 0, 10**6]))
def test_host_total_larger_than_the_devices_leaves_zero_rows(seed, lengths, more, stale_request):
    """The host may not know the exact lengths: rows at and past cu[R] are zero, no table entry past a request's keys is read."""
    sample = index_set(lengths, generator(seed), tail=INT32_MAX)
    sample.total_seq_lens += more
    sample.token_to_seq = torch.cat([sample.token_to_seq, int32([stale_request] * more)])
    expected = ref.pages_of_keys(sample.keys, sample.total_seq_lens)
    assert_pages(sp.stage_keys(sample.cache, sample), expected)


def test_host_total_larger_than_the_table_holds():
    """One request, a table exactly cdiv(keys, 64) wide, the host's bound pages beyond it."""
    sample = index_set([64], generator(2), width=1)
    sample.total_seq_lens = 300
    sample.token_to_seq = torch.zeros(300, dtype=torch.int32)
    assert_pages(sp.stage_keys(sample.cache, sample), ref.pages_of_keys(sample.keys, 300))


def test_padding_rows_of_the_last_page_are_zero():
    sample = index_set([1], generator(3))
    payload, scales = sp.stage_keys(sample.cache, sample)
    assert not payload[0, 0, :, 1:].any()
    assert not scales[0, 0].flatten()[torch.arange(256) % 64 != 0].any()


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [0, 5, 0], [0, 0, 64, 0], [1] * 70])
@pytest.mark.parametrize("extra", [0, 2])
def test_empty_requests_anywhere(lengths, extra):
    width = max((ref.cdiv(n, 64) for n in lengths), default=0) + extra
    sample = index_set(lengths, generator(4), width=width, spare=3 + extra)
    assert_pages(sp.stage_keys(sample.cache, sample), ref.pages_of_keys(sample.keys, sample.total_seq_lens))


def test_no_blocks_at_all():
    sample = index_set([0, 0], generator(0), spare=0)
    assert_pages(sp.stage_keys(sample.cache, sample), ref.pages_of_keys(sample.keys, 0))


def test_page_stride_of_merged_layers_past_4_gib():
    """20,000 pages of stride 230,400 at a storage offset: byte offsets pass 2^31 and 2^32."""
    stride, blocks, offset = 230400, 20000, 3 * 4352 + 128
    cache = index_cache(blocks, stride, offset, fill=None)
    gen = generator(5)
    table = int32([[19999, 0, 9321], [18642, 18641, 9320]])
    lengths = [130, 192]
    for page in table.flatten().tolist():
        for row in range(64):
            ref.write_key(cache, page, row, random_bytes(gen, 68))
    cu = int32(ref.cumulative(lengths))
    chunk = SimpleNamespace(
        block_table=table,
        cu_seq_lens=cu,
        token_to_seq=int32([0] * 130 + [1] * 192),
        num_reqs=2,
        total_seq_lens=322,
        max_seqlen_k=192,
    )
    assert_pages(sp.stage_keys(cache, chunk), ref.stage_keys(cache, table, cu, 322))


def test_page_stride_four_times_the_packed_one_near_capacity():
    blocks, stride = 256, 4 * 4352
    cache = index_cache(blocks, stride, fill=None)
    gen = generator(6)
    cache.copy_(random_bytes(gen, blocks, 64, 68))
    table = int32([[63, 64, 65, 255, 254]])
    chunk = SimpleNamespace(
        block_table=table,
        cu_seq_lens=int32([0, 300]),
        token_to_seq=torch.zeros(300, dtype=torch.int32),
        num_reqs=1,
        total_seq_lens=300,
        max_seqlen_k=300,
    )
    assert_pages(sp.stage_keys(cache, chunk), ref.stage_keys(cache, table, chunk.cu_seq_lens, 300))


def test_other_requests_and_gaps_change_no_bit():
    sample = index_set([70, 3, 129], generator(7), stride=5000, offset=11, spare=4)
    first = sp.stage_keys(sample.cache, sample)
    clean = torch.zeros_like(ref.storage_bytes(sample.cache))
    cache = clean.as_strided(sample.cache.shape, sample.cache.stride(), sample.cache.storage_offset())
    for r, n in enumerate(sample.lengths):
        for j in range(n):
            page = int(sample.block_table[r, j // 64])
            ref.write_key(cache, page, j % 64, ref.read_key(sample.cache, page, j % 64))
    assert_pages(sp.stage_keys(cache, sample), first)


@pytest.mark.parametrize("entry", [-1, -(2**31), INT32_MAX, 3, 10**6])
def test_bad_table_entries_are_memory_safe(entry):
    """Entries inside a request's own keys that name no block: never an access outside the cache, other requests right."""
    sample = index_set([130, 64], generator(8), spare=0)
    sample.block_table[0, 1] = entry if entry != 3 else sample.cache.shape[0]
    before = ref.storage_bytes(sample.cache).clone()
    try:
        payload, scales = sp.stage_keys(sample.cache, sample)
    except (ValueError, IndexError):
        return
    keys = ref.keys_of_pages(payload, scales, 194)
    assert torch.equal(keys[:64], sample.keys[:64]) and torch.equal(keys[128:], sample.keys[128:])
    assert torch.equal(ref.storage_bytes(sample.cache), before)


@pytest.mark.parametrize("cu", [[0, 200, 194], [0, -5, 194], [0, 130, 10**6], [INT32_MAX, 0, 194], [0, 130, -1]])
def test_bad_device_lengths_are_memory_safe(cu):
    sample = index_set([130, 64], generator(9))
    sample.cu_seq_lens = int32(cu)
    try:
        payload, _ = sp.stage_keys(sample.cache, sample)
    except (ValueError, IndexError):
        return
    assert payload.shape == (4, 1, 4, 64, 16)


@pytest.mark.parametrize("named", [-1, 2, INT32_MAX, -(2**31)])
def test_bad_request_of_a_key_is_memory_safe(named):
    sample = index_set([130, 64], generator(9))
    sample.token_to_seq = sample.token_to_seq.clone()
    sample.token_to_seq[7] = named
    try:
        payload, scales = sp.stage_keys(sample.cache, sample)
    except (ValueError, IndexError):
        return
    keys = ref.keys_of_pages(payload, scales, 194)
    assert torch.equal(keys[8:], sample.keys[8:])


@pytest.mark.parametrize("layout", ["token_major", "preshuffled128"])
def test_other_layouts_are_refused_by_name(layout):
    sample = index_set([3], generator(0))
    with pytest.raises(ValueError, match="preshuffled64"):
        sp.stage_keys(sample.cache, sample, layout=layout)
