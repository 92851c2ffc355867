import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import reference as ref
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import INT32_MAX, generator, int32, prefill_step, random_bytes

import sparse_prefill as sp

REQUESTS = st.lists(st.tuples(st.integers(0, 20), st.sampled_from([0, 1, 44, 63, 64, 130])), min_size=1, max_size=5)


def prepared(step, **options):
    chunks = sp.build_prefill_chunks(step.query_lens, step.seq_lens, step.block_table, **{**step.options, **options})
    return sp.prepare_prefill_metadata(sp.PrefillMetadata(chunks, max(step.seq_lens, default=0)), 1, 0, 1)


def select(step, metadata=None, **options):
    out = step.out.clone()
    metadata = prepared(step) if metadata is None else metadata
    assert sp.prefill_chunks(step.q, step.weights, step.cache, out, metadata, 1, 1, step.weight_scale, **options) is None
    return out


def assert_rows(step, out):
    """Rows of sets with keys equal the reference; rows of a set without any key belong to no chunk and stay as they were."""
    for row, (actual, expected) in enumerate(zip(out.tolist(), step.expected.tolist(), strict=True)):
        assert actual == expected or (set(expected) == {-1} and set(actual) == {-9}), row


@given(
    st.integers(0, 2**32),
    REQUESTS,
    st.sampled_from([1, 3, 9]),
    st.sampled_from([1, 4, 40]),
    st.sampled_from([10, 150, 10**6]),
    st.sampled_from([600, 2**29]),
    st.sampled_from([(1, False), (4, False), (8, True)]),
    st.sampled_from([4352, 4360, 9001]),
)
def test_selections_are_the_reference(seed, requests, heads, k, key_budget, logits_bytes, compression, stride):
    compress_ratio, own_region = compression
    step = prefill_step(
        requests,
        generator(seed),
        heads=heads,
        k=k,
        key_budget=key_budget,
        logits_bytes=logits_bytes,
        compress_ratio=compress_ratio,
        own_region=own_region,
        token_offset=seed % 3,
        extra_tokens=seed % 2,
        stride=stride,
        offset=seed % 7,
        tail=INT32_MAX,
    )
    memory = ref.storage_bytes(step.cache).clone()
    assert_rows(step, select(step))
    assert torch.equal(ref.storage_bytes(step.cache), memory)


@given(st.integers(0, 2**32), REQUESTS, st.integers(0, 3), st.integers(0, 3))
def test_kept_keys(seed, requests, keep_first, keep_last):
    step = prefill_step(requests, generator(seed), k=6, keep_first=keep_first, keep_last=keep_last, key_budget=150)
    assert_rows(step, select(step, keep_first=keep_first, keep_last=keep_last))


@settings(max_examples=10)
@given(st.integers(0, 2**32), REQUESTS)
def test_a_prompt_in_pieces_selects_what_it_selects_in_one_shot(seed, requests):
    step = prefill_step(requests, generator(seed))
    whole = select(step)
    for key_budget, logits_bytes in [(1, 2**29), (100, 2000), (10**6, 200)]:
        assert torch.equal(select(step, prepared(step, key_budget=key_budget, logits_bytes=logits_bytes)), whole)


def test_rows_outside_every_chunk_are_untouched():
    """Decode rows come first, other tokens last."""
    step = prefill_step([(3, 70), (4, 0)], generator(1), token_offset=5, extra_tokens=4)
    out = select(step)
    assert (out[:5] == -9).all() and (out[12:] == -9).all()
    assert_rows(step, out)


def test_rows_inside_a_chunk_are_wholly_rewritten():
    step = prefill_step([(5, 0)], generator(2), k=5)
    assert select(step).tolist() == [[*range(i + 1)] + [-1] * (4 - i) for i in range(5)]


def test_no_chunks_write_nothing():
    step = prefill_step([(3, 0)], generator(3))
    metadata = sp.prepare_prefill_metadata(sp.PrefillMetadata([], 0), 1, 0, 1)
    assert (select(step, metadata) == -9).all()


def test_indices_are_within_each_rows_own_keys():
    step = prefill_step([(5, 60), (7, 3), (4, 130)], generator(4), k=50)
    out = select(step)
    count = torch.tensor([past + i + 1 for rows, past in [(5, 60), (7, 3), (4, 130)] for i in range(rows)])
    assert out.min() >= -1 and (out < count[:, None]).all()
    live = (out >= 0).sum(dim=1)
    assert torch.equal(live, count.clamp(max=50))


