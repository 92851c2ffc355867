import pytest
import reference as ref
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import HISTORY_LAYOUTS, INT32_MAX, assert_attended, generator, int32, paged_set, random_regions

import sparse_prefill as sp

SCALE = 0.3


def workspace():
    return torch.empty(1024, dtype=torch.uint8)


def case(seed, positions_of, *, heads=3, dim=16, region_count=5, dtype=torch.bfloat16, **options):
    gen = generator(seed)
    lengths = [max([p + 1 for p in positions], default=0) for positions in positions_of]
    sample = paged_set(lengths, gen, dim=dim, dtype=dtype, tail=INT32_MAX, **options)
    positions = [p for own in positions_of for p in own]
    owners = int32([r for r, own in enumerate(positions_of) for _ in own])
    return (
        sample,
        positions,
        owners,
        random_regions(gen, positions, region_count),
        torch.randn(len(positions), heads, dim, generator=gen).to(dtype),
    )


def exact(sample, positions, owners, regions, query):
    indptr, last_page_len = ref.compact_page_metadata(positions, regions.shape[1])
    pages = torch.zeros(indptr[-1], dtype=torch.int32)
    ref.fill_prefill_pages(
        regions, sample.table, owners, int32(indptr), pages, sample.block_size, ref.kv_page_stride(sample.cache)
    )
    return ref.paged_attention(query, sample.cache, pages, int32(indptr), int32(last_page_len), SCALE)


def write_pages(metadata, regions, rows=slice(None)):
    """What a fused selector does with page_metadata: page ids of its rows, straight into the plan's pages."""
    ref.fill_prefill_pages(
        regions[rows], metadata.table, metadata.owners, metadata.indptr, metadata.pages, metadata.block_size, metadata.page_stride
    )


def run_owned(plan, sample, owners, regions, query, chunk=10**9):
    for first in range(0, len(query), chunk):
        part = slice(first, first + chunk)
        plan.prepare_chunk(first, query[part], sample.cache, regions[part], sample.table, owners[part])
    out = torch.full(query.shape, float("nan"), dtype=query.dtype)
    plan.finish(torch.full_like(query, float("nan")), sample.cache, out)
    return out


ROWS = st.lists(st.lists(st.integers(-1, 120), max_size=6), min_size=1, max_size=3)


@given(
    st.integers(0, 2**32),
    ROWS,
    st.sampled_from([1, 2, 5, 20]),
    st.sampled_from(HISTORY_LAYOUTS),
    st.sampled_from([8, 16, 64]),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from(["list", torch.int32, torch.int64]),
)
def test_chunks_of_an_owned_query(seed, positions_of, region_count, layout, block_size, dtype, chunk, fixed, kind):
    """contiguous_query=False: the plan keeps the query of every chunk, finish does not look at its own."""
    sample, positions, owners, regions, query = case(
        seed, positions_of, region_count=region_count, layout=layout, block_size=block_size, dtype=dtype, group=1
    )
    plan = sp.CompactPagedPrefill(workspace(), max_rows=32 if fixed else None)
    given_positions = positions if kind == "list" else torch.tensor(positions, dtype=kind)
    plan.plan(query.shape, dtype, query.device, given_positions, region_count, SCALE, block_size, contiguous_query=False)
    assert plan.page_metadata(sample.table, owners, ref.kv_page_stride(sample.cache)) is None
    assert_attended(run_owned(plan, sample, owners, regions, query, chunk), exact(sample, positions, owners, regions, query))


