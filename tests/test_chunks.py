import dataclasses
from types import SimpleNamespace

import pytest
import reference as ref
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import GOLDEN, int32

import sparse_prefill as sp

TILE_BYTES = 2**29
REQUESTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300)), max_size=6)  # (rows, tokens before them)


def tables_for(keys, extra=1, tail=-7):
    """A distinct entry in every used place, so that any mix-up shows."""
    width = max((ref.cdiv(n, 64) for n in keys), default=0) + extra
    table = torch.full((len(keys), width), tail, dtype=torch.int32)
    for r, n in enumerate(keys):
        table[r, : ref.cdiv(n, 64)] = torch.arange(ref.cdiv(n, 64)) + 1000 * (r + 1)
    return table


def with_rows(chunks):
    return [c for c in chunks if c.token_end > c.token_start]


def assert_chunks(actual, expected, table, keys):
    actual = with_rows(actual)
    assert len(actual) == len(expected)
    sets = {}
    for a, e in zip(actual, expected, strict=True):
        for name in ("token_start", "token_end", "num_reqs", "total_seq_lens", "max_seqlen_k"):
            assert getattr(a, name) == getattr(e, name), name
            assert isinstance(getattr(a, name), int)
        for name in ("cu_seq_lens", "token_to_seq", "cu_seqlen_ks", "cu_seqlen_ke"):
            assert getattr(a, name).dtype == torch.int32
            assert getattr(a, name).tolist() == getattr(e, name), name
        assert a.block_table.dtype == torch.int32 and a.block_table.shape[0] == e.num_reqs
        for r in range(e.num_reqs):
            used = ref.cdiv(keys[e.first + r], 64)
            assert torch.equal(a.block_table[r, :used], table[e.first + r, :used])
        sets.setdefault(e.request_set, set()).add(a.request_set)
    names = [next(iter(s)) for s in sets.values() if len(s) == 1]
    assert len(names) == len(sets) == len(set(names)), "pieces share their request set, different sets do not"
    assert all(isinstance(name, int) for name in names)