def test_empty_windows_of_padding_rows():
    step = prefill_step([(6, 60)], generator(5))
    (chunk,) = sp.build_prefill_chunks(step.query_lens, step.seq_lens, step.block_table, **step.options)
    fields = {
        name: getattr(chunk, name)
        for name in (
            "block_table",
            "cu_seq_lens",
            "token_to_seq",
            "cu_seqlen_ks",
            "token_start",
            "token_end",
            "num_reqs",
            "total_seq_lens",
            "max_seqlen_k",
            "request_set",
        )
    }
    ke = chunk.cu_seqlen_ke.clone()
    ke[[1, 5]] = chunk.cu_seqlen_ks[[1, 5]]
    chunk = SimpleNamespace(**fields, cu_seqlen_ke=ke)
    out = select(step, sp.prepare_prefill_metadata(sp.PrefillMetadata([chunk], 66), 1, 0, 1))
    assert (out[[1, 5]] == -1).all()
    assert torch.equal(out[[0, 2, 3, 4]], step.expected[[0, 2, 3, 4]])


def test_host_lengths_larger_than_the_devices():
    """Totals are upper bounds; the table is exactly as wide as the device's keys need; what lies behind is poison."""
    step = prefill_step([(4, 60)], generator(6))
    (chunk,) = sp.build_prefill_chunks(step.query_lens, step.seq_lens, step.block_table[:, :1], **step.options)
    larger = SimpleNamespace(
        block_table=chunk.block_table,
        cu_seq_lens=chunk.cu_seq_lens,
        token_to_seq=torch.cat([chunk.token_to_seq, int32([0] * 136)]),
        cu_seqlen_ks=chunk.cu_seqlen_ks,
        cu_seqlen_ke=chunk.cu_seqlen_ke,
        token_start=0,
        token_end=4,
        num_reqs=1,
        total_seq_lens=200,
        max_seqlen_k=200,
        request_set=0,
    )
    out = select(step, sp.prepare_prefill_metadata(sp.PrefillMetadata([larger], 200), 1, 0, 1))
    assert torch.equal(out, step.expected)


