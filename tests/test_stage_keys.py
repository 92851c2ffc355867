import hashlib
from types import SimpleNamespace

import pytest
import reference as ref
import sparse_prefill as sp
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import GOLDEN, INT32_MAX, STALE_ENTRIES, generator, index_cache, index_set, int32, random_bytes, strided_rows

OPS = torch.ops.sparse_prefill
LENGTHS = st.lists(st.sampled_from([0, 0, 1, 2, 63, 64, 65, 127, 128, 130, 200]), max_size=6)
STRIDES = st.sampled_from([4352, 4353, 4356, 4368, 8192, 17408])


def golden_keys(total):
    g = torch.arange(total)[:, None]
    payload = (31 * g + 7 * torch.arange(64)) % 256
    scale = (5 * g + 11 * torch.arange(4)) % 254 + 1
    return torch.cat([payload, scale], dim=1).to(torch.uint8)


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def assert_golden_pages(payload, scales):
    case = GOLDEN["stage_keys"]
    assert list(payload.shape) == case["payload_shape"] and list(scales.shape) == case["scales_shape"]
    for sample in case["samples"]:
        page, token, column = sample["payload_page"], sample["token"], sample["scale_column"]
        assert payload[page, 0, :, token].flatten().tolist() == list(bytes.fromhex(sample["payload"]))
        assert scales[page, 0, :, column].tolist() == sample["scales"]
    assert digest(payload) == case["payload_sha256"]
    assert digest(scales) == case["scales_sha256"]


def assert_pages(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == torch.uint8 and a.shape == e.shape and a.is_contiguous()
        assert torch.equal(a, e)


@pytest.mark.parametrize("stride, offset", [(4352, 0), (4352, 13184), (4353, 1), (8192, 128), (230400, 13184)])
def test_golden_pages(stride, offset):
    lengths = GOLDEN["stage_keys"]["lengths"]
    total = sum(lengths)
    sample = index_set(lengths, generator(1), stride=stride, offset=offset, keys=golden_keys(total))
    assert_golden_pages(*sp.stage_keys(sample.cache, sample))
    expected = ref.stage_keys(sample.cache, sample.block_table, sample.cu_seq_lens, total)
    assert_golden_pages(*expected)


@given(st.integers(0, 2**32), LENGTHS, STRIDES, st.integers(0, 300), st.sampled_from([None, 0, 3]), st.sampled_from(STALE_ENTRIES), st.integers(0, 5))
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
    """The host may not know the exact lengths: rows at and past cu[R] are zero bytes, and no table entry past a request's keys is read."""
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
        block_table=table, cu_seq_lens=cu, token_to_seq=int32([0] * 130 + [1] * 192), num_reqs=2, total_seq_lens=322, max_seqlen_k=192
    )
    assert_pages(sp.stage_keys(cache, chunk), ref.stage_keys(cache, table, cu, 322))