@given(st.integers(0, 2**32), ROWS, st.sampled_from([1, 2, 5, 20]), st.sampled_from([8, 16, 64]), st.booleans())
def test_pages_written_by_the_selector(seed, positions_of, region_count, block_size, fixed):
    """contiguous_query=True: finish reads its query; page_metadata tells a fused selector where page ids go."""
    sample, positions, owners, regions, query = case(seed, positions_of, region_count=region_count, block_size=block_size)
    plan = sp.CompactPagedPrefill(workspace(), max_rows=32 if fixed else None)
    plan.plan(query.shape, query.dtype, query.device, positions, region_count, SCALE, block_size)
    page_stride = ref.kv_page_stride(sample.cache)
    middle = len(positions) // 2
    for start, end in ((0, middle), (middle, None)):
        part = slice(start, end)
        metadata = plan.page_metadata(sample.table, owners, page_stride, start, end)
        assert isinstance(metadata, sp.PagedPrefillMetadata)
        assert (metadata.block_size, metadata.page_stride) == (block_size, page_stride)
        assert torch.equal(metadata.owners, owners[part]) and torch.equal(metadata.table, sample.table)
        assert metadata.indptr.dtype == metadata.pages.dtype == torch.int32
        assert len(metadata.indptr) == len(positions[part]) + 1
        write_pages(metadata, regions, part)
    out = torch.full(query.shape, float("nan"), dtype=query.dtype)
    plan.finish(query, sample.cache, out)
    assert_attended(out, exact(sample, positions, owners, regions, query))


@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(-1, 90), st.integers(0, 40)), min_size=1, max_size=8), st.booleans())
def test_bounds_then_exact_positions(seed, pairs, owned):
    """The host plans with upper bounds; fixup_positions puts the exact positions in their place."""
    positions = [p for p, _ in pairs]
    bounds = [p + more for p, more in pairs]
    sample, _, owners, regions, query = case(seed, [positions])
    plan = sp.CompactPagedPrefill(workspace(), max_rows=16)
    plan.plan(query.shape, query.dtype, query.device, bounds, 5, SCALE, 16, contiguous_query=not owned)
    plan.fixup_positions(torch.tensor(positions))
    if owned:
        out = run_owned(plan, sample, owners, regions, query)
    else:
        write_pages(plan.page_metadata(sample.table, owners, ref.kv_page_stride(sample.cache)), regions)
        out = torch.full(query.shape, float("nan"), dtype=query.dtype)
        plan.finish(query, sample.cache, out)
    assert_attended(out, exact(sample, positions, owners, regions, query))


def test_one_plan_serves_every_group_and_step():
    plan = sp.CompactPagedPrefill(workspace(), max_rows=8)
    sample, positions, owners, regions, query = case(1, [[60, 61], [30]])
    plan.plan(query.shape, query.dtype, query.device, positions, 5, SCALE, 16, contiguous_query=False)
    for seed in (2, 3):
        sample, _, owners, regions, query = case(seed, [[60, 61], [30]], layout="HND", group=1)
        assert_attended(run_owned(plan, sample, owners, regions, query), exact(sample, positions, owners, regions, query))


def test_fewer_rows_after_more_leave_no_trace():
    """Buffers of the longer step are poison to the shorter one."""
    plan = sp.CompactPagedPrefill(workspace(), max_rows=64)
    for seed, lengths in ((1, [list(range(40, 90))]), (2, [[17], [3]]), (3, [[-1, 5]]), (4, [list(range(64))])):
        sample, positions, owners, regions, query = case(seed, lengths)
        plan.plan(query.shape, query.dtype, query.device, positions, 5, SCALE, 16, contiguous_query=False)
        assert_attended(run_owned(plan, sample, owners, regions, query), exact(sample, positions, owners, regions, query))


def test_buffers_grow_without_max_rows():
    plan = sp.CompactPagedPrefill(workspace())
    for rows in (1, 3, 70, 2, 200):
        sample, positions, owners, regions, query = case(rows, [[(5 * r) % 90 for r in range(rows)]], dim=4)
        plan.plan(query.shape, query.dtype, query.device, positions, 5, SCALE, 16, contiguous_query=False)
        assert_attended(run_owned(plan, sample, owners, regions, query), exact(sample, positions, owners, regions, query))


def test_two_plans_run_interleaved():
    cases = [case(seed, [[60, 61 - seed], [30]]) for seed in (1, 2)]
    plans = [sp.CompactPagedPrefill(workspace(), max_rows=8) for _ in cases]
    for plan, (_, positions, _, _, query) in zip(plans, cases, strict=True):
        plan.plan(query.shape, query.dtype, query.device, positions, 5, SCALE, 16, contiguous_query=False)
    for plan, (sample, _, owners, regions, query) in zip(plans, cases, strict=True):
        plan.prepare_chunk(0, query, sample.cache, regions, sample.table, owners)
    for plan, (sample, positions, owners, regions, query) in zip(plans, cases, strict=True):
        out = torch.full_like(query, float("nan"))
        plan.finish(query, sample.cache, out)
        assert_attended(out, exact(sample, positions, owners, regions, query))