def test_other_requests_change_no_bit():
    """Every byte of the cache that is not this request's is replaced by NaN scales; so are other tokens' queries and weights."""
    step = prefill_step([(5, 60), (6, 20), (3, 130)], generator(7), k=7)
    whole = select(step)
    poisoned = torch.full_like(ref.storage_bytes(step.cache), 255)
    cache = poisoned.as_strided(step.cache.shape, step.cache.stride(), step.cache.storage_offset())
    for j in range(26):
        page = int(step.block_table[1, j // 64])
        ref.write_key(cache, page, j % 64, ref.read_key(step.cache, page, j % 64))
    q, q_scale = (t.clone() for t in step.q)
    weights = step.weights.clone()
    others = torch.ones(14, dtype=torch.bool)
    others[5:11] = False
    q[others], q_scale[others], weights[others] = 0x7F, 255, float("nan")
    other = SimpleNamespace(**{**vars(step), "cache": cache, "q": (q, q_scale), "weights": weights})
    assert torch.equal(select(other)[5:11], whole[5:11])


def test_later_tokens_of_the_same_request_change_no_earlier_row():
    step = prefill_step([(40, 90)], generator(8), k=9)
    whole = select(step)
    for j in range(110, 130):
        page = int(step.block_table[0, j // 64])
        ref.write_key(step.cache, page, j % 64, torch.full((68,), 0x7F, dtype=torch.uint8))
    assert torch.equal(select(step)[:20], whole[:20])


@pytest.mark.parametrize("precision, tolerance", [("exact", 2e-6), ("fast", 5e-4)])
def test_random_scales_select_the_largest_within_rounding(precision, tolerance):
    """Ordinary data: no left-out key beats a chosen one by more than twice the scoring tolerance."""
    gen = generator(9)
    step = prefill_step([(30, 170)], gen, heads=8, k=16)
    keys = step.keys
    keys[:, 64:] = random_bytes(gen, len(keys), 4, low=118, high=130)
    for j, key in enumerate(keys):
        ref.write_key(step.cache, int(step.block_table[0, j // 64]), j % 64, key)
    q, q_scale = step.q
    q_scale[:] = random_bytes(gen, *q_scale.shape, low=118, high=130)
    step.weights = torch.randn(step.weights.shape, generator=gen)
    out = select(step, precision=precision)
    ke = torch.arange(171, 201, dtype=torch.int32)
    logits, magnitude = ref.score_keys(q, q_scale, *ref.pages_of_keys(keys, 200), step.weights, 0 * ke, ke, 0.5, 200)
    for r in range(30):
        chosen = out[r].tolist()
        assert chosen == sorted(set(chosen)) and len(chosen) == 16 and chosen[-1] < ke[r]
        left = np.setdiff1d(np.arange(int(ke[r])), chosen)
        assert logits[r, chosen].min() >= logits[r, left].max() - 2 * tolerance * magnitude[r].max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_plain_query_is_quantized_first(dtype):
    step = prefill_step([(9, 70)], generator(10), heads=3)
    q = torch.randn(9, 3, 128, generator=generator(10)).to(dtype)
    step.q = ref.quantize_mxfp4(q)
    expected = select(step)
    step.q = q
    assert torch.equal(select(step), expected)


def test_bfloat16_weights():
    step = prefill_step([(9, 70)], generator(11), heads=3)
    step.weights = step.weights.bfloat16()  # -1, 1/2, 1 and 2 are exact
    assert_rows(step, select(step))


def test_same_bits_on_every_run():
    step = prefill_step([(20, 300)], generator(13), k=64)
    first = select(step)
    for _ in range(3):
        assert torch.equal(select(step), first)


def test_many_rows_and_requests_drop_none():
    step = prefill_step([(1, 0)] * 400 + [(113, 3)], generator(14), heads=1, k=2)
    assert_rows(step, select(step))


def test_chunks_without_tables_of_equal_width():
    """Two sets of different table widths, one of them exactly cdiv(keys, 64)."""
    step = prefill_step([(3, 190), (5, 1)], generator(15), key_budget=193)
    chunks = [
        SimpleNamespace(**{**vars_of(c), "block_table": c.block_table[:, :width].contiguous()})
        for c, width in zip(
            sp.build_prefill_chunks(step.query_lens, step.seq_lens, step.block_table, **step.options), (4, 1), strict=True
        )
    ]
    assert_rows(step, select(step, sp.prepare_prefill_metadata(sp.PrefillMetadata(chunks, 193), 1, 0, 1)))


def vars_of(chunk):
    names = (
        "block_table",
        "cu_seq_lens",
        "token_to_seq",
        "cu_seqlen_ks",
        "cu_seqlen_ke",
        "token_start",
        "token_end",
        "num_reqs",
        "total_seq_lens",
        "max_seqlen_k",
        "request_set",
    )
    return {name: getattr(chunk, name) for name in names}


@pytest.mark.parametrize("entry", [-1, INT32_MAX, -(2**31), 10**6])
def test_bad_table_entries_are_memory_safe(entry):
    step = prefill_step([(3, 130), (4, 60)], generator(16))
    good = select(step)
    step.block_table[0, 1] = entry
    memory = ref.storage_bytes(step.cache).clone()
    try:
        out = select(step)
    except (ValueError, IndexError):
        return
    assert torch.equal(out[3:], good[3:])
    assert torch.equal(ref.storage_bytes(step.cache), memory)


@pytest.mark.parametrize("ks, ke", [(-5, 10), (0, INT32_MAX), (-(2**31), INT32_MAX), (50, 10), (500, 600), (INT32_MAX, -(2**31))])
def test_bad_windows_are_memory_safe(ks, ke):
    step = prefill_step([(3, 60)], generator(17))
    (chunk,) = sp.build_prefill_chunks(step.query_lens, step.seq_lens, step.block_table, **step.options)
    bad = SimpleNamespace(**{**vars_of(chunk), "cu_seqlen_ks": int32([0, ks, 0]), "cu_seqlen_ke": int32([61, ke, 63])})
    try:
        out = select(step, sp.prepare_prefill_metadata(sp.PrefillMetadata([bad], 63), 1, 0, 1))
    except (ValueError, IndexError):
        return
    assert torch.equal(out[[0, 2]], step.expected[[0, 2]])


def test_layouts_are_refused_by_name():
    step = prefill_step([(3, 60)], generator(18))
    out = step.out.clone()
    with pytest.raises(ValueError, match="preshuffled64"):
        sp.prefill_chunks(step.q, step.weights, step.cache, out, prepared(step), 1, 1, 0.5, layout="token_major")
    assert torch.equal(out, step.out)


def test_scratch_stays_below_prefill_workspace_bytes():
    """A full tile of logits (8,192 rows by 16,384 keys by 4 bytes = 2^29) in a fresh process: its peak resident size."""
    script = textwrap.dedent(
        """
        import resource, torch, sparse_prefill as sp
        torch.set_num_threads(2)
        rows, keys, k = 8192, 16384, 16
        cache = torch.randint(0, 255, (keys // 64, 64, 68), dtype=torch.uint8)
        cache.view(-1, 4352)[:, 4096:] = 127
        q = (torch.randint(0, 255, (rows, 1, 64), dtype=torch.uint8), torch.full((rows, 1, 4), 127, dtype=torch.uint8))
        weights, out = torch.ones(rows, 1), torch.zeros(rows, k, dtype=torch.int32)
        table = torch.arange(keys // 64, dtype=torch.int32)[None]

        def run(first):
            chunks = sp.build_prefill_chunks([rows - first], [keys], table, key_budget=keys)
            metadata = sp.prepare_prefill_metadata(sp.PrefillMetadata(chunks, keys), 1, 0, 1)
            sp.prefill_chunks(q, weights, cache, out, metadata, 1, 1, 1.0)

        run(rows - 64)  # threads, libraries and caches are not scratch
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        run(0)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        bound = sp.prefill_workspace_bytes(keys, 1, 1, 1, max_rows=rows, k=k)
        assert used <= bound, (used, bound)
        """
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
