"""Keys and rows shared over several ranks, all of them in this process: the exchange is a concatenation here."""

import pytest
import reference as ref
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import GOLDEN, INT32_MAX, assert_golden_pages, assert_pages, generator, golden_keys, index_set, int32
from test_chunks import REQUESTS, metadata, rows_of_tiles, tables_for
from test_stage_keys import LENGTHS

import sparse_prefill as sp

OPS = torch.ops.sparse_prefill
exchange = pytest.mark.skipif(
    not hasattr(OPS, "restore_keys"), reason="this version works on one rank: pack_keys and restore_keys are not registered"
)


def plans_for_ranks():
    try:
        sp.prepare_prefill_metadata(sp.PrefillMetadata([], 0), 2, 0, 1)
    except ValueError as error:
        assert "world" in str(error)
        return False
    return True


several = pytest.mark.skipif(
    not plans_for_ranks(), reason="this version works on one rank: prepare_prefill_metadata refuses more"
)


def sharded_caches(lengths, keys, world, interleave, gen, stride=4352):
    """Every rank's cache and table, holding only the keys that it owns."""
    cu = ref.cumulative(lengths)
    for rank in range(world):
        local = [ref.local_count(n, rank, world, interleave) for n in lengths]
        own = [keys[cu[r] + ref.position_of(j, rank, world, interleave)] for r, count in enumerate(local) for j in range(count)]
        own = torch.stack(own) if own else torch.zeros(0, 68, dtype=torch.uint8)
        yield index_set(local, gen, stride=stride, keys=own, tail=INT32_MAX)


@exchange
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


@exchange
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


@exchange
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


@exchange
@pytest.mark.parametrize("local_cu", [[0, 10**6], [0, -1], [5, 3], [INT32_MAX, INT32_MAX]])
def test_pack_with_bad_lengths_is_memory_safe(local_cu):
    sample = index_set([130], generator(0))
    try:
        packed = OPS.pack_keys(sample.cache, sample.block_table, int32(local_cu), 192)
    except (ValueError, IndexError):
        return
    assert packed.shape == (192, 68)


@exchange
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


# Rows


@several
@given(REQUESTS, st.sampled_from([20, 300, 10**6]), st.sampled_from([4000, 2**29]), st.integers(1, 4))
def test_tiles_of_all_ranks_cover_every_row_once(requests, key_budget, logits_bytes, world):
    query_lens = [rows for rows, _ in requests]
    seq_lens = [rows + past for rows, past in requests]
    covered = []
    for rank in range(world):
        chunks = sp.build_prefill_chunks(
            query_lens, seq_lens, tables_for(seq_lens), key_budget=key_budget, logits_bytes=logits_bytes, world=world, rank=rank
        )
        plans = sp.prepare_prefill_metadata(metadata(chunks), world, rank, 1).plans
        rows = [c.token_end - c.token_start for c in chunks]
        own = rows_of_tiles(plans, rows)
        assert [chunk for chunk, _ in own] == sorted(chunk for chunk, _ in own), "tiles come in chunk order"
        for c, n in enumerate(rows):
            assert sum(chunk == c for chunk, _ in own) <= ref.cdiv(n, world)
        covered += own
    expected = [(c, row) for c, n in enumerate(rows) for row in range(n)]
    assert sorted(covered) == expected


@several
def test_busy_rows_are_shared_evenly_among_ranks():
    """Contiguous blocks would make the last rank of a causal prompt nearly twice as busy as the mean; stripes do not."""
    world, rows = 8, 64
    work = []
    for rank in range(world):
        (chunk,) = sp.build_prefill_chunks([rows], [rows], tables_for([rows]), key_budget=100, world=world, rank=rank)
        plans = sp.prepare_prefill_metadata(metadata([chunk]), world, rank, 1).plans
        work.append(sum(int(chunk.cu_seqlen_ke[row]) for _, row in rows_of_tiles(plans, [rows])))
    assert max(work) <= 1.2 * sum(work) / world