def test_padding_rows_end_exactly_zero():
    sample, positions, owners, regions, query = case(5, [[-1, 40, -1, 9]])
    plan = sp.CompactPagedPrefill(workspace(), max_rows=8)
    plan.plan(query.shape, query.dtype, query.device, positions, 5, SCALE, 16, contiguous_query=False)
    out = run_owned(plan, sample, owners, regions, query)
    assert not out[[0, 2]].any() and out[[1, 3]].any()


def test_an_empty_step():
    sample, positions, owners, regions, query = case(6, [[]])
    plan = sp.CompactPagedPrefill(workspace(), max_rows=8)
    plan.plan(query.shape, query.dtype, query.device, positions, 5, SCALE, 16, contiguous_query=False)
    assert run_owned(plan, sample, owners, regions, query).shape == (0, 3, 16)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_fp8_caches_with_scales_given_to_finish(as_bytes):
    sample, positions, owners, regions, query = case(7, [[60, 9]])
    fp8 = paged_set([61], generator(7), dtype=torch.float8_e4m3fn)
    plan = sp.CompactPagedPrefill(workspace(), max_rows=8)
    plan.plan(query.shape, query.dtype, query.device, positions, 5, SCALE, 16, contiguous_query=False)
    cache = fp8.cache.view(torch.uint8) if as_bytes else fp8.cache
    plan.prepare_chunk(0, query, cache, regions, fp8.table, owners)
    out = torch.full_like(query, float("nan"))
    plan.finish(query, cache, out, k_scale=torch.tensor([0.5]), v_scale=torch.tensor([2.0]))
    indptr, last_page_len = ref.compact_page_metadata(positions, 5)
    pages = torch.zeros(indptr[-1], dtype=torch.int32)
    ref.fill_prefill_pages(regions, fp8.table, owners, int32(indptr), pages, 16, ref.kv_page_stride(fp8.cache))
    assert_attended(out, ref.paged_attention(query, fp8.cache, pages, int32(indptr), int32(last_page_len), SCALE, 0.5, 2.0))


def test_a_query_of_any_row_stride():
    sample, positions, owners, regions, query = case(8, [[60, 9, 33]])
    wide = torch.full((3, 2, 3, 16), float("nan"), dtype=query.dtype)
    wide[:, 1] = query
    plan = sp.CompactPagedPrefill(workspace(), max_rows=8)
    plan.plan(query.shape, query.dtype, query.device, positions, 5, SCALE, 16, contiguous_query=False)
    assert_attended(run_owned(plan, sample, owners, regions, wide[:, 1]), exact(sample, positions, owners, regions, query))


def test_planning_many_rows_takes_no_loop_over_them():
    """16,384 rows: a Python loop over rows would take tens of milliseconds; the bound is wide for slow machines."""
    import time

    plan = sp.CompactPagedPrefill(workspace(), max_rows=16384)
    positions = torch.arange(16384, dtype=torch.int64)
    arguments = ((16384, 1, 8), torch.bfloat16, torch.device("cpu"), positions, 4, SCALE, 64)
    plan.plan(*arguments)
    best = min(timed(time.perf_counter, plan.plan, *arguments) for _ in range(5))
    assert best < 0.02


def timed(clock, function, *arguments):
    start = clock()
    function(*arguments)
    return clock() - start


def test_positions_are_host_data():
    """plan is host code: its positions are a sequence or a CPU tensor and are not changed."""
    sample, positions, owners, regions, query = case(9, [[60, 9]])
    tensor = torch.tensor(positions)
    before = tensor.clone()
    plan = sp.CompactPagedPrefill(workspace(), max_rows=4)
    plan.plan(query.shape, query.dtype, query.device, tensor, 5, SCALE, 16)
    plan.fixup_positions(tensor)
    assert torch.equal(tensor, before)