@given(
    REQUESTS,
    st.sampled_from([1, 64, 200, 500, 10**6]),
    st.sampled_from([1, 4, 2000, 40_000, 2**29]),
    st.sampled_from([1, 4, 8]),
    st.integers(0, 9),
    st.booleans(),
)
def test_chunks_are_the_reference(requests, key_budget, logits_bytes, compress_ratio, token_offset, own_region):
    query_lens = [rows for rows, _ in requests]
    seq_lens = [rows + past for rows, past in requests]
    keys = [n // compress_ratio for n in seq_lens]
    table = tables_for(keys)
    options = dict(key_budget=key_budget, logits_bytes=logits_bytes, compress_ratio=compress_ratio, token_offset=token_offset)
    actual = sp.build_prefill_chunks(query_lens, seq_lens, table, own_region=own_region, **options)
    expected = ref.build_prefill_chunks(query_lens, seq_lens, own_region=own_region, **options)
    assert_chunks(actual, expected, table, keys)


@given(REQUESTS, st.sampled_from([1, 100, 700]), st.sampled_from([4, 5000, 2**29]))
def test_every_row_with_keys_in_its_set_is_covered_once_in_order(requests, key_budget, logits_bytes):
    query_lens = [rows for rows, _ in requests]
    seq_lens = [rows + past for rows, past in requests]
    chunks = sp.build_prefill_chunks(query_lens, seq_lens, tables_for(seq_lens), key_budget=key_budget, logits_bytes=logits_bytes)
    end = 0
    for c in chunks:
        rows = c.token_end - c.token_start
        assert c.token_start >= end and rows >= 0
        end = c.token_end
        assert len(c.cu_seqlen_ks) == len(c.cu_seqlen_ke) == rows
        assert rows <= 1 or rows * c.total_seq_lens * 4 <= logits_bytes
        assert c.num_reqs == 1 or c.total_seq_lens <= key_budget
    covered = sum(c.token_end - c.token_start for c in chunks)
    # With one key a token, a row always has a key of its own: no set with rows is without keys.
    assert covered == sum(query_lens)


def test_one_request_over_the_key_budget_is_admitted_alone():
    chunks = sp.build_prefill_chunks([3, 4, 5], [300, 4, 5], tables_for([300, 4, 5]), key_budget=100)
    assert [(c.token_start, c.token_end, c.num_reqs) for c in chunks] == [(0, 3, 1), (3, 12, 2)]


def test_pieces_of_one_request_share_its_set_and_its_budget_of_logits():
    chunks = sp.build_prefill_chunks([10], [100], tables_for([100]), key_budget=1000, logits_bytes=4 * 100 * 3)
    assert [(c.token_start, c.token_end) for c in chunks] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert len({c.request_set for c in chunks}) == 1
    chunks = sp.build_prefill_chunks([3], [100], tables_for([100]), key_budget=1000, logits_bytes=7)
    assert [(c.token_start, c.token_end) for c in chunks] == [(0, 1), (1, 2), (2, 3)]


def test_a_set_without_keys_yields_no_chunk():
    assert sp.build_prefill_chunks([3, 0], [3, 0], tables_for([0, 0]), key_budget=10, compress_ratio=4) == []
    assert sp.build_prefill_chunks([], [], tables_for([]), key_budget=10) == []
    chunks = sp.build_prefill_chunks([3, 5], [3, 8], tables_for([0, 1]), key_budget=10, compress_ratio=8)
    assert [(c.token_start, c.token_end) for c in chunks] == [(0, 8)]


def test_a_later_set_without_keys_still_moves_the_rows():
    chunks = sp.build_prefill_chunks([2, 3, 4], [16, 3, 40], tables_for([2, 0, 5]), key_budget=1, compress_ratio=8)
    assert [(c.token_start, c.token_end) for c in chunks] == [(0, 2), (5, 9)]


def test_own_region_windows_end_before_the_rows_own_region():
    (chunk,) = sp.build_prefill_chunks([10], [20], tables_for([2]), key_budget=10, compress_ratio=8, own_region=True)
    assert chunk.cu_seqlen_ke.tolist() == [position // 8 for position in range(10, 20)]
    (chunk,) = sp.build_prefill_chunks([10], [20], tables_for([2]), key_budget=10, compress_ratio=8)
    assert chunk.cu_seqlen_ke.tolist() == [(position + 1) // 8 for position in range(10, 20)]


@given(REQUESTS, st.integers(2, 4), st.sampled_from([1, 2, 16, 64]), st.sampled_from([50, 10**6]))
def test_local_lengths_of_every_rank(requests, world, interleave, key_budget):
    query_lens = [rows for rows, _ in requests]
    seq_lens = [rows + past for rows, past in requests]
    of_rank = []
    for rank in range(world):
        local = [ref.local_count(n, rank, world, interleave) for n in seq_lens]
        of_rank.append(
            sp.build_prefill_chunks(
                query_lens, seq_lens, tables_for(local), key_budget=key_budget, world=world, rank=rank, interleave=interleave
            )
        )
    expected = ref.build_prefill_chunks(query_lens, seq_lens, key_budget=key_budget)
    for same in zip(*of_rank, strict=True):
        assert len({c.max_local_total_seq_lens for c in same}) == 1, "equal on all ranks"
    for rank, chunks in enumerate(of_rank):
        for a, e in zip(with_rows(chunks), expected, strict=True):
            assert (a.token_start, a.token_end, a.total_seq_lens) == (e.token_start, e.token_end, e.total_seq_lens)
            all_cu = ref.all_local_cu(seq_lens[e.first : e.last], world, interleave)
            assert a.local_cu_seq_lens.dtype == torch.int32
            assert a.local_cu_seq_lens.tolist() == all_cu[rank].tolist()
            longest = int(all_cu[:, -1].max())
            assert longest <= a.max_local_total_seq_lens <= ref.cdiv(longest, 64) * 64


def test_chunks_are_frozen():
    (chunk,) = sp.build_prefill_chunks([1], [5], tables_for([5]), key_budget=10)
    assert isinstance(chunk, sp.PrefillChunk)
    with pytest.raises(dataclasses.FrozenInstanceError):
        chunk.token_start = 7


def test_a_wide_strided_table_is_taken_as_it_is():
    table = torch.full((3, 40), -1, dtype=torch.int32)[:, 5:9]
    table[:] = torch.arange(12).reshape(3, 4)
    chunks = sp.build_prefill_chunks([2, 2, 2], [100, 200, 30], table, key_budget=300)
    assert [c.block_table[:, :2].tolist() for c in chunks] == [[[0, 1], [4, 5]], [[8, 9]]]


@pytest.mark.parametrize("case", GOLDEN["workspace_bytes"], ids=str)
def test_golden_workspace_bytes(case):
    assert sp.prefill_workspace_bytes(*case["args"]) == case["bytes"]
    assert ref.prefill_workspace_bytes(*case["args"]) == case["bytes"]


@given(
    st.integers(0, 2**34),
    st.integers(0, 1000),
    st.integers(1, 64),
    st.integers(1, 256),
    st.integers(0, 10**5),
    st.integers(0, 4096),
    st.integers(1, 4),
)
def test_workspace_bytes_are_the_reference(max_keys, max_reqs, world, interleave, max_rows, k, page_sets):
    args = (max_keys, max_reqs, world, interleave)
    assert sp.prefill_workspace_bytes(*args, max_rows=max_rows, k=k, page_sets=page_sets) == ref.prefill_workspace_bytes(
        *args, max_rows=max_rows, k=k, page_sets=page_sets
    )
    assert sp.prefill_workspace_bytes(*args) == ref.prefill_workspace_bytes(*args)


# Sharding of positions over ranks


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


# prepare_prefill_metadata: what every layer shares


def metadata(chunks, **extra):
    return sp.PrefillMetadata(chunks, extra.get("max_prefill_seq_len", 77), extra.get("shardq_gather_indices"))


def rows_of_tiles(plans, chunk_rows):
    """(chunk, row) of every row that the tiles name."""
    named = []
    for chunk, first, count, step in plans.tiles.tolist():
        assert count >= 1 and step >= 1
        rows = [first + i * step for i in range(count)]
        assert rows[0] >= 0 and rows[-1] < chunk_rows[chunk]
        named += [(chunk, row) for row in rows]
    return named


@given(REQUESTS, st.sampled_from([20, 300, 10**6]), st.sampled_from([4000, 2**29]))
def test_tiles_cover_every_row_once_in_chunk_order(requests, key_budget, logits_bytes):
    query_lens = [rows for rows, _ in requests]
    seq_lens = [rows + past for rows, past in requests]
    chunks = sp.build_prefill_chunks(query_lens, seq_lens, tables_for(seq_lens), key_budget=key_budget, logits_bytes=logits_bytes)
    rows = [c.token_end - c.token_start for c in chunks]
    covered = rows_of_tiles(sp.prepare_prefill_metadata(metadata(chunks), 1, 0, 1).plans, rows)
    assert [chunk for chunk, _ in covered] == sorted(chunk for chunk, _ in covered)
    assert sorted(covered) == [(c, row) for c, n in enumerate(rows) for row in range(n)]


@given(REQUESTS, st.sampled_from([20, 300, 10**6]), st.sampled_from([4000, 2**29]), st.integers(0, 5))
def test_plans_hold_every_chunks_geometry(requests, key_budget, logits_bytes, token_offset):
    query_lens = [rows for rows, _ in requests]
    seq_lens = [rows + past for rows, past in requests]
    table = tables_for(seq_lens)
    chunks = sp.build_prefill_chunks(
        query_lens, seq_lens, table, key_budget=key_budget, logits_bytes=logits_bytes, token_offset=token_offset
    )
    prepared = sp.prepare_prefill_metadata(metadata(chunks), 1, 0, 1)
    assert prepared.max_prefill_seq_len == 77 and prepared.shardq_gather_indices is None
    plans = prepared.plans
    for name in ("sets", "chunks", "tiles"):
        assert getattr(plans, name).dtype == torch.int64 and getattr(plans, name).device.type == "cpu"
    for name in ("block_tables", "cu_seq_lens", "token_to_seq", "ks", "ke", "all_cu"):
        assert getattr(plans, name).dtype == torch.int32 and getattr(plans, name).dim() == 1
    assert plans.sets.shape == (len({c.request_set for c in chunks}), 8)
    assert plans.chunks.shape == (len(chunks), 4)
    for chunk, (request_set, token_start, token_end, window_offset) in zip(chunks, plans.chunks.tolist(), strict=True):
        assert (token_start, token_end) == (chunk.token_start, chunk.token_end)
        rows = token_end - token_start
        assert torch.equal(plans.ks[window_offset : window_offset + rows], chunk.cu_seqlen_ks)
        assert torch.equal(plans.ke[window_offset : window_offset + rows], chunk.cu_seqlen_ke)
        num_reqs, total, width, table_offset, cu_offset, key_offset, *_ = plans.sets[request_set].tolist()
        assert (num_reqs, total) == (chunk.num_reqs, chunk.total_seq_lens)
        assert torch.equal(plans.cu_seq_lens[cu_offset : cu_offset + num_reqs + 1], chunk.cu_seq_lens)
        assert torch.equal(plans.token_to_seq[key_offset : key_offset + total], chunk.token_to_seq)
        planned = plans.block_tables[table_offset : table_offset + num_reqs * width].reshape(num_reqs, width)
        lengths = chunk.cu_seq_lens.diff().tolist()
        for r, n in enumerate(lengths):
            used = ref.cdiv(n, 64)
            assert torch.equal(planned[r, :used], chunk.block_table[r, :used])


@pytest.mark.parametrize("keys", [300_000, 2**20])
def test_no_tile_of_logits_is_larger_than_its_bound(keys):
    rows = 3000
    chunk = SimpleNamespace(
        block_table=torch.zeros(1, ref.cdiv(keys, 64), dtype=torch.int32),
        cu_seq_lens=int32([0, keys]),
        token_to_seq=torch.zeros(keys, dtype=torch.int32),
        cu_seqlen_ks=torch.zeros(rows, dtype=torch.int32),
        cu_seqlen_ke=torch.full((rows,), keys, dtype=torch.int32),
        token_start=5,
        token_end=5 + rows,
        num_reqs=1,
        total_seq_lens=keys,
        max_seqlen_k=keys,
        request_set=0,
    )
    plans = sp.prepare_prefill_metadata(metadata([chunk]), 1, 0, 1).plans
    assert sorted(rows_of_tiles(plans, [rows])) == [(0, row) for row in range(rows)]
    assert all(count * keys * 4 <= TILE_BYTES for _, _, count, _ in plans.tiles.tolist())


def plain_chunk(table, rows, keys, token_start=0, **extra):
    return SimpleNamespace(
        block_table=table,
        cu_seq_lens=int32([0, keys]),
        token_to_seq=torch.zeros(keys, dtype=torch.int32),
        cu_seqlen_ks=torch.zeros(rows, dtype=torch.int32),
        cu_seqlen_ke=torch.full((rows,), keys, dtype=torch.int32),
        token_start=token_start,
        token_end=token_start + rows,
        num_reqs=1,
        total_seq_lens=keys,
        max_seqlen_k=keys,
        **extra,
    )


def test_without_a_name_a_request_set_is_its_table_requests_and_total():
    table, other = int32([[3]]), int32([[3]])
    chunks = [plain_chunk(table, 2, 9), plain_chunk(table, 3, 9, 2), plain_chunk(other, 1, 9, 5), plain_chunk(table, 1, 8, 6)]
    plans = sp.prepare_prefill_metadata(metadata(chunks), 1, 0, 1).plans
    named = plans.chunks[:, 0].tolist()
    assert named[0] == named[1] and len({named[0], named[2], named[3]}) == 3


def test_an_explicit_request_set_decides():
    table = int32([[3]])
    chunks = [
        plain_chunk(table, 2, 9, request_set=4),
        plain_chunk(table, 3, 9, 2, request_set=7),
        plain_chunk(table, 1, 9, 5, request_set=7),
    ]
    named = sp.prepare_prefill_metadata(metadata(chunks), 1, 0, 1).plans.chunks[:, 0].tolist()
    assert named[0] != named[1] and named[1] == named[2]


def test_prepared_metadata_is_read_only_and_leaves_its_argument():
    chunks = sp.build_prefill_chunks([3], [9], tables_for([9]), key_budget=10)
    indices = int32([2, 0, 1])
    given_metadata = metadata(chunks, shardq_gather_indices=indices, max_prefill_seq_len=9)
    before = chunks[0].cu_seqlen_ke.clone()
    prepared = sp.prepare_prefill_metadata(given_metadata, 1, 0, 1)
    assert isinstance(prepared, sp.FP4PrefillMetadata)
    assert prepared.shardq_gather_indices is indices and prepared.max_prefill_seq_len == 9
    assert given_metadata.chunks == chunks and torch.equal(chunks[0].cu_seqlen_ke, before)
    with pytest.raises((AttributeError, TypeError)):
        prepared.plans = None


def test_any_object_with_the_attributes_is_accepted():
    chunk = plain_chunk(int32([[0]]), 2, 9)
    duck = SimpleNamespace(chunks=[chunk], max_prefill_seq_len=9, shardq_gather_indices=None)
    assert sp.prepare_prefill_metadata(duck, 1, 0, 1).plans.chunks.shape == (1, 4)


def test_no_chunks():
    plans = sp.prepare_prefill_metadata(metadata([]), 1, 0, 1).plans
    assert plans.sets.shape == (0, 8) and plans.chunks.shape == (0, 4) and plans.tiles.shape == (0, 4)
    assert plans.ks.numel() == plans.all_cu.numel() == 0