def test_page_stride_four_times_the_packed_one_near_capacity():
    blocks, stride = 256, 4 * 4352
    cache = index_cache(blocks, stride, fill=None)
    gen = generator(6)
    cache.copy_(random_bytes(gen, blocks, 64, 68))
    table = int32([[63, 64, 65, 255, 254]])
    chunk = SimpleNamespace(
        block_table=table, cu_seq_lens=int32([0, 300]), token_to_seq=torch.zeros(300, dtype=torch.int32), num_reqs=1,
        total_seq_lens=300, max_seqlen_k=300,
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


# Context parallel: pack on every rank, exchange (a concatenation here), restore


def sharded_caches(lengths, keys, world, interleave, gen, stride=4352):
    """Every rank's cache and table, holding only the keys that it owns."""
    cu = ref.cumulative(lengths)
    for rank in range(world):
        local = [ref.local_count(n, rank, world, interleave) for n in lengths]
        own = [
            keys[cu[r] + ref.position_of(j, rank, world, interleave)] for r, count in enumerate(local) for j in range(count)
        ]
        own = torch.stack(own) if own else torch.zeros(0, 68, dtype=torch.uint8)
        yield index_set(local, gen, stride=stride, keys=own, tail=INT32_MAX)


@pytest.mark.parametrize("case", GOLDEN["local_counts"], ids=str)
def test_golden_local_counts(case):
    assert sp.local_key_counts(case["n"], case["world"], case["interleave"]) == case["counts"]
    assert ref.local_counts(case["n"], case["world"], case["interleave"]) == case["counts"]


@given(st.integers(0, 5000), st.integers(1, 16), st.integers(1, 70))
def test_local_counts_partition_the_keys(n, world, interleave):
    counts = sp.local_key_counts(n, world, interleave)
    assert counts == [sum(ref.owner_of(p, world, interleave) == rank for p in range(n)) for rank in range(world)]
    assert counts == ref.local_counts(n, world, interleave)


@given(st.integers(0, 10**6), st.integers(1, 16), st.integers(1, 70))
def test_reference_owner_local_and_position_agree(position, world, interleave):
    rank, local = ref.owner_of(position, world, interleave), ref.local_of(position, world, interleave)
    assert ref.position_of(local, rank, world, interleave) == position


@given(st.integers(0, 2**32), LENGTHS, st.integers(1, 5), st.sampled_from([1, 2, 3, 16, 64]), st.sampled_from([0, 1, 64]))
def test_pack_and_restore_are_the_reference(seed, lengths, world, interleave, spare):
    gen = generator(seed)
    keys = index_set(lengths, gen).keys
    total = len(keys)
    all_cu = ref.all_local_cu(lengths, world, interleave)
    max_local = int(all_cu[:, -1].max()) + spare
    gathered = []
    for rank, shard in enumerate(sharded_caches(lengths, keys, world, interleave, gen, stride=4360)):
        packed = OPS.pack_keys(shard.cache, shard.block_table, all_cu[rank], max_local)
        expected = ref.pack_keys(shard.cache, shard.block_table, all_cu[rank], max_local)
        assert packed.shape == (max_local, 68) and torch.equal(packed, expected)
        packed = packed.clone()
        packed[int(all_cu[rank, -1]) :] = 0xEE  # rows past a rank's own keys are never read
        gathered.append(packed)
    gathered = torch.cat(gathered)
    token_to_seq = int32([r for r, n in enumerate(lengths) for _ in range(n)])
    cu = int32(ref.cumulative(lengths))
    restored = OPS.restore_keys(gathered, token_to_seq, cu, all_cu, world, interleave)
    assert_pages(restored, ref.pages_of_keys(keys, total))
    assert_pages(restored, ref.restore_keys(gathered, cu, all_cu, world, interleave, total))


@pytest.mark.parametrize("world, interleave", [(1, 1), (2, 1), (2, 64), (3, 5), (4, 2), (8, 16), (8, 64)])
def test_golden_pages_over_ranks(world, interleave):
    lengths = GOLDEN["stage_keys"]["lengths"]
    total, gen = sum(lengths), generator(1)
    all_cu = ref.all_local_cu(lengths, world, interleave)
    max_local = ref.cdiv(int(all_cu[:, -1].max()), 64) * 64
    shards = sharded_caches(lengths, golden_keys(total), world, interleave, gen)
    gathered = torch.cat([OPS.pack_keys(s.cache, s.block_table, all_cu[rank], max_local) for rank, s in enumerate(shards)])
    token_to_seq = int32([r for r, n in enumerate(lengths) for _ in range(n)])
    assert_golden_pages(*OPS.restore_keys(gathered, token_to_seq, int32(ref.cumulative(lengths)), all_cu, world, interleave))


def test_restore_with_a_host_total_larger_than_the_devices():
    lengths, world, interleave = [63, 0, 70], 2, 1
    gen = generator(3)
    keys = index_set(lengths, gen).keys
    all_cu = ref.all_local_cu(lengths, world, interleave)
    max_local = 128
    shards = sharded_caches(lengths, keys, world, interleave, gen)
    gathered = torch.cat([OPS.pack_keys(s.cache, s.block_table, all_cu[rank], max_local) for rank, s in enumerate(shards)])
    token_to_seq = int32([0] * 63 + [2] * 70 + [INT32_MAX] * 60)
    restored = OPS.restore_keys(gathered, token_to_seq, int32(ref.cumulative(lengths)), all_cu, world, interleave)
    assert_pages(restored, ref.pages_of_keys(keys, 193))


@pytest.mark.parametrize("local_cu", [[0, 10**6], [0, -1], [5, 3], [INT32_MAX, INT32_MAX]])
def test_pack_with_bad_lengths_is_memory_safe(local_cu):
    sample = index_set([130], generator(0))
    try:
        packed = OPS.pack_keys(sample.cache, sample.block_table, int32(local_cu), 192)
    except (ValueError, IndexError):
        return
    assert packed.shape == (192, 68)


@pytest.mark.parametrize("bad", [-1, 10**6, INT32_MAX, -(2**31)])
def test_restore_with_bad_offsets_is_memory_safe(bad):
    gathered = torch.zeros(2 * 64, 68, dtype=torch.uint8)
    all_cu = int32([[0, bad], [0, bad]])
    all_cu[:, 0] = bad
    try:
        payload, _ = OPS.restore_keys(gathered, int32([0] * 70), int32([0, 70]), all_cu, 2, 1)
    except (ValueError, IndexError):
        return
    assert payload.shape == (2, 1, 4, 64, 16)