def test_more_rows_than_max_rows_are_refused():
    plan = sp.CompactPagedPrefill(workspace(), max_rows=2)
    with pytest.raises(ValueError, match="max_rows"):
        plan.plan((3, 2, 8), torch.bfloat16, torch.device("cpu"), [1, 2, 3], 5, SCALE, 16)


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_backends_by_name(backend):
    sample, positions, owners, regions, query = case(10, [[60, 9]])
    plan = sp.CompactPagedPrefill(workspace(), backend=backend)
    plan.plan(query.shape, query.dtype, query.device, positions, 5, SCALE, 16, contiguous_query=False)
    assert_attended(run_owned(plan, sample, owners, regions, query), exact(sample, positions, owners, regions, query))


@pytest.mark.parametrize("backend", ["", "cuda", "Torch"])
def test_unknown_backends_are_refused(backend):
    with pytest.raises(ValueError, match="backend"):
        sp.CompactPagedPrefill(workspace(), backend=backend)


@pytest.mark.parametrize("call", ["fixup_positions", "page_metadata", "prepare_chunk", "finish"])
def test_calls_before_plan_are_refused(call):
    sample, positions, owners, regions, query = case(11, [[60, 9]])
    plan = sp.CompactPagedPrefill(workspace())
    arguments = {
        "fixup_positions": (torch.tensor(positions),),
        "page_metadata": (sample.table, owners, 2),
        "prepare_chunk": (0, query, sample.cache, regions, sample.table, owners),
        "finish": (query, sample.cache, torch.empty_like(query)),
    }[call]
    with pytest.raises((ValueError, RuntimeError), match="plan"):
        getattr(plan, call)(*arguments)


class TestCompiled:
    """All but plan is traced: one graph without breaks, equal to eager code."""

    @pytest.fixture(autouse=True)
    def _fresh(self, fresh_compile):
        pass

    def test_plan_is_refused_inside_a_graph_by_name(self):
        plan = sp.CompactPagedPrefill(workspace(), max_rows=4)

        def step(query):
            plan.plan((4, 3, 16), torch.bfloat16, torch.device("cpu"), [1, 2, 3, 4], 5, SCALE, 16)
            return query + 1

        with pytest.raises(Exception, match="CompactPagedPrefill.plan"):
            torch.compile(step, backend="eager", fullgraph=True)(torch.zeros(1))

    def test_one_graph_serves_every_number_of_rows(self):
        from torch._dynamo.testing import CompileCounterWithBackend

        plan = sp.CompactPagedPrefill(workspace(), max_rows=64)

        def step(query, cache, regions, table, owners, positions, out):
            plan.fixup_positions(positions)
            plan.prepare_chunk(0, query, cache, regions, table, owners)
            plan.finish(None, cache, out)

        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(step, backend=counter, fullgraph=True)
        for seed, own in enumerate(([50, 51, 20], [-1, 4], [33], [], list(range(40)), [7] * 9)):
            sample, positions, owners, regions, query = case(
                seed, [own, [60]], spare=20 - sum(ref.cdiv(p + 1, 16) for p in [max(own, default=-1)])
            )
            if not own:
                owners, regions, query, positions = owners[:0], regions[:0], query[:0], []
            plan.plan(query.shape, query.dtype, query.device, positions, 5, SCALE, 16, contiguous_query=False)
            out, exact_positions = torch.full_like(query, float("nan")), torch.tensor(positions, dtype=torch.int64)
            table = torch.full((2, 8), INT32_MAX, dtype=torch.int32)
            table[:, : sample.table.shape[1]] = sample.table
            sample.table = table
            sp.mark_unbacked_sizes(query, regions, owners, exact_positions, out)
            compiled(query, sample.cache, regions, table, owners, exact_positions, out)
            assert_attended(out, exact(sample, positions, owners, regions, query))
        assert counter.frame_count == 1


@pytest.mark.parametrize("device", ["banana", "cpu:x", 1.5])
def test_a_device_torch_has_not_is_named(device):
    plan = sp.CompactPagedPrefill(None)
    with pytest.raises((TypeError, ValueError), match=r"plan: device was .*, must be"):
        plan.plan((1, 1, 4), torch.float32, device, [0], 2, 1.0, 8)
    assert plan.pages is None
