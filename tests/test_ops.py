"""What torch asks of a registered op: opcheck over sample inputs, fakes that agree with kernels, one signature everywhere."""

import importlib
import inspect
import itertools

import pytest
import reference as ref
import torch
from samples import (
    HISTORY_LAYOUTS,
    generator,
    index_cache,
    index_set,
    int32,
    kv_cache,
    paged_set,
    prefill_step,
    random_query,
    random_regions,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import sparse_prefill as sp
from sparse_prefill.library import OPS

NAMESPACE = torch.ops.sparse_prefill
# Registered once each; exact strides, because kernels see what eager code passes.
TAGS = {torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides}
HOST_DRIVEN = {"prefill_chunks"}


def zeros(*shape, dtype=torch.int32):
    return torch.zeros(*shape, dtype=dtype)


def store_sample(n=5, blocks=2, dtype=torch.int64):
    return torch.randn(n, 128, generator=generator(0)).bfloat16(), index_cache(blocks, fill=0), torch.arange(n, dtype=dtype)


def stage_sample(lengths=(70, 0, 3)):
    sample = index_set(list(lengths), generator(0))
    return sample.cache, sample.block_table, sample.cu_seq_lens, sample.token_to_seq


def pack_sample(lengths=(70, 3), most=128):
    sample = index_set(list(lengths), generator(0))
    return sample.cache, sample.block_table, sample.cu_seq_lens, most


def restore_sample(lengths=(70, 3), world=2):
    all_cu = ref.all_local_cu(lengths, world, 1)
    token_to_seq = int32([r for r, n in enumerate(lengths) for _ in range(n)])
    return zeros(world * 64, 68, dtype=torch.uint8), token_to_seq, int32(ref.cumulative(lengths)), all_cu, world, 1


def score_sample(rows=4, heads=3, total=70, packed=True, weights=torch.float32):
    gen = generator(0)
    payload, scales = ref.pages_of_keys(torch.full((total, 68), 120, dtype=torch.uint8), total)
    q, q_scale = random_query(gen, rows, heads) if packed else (torch.randn(rows, heads, 128, generator=gen).bfloat16(), None)
    w = torch.randn(rows, heads, generator=gen).to(weights)
    return q, q_scale, payload, scales, w, zeros(rows), zeros(rows) + total, 0.5, "exact"


def select_sample(rows=4, total=30, k=5):
    return torch.randn(rows, total, generator=generator(0)), zeros(rows), zeros(rows) + total, k, min(1, k), 0


def prefill_sample(requests=((3, 70), (1, 20)), packed=True):
    step = prefill_step(list(requests), generator(1))
    chunks = sp.build_prefill_chunks(step.query_lens, step.seq_lens, step.block_table, **step.options)
    plans = sp.prepare_prefill_metadata(sp.PrefillMetadata(chunks, 73), 1, 0, 1).plans
    q, q_scale = step.q if packed else (torch.randn(len(step.out), 2, 128, generator=generator(2)).bfloat16(), None)
    tables = (
        plans.sets,
        plans.chunks,
        plans.tiles,
        plans.block_tables,
        plans.cu_seq_lens,
        plans.token_to_seq,
        plans.ks,
        plans.ke,
    )
    return q, q_scale, step.weights, step.cache, step.out, *tables, plans.all_cu, 1, 1, 0.5, 1, 0, "exact"


def append_sample(rows=4, k=3, dtype=torch.int64):
    return zeros(rows, k) + torch.arange(k, dtype=torch.int32), torch.arange(rows, dtype=dtype) * 9


def fixup_sample(rows=4, buffer=6, dtype=torch.int64):
    return torch.arange(rows, dtype=dtype) * 9, zeros(buffer + 1) - 7, zeros(buffer) - 7, 3


def fill_sample(rows=4, start=1, dtype=torch.bfloat16):
    positions = [(13 * r) % 40 for r in range(rows)]
    indptr = [0] * start + ref.compact_page_metadata(positions, 3)[0]
    query = torch.randn(rows, 2, 4, generator=generator(0)).to(dtype)
    kept = torch.full((rows + start + 2, 2, 4), 7.0, dtype=dtype)
    return (
        random_regions(generator(0), positions, 3),
        zeros(2, 3),
        zeros(rows),
        int32(indptr),
        zeros(3 * rows + 4) - 7,
        16,
        query,
        kept,
        2,
        start,
        50,
    )


def owners_sample(rows=3, start=2):
    return torch.arange(rows, dtype=torch.int32), zeros(rows + start + 1) - 7, start


def stage_pages_sample(count=3, dtype="bfloat16", source=torch.float32):
    cache = kv_cache(4, 8, 4, source, fill=1.5)
    if source == torch.float8_e4m3fn:
        cache = cache.view(torch.uint8)
        cache.fill_(56)
    scales = (torch.tensor([0.5]), torch.tensor([2.0])) if source == torch.float8_e4m3fn else (None, None)
    return cache, torch.arange(count, dtype=torch.int32) % 4, dtype, *scales


def attention_sample(rows=4, heads=2, dtype=torch.float32, source=None):
    sample = paged_set([40, 30], generator(3), dim=8, dtype=source or dtype)
    positions = [(9 * r) % 30 for r in range(rows)]
    regions = random_regions(generator(3), positions, 3)
    indptr, last_page_len = ref.compact_page_metadata(positions, 3)
    owners, pages = zeros(rows), zeros(indptr[-1])
    ref.fill_prefill_pages(regions, sample.table, owners, int32(indptr), pages, 16, ref.kv_page_stride(sample.cache))
    query = torch.randn(rows, heads, 8, generator=generator(4)).to(dtype)
    out = torch.full_like(query, 7.0)
    cache, scales = sample.cache, (None, None)
    if source == torch.float8_e4m3fn:
        cache, scales = cache.view(torch.uint8), (torch.tensor([0.5]), torch.tensor([2.0]))
    return query, cache, pages, int32(indptr), int32(last_page_len), owners, out, 0.3, *scales, "auto"


SAMPLES = {
    "store_index_keys": (store_sample, [dict(), dict(n=0), dict(n=70, dtype=torch.int32)]),
    "stage_keys": (stage_sample, [dict(), dict(lengths=()), dict(lengths=(64,)), dict(lengths=(0, 0))]),
    "pack_keys": (pack_sample, [dict(), dict(lengths=(), most=0), dict(most=192)]),
    "restore_keys": (restore_sample, [dict(), dict(lengths=()), dict(lengths=(64,), world=1)]),
    "score_keys": (
        score_sample,
        [dict(), dict(rows=0), dict(total=0), dict(total=128, heads=1, weights=torch.bfloat16), dict(packed=False)],
    ),
    "select_keys": (select_sample, [dict(), dict(rows=0), dict(total=0), dict(total=3), dict(k=1)]),
    "prefill_chunks": (prefill_sample, [dict(), dict(requests=((1, 0),)), dict(packed=False), dict(requests=((0, 5),))]),
    "append_own_region": (append_sample, [dict(), dict(rows=0), dict(k=0), dict(dtype=torch.int32)]),
    "fixup_positions": (fixup_sample, [dict(), dict(rows=0), dict(buffer=4, dtype=torch.int32)]),
    "fill_prefill_pages": (fill_sample, [dict(), dict(rows=0), dict(start=0, dtype=torch.float16)]),
    "store_owners": (owners_sample, [dict(), dict(rows=0), dict(start=0)]),
    "stage_prefill_pages": (
        stage_pages_sample,
        [
            dict(),
            dict(count=0),
            dict(dtype="float16"),
            dict(source=torch.float8_e4m3fn),
            dict(source=torch.bfloat16, dtype="float32"),
        ],
    ),
    "paged_attention": (
        attention_sample,
        [dict(), dict(rows=0), dict(dtype=torch.bfloat16, heads=3), dict(source=torch.float8_e4m3fn, dtype=torch.bfloat16)],
    ),
}
NAMES = [op.name for op in OPS]
CASES = [(name, options) for name in NAMES for options in SAMPLES[name][1]]
ids = [f"{name}-{i}" for i, (name, _) in enumerate(CASES)]


def overload(name):
    return getattr(NAMESPACE, name).default


def test_every_op_of_the_table_has_samples():
    assert set(NAMES) <= set(SAMPLES)
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("name, options", CASES, ids=ids)
def test_opcheck(name, options, fresh_compile):
    arguments = SAMPLES[name][0](**options)
    torch.library.opcheck(overload(name), arguments)


@pytest.mark.parametrize("layout", HISTORY_LAYOUTS)
def test_opcheck_view(layout, fresh_compile):
    cache = kv_cache(3, 16, 4, torch.float32, layout=layout, group=1, fill=1.0)
    torch.library.opcheck(overload("view_sparse_kv_pages"), (cache,))


# Fakes: shape, dtype, device and strides of what the kernel returns


def grid():
    for name in NAMES:
        if name == "stage_keys":
            yield from ((name, dict(lengths=lengths)) for lengths in ((), (0,), (1,), (63,), (64,), (65, 64), (0, 200, 0)))
        elif name == "pack_keys":
            yield from ((name, dict(lengths=(3,), most=most)) for most in (64, 128, 192))
        elif name == "restore_keys":
            yield from ((name, dict(lengths=lengths, world=world)) for lengths in ((), (1,), (63,), (65,)) for world in (1, 2, 4))
        elif name == "score_keys":
            yield from (
                (name, dict(rows=rows, total=total)) for rows, total in itertools.product((0, 1, 2, 5), (0, 1, 64, 65, 200))
            )
        elif name == "select_keys":
            sizes = itertools.product((0, 1, 5), (0, 1, 30), (1, 5, 40))
            yield from ((name, dict(rows=rows, total=total, k=k)) for rows, total, k in sizes)
        elif name == "append_own_region":
            yield from ((name, dict(rows=rows, k=k)) for rows, k in itertools.product((0, 1, 5), (0, 1, 7)))
        elif name == "stage_prefill_pages":
            counts = itertools.product((0, 1, 2, 9), ("bfloat16", "float16", "float32"))
            yield from ((name, dict(count=count, dtype=dtype)) for count, dtype in counts)
        else:
            yield from ((name, options) for options in SAMPLES[name][1])


def facts(result):
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    return [(tuple(t.shape), t.dtype, t.device, tuple(t.stride()), t.storage_offset()) for t in results]


@pytest.mark.parametrize("name, options", list(grid()), ids=lambda value: str(value).replace("torch.", ""))
def test_fake_results_are_the_kernels(name, options):
    arguments = SAMPLES[name][0](**options)
    with FakeTensorMode() as mode:
        fake_arguments = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        fake = facts(overload(name)(*fake_arguments))
    before = [t.untyped_storage().data_ptr() for t in arguments if isinstance(t, torch.Tensor)]
    result = overload(name)(*arguments)
    assert facts(result) == fake
    # Results are fresh: no alias of an input.
    for tensor in result if isinstance(result, tuple) else [result] if result is not None else []:
        assert tensor.numel() == 0 or tensor.untyped_storage().data_ptr() not in before


@pytest.mark.parametrize("name", NAMES)
def test_fakes_run_on_another_device_without_it(name):
    """No kernel is imported to trace for a GPU: the fake alone answers."""
    arguments = SAMPLES[name][0]()
    host_tables = ("sets", "chunks", "tiles")
    names = [argument.name for argument in overload(name)._schema.arguments]

    def on(device, name, argument):
        if not isinstance(argument, torch.Tensor):
            return argument
        device = "cpu" if name in host_tables else device
        return torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device=device)

    with FakeTensorMode():
        expected, result = (
            facts(overload(name)(*[on(device, n, a) for n, a in zip(names, arguments, strict=True)]))
            for device in ("cpu", "cuda")
        )
    assert [f[:2] + f[3:] for f in result] == [f[:2] + f[3:] for f in expected]
    assert all(f[2].type == "cuda" for f in result)


# Signatures and tags


@pytest.mark.parametrize("op", OPS, ids=NAMES)
def test_schema_kernel_fake_and_check_agree_on_arguments(op):
    schema = overload(op.name)._schema
    names = [argument.name for argument in schema.arguments]
    assert not any(argument.has_default_value() for argument in schema.arguments), (
        "the dispatcher drops arguments equal to a default"
    )
    assert not any(argument.kwarg_only for argument in schema.arguments)
    functions = [
        getattr(importlib.import_module(f"sparse_prefill.cpu.{op.stem}"), op.name),
        getattr(importlib.import_module(f"sparse_prefill.meta.{op.stem}"), op.name),
        getattr(importlib.import_module("sparse_prefill.validation"), op.name),
    ]
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters] == names
        assert all(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


@pytest.mark.parametrize("name", [*NAMES, "view_sparse_kv_pages"])
def test_tags(name):
    tags = set(overload(name).tags)
    assert TAGS <= tags
    assert (torch.Tag.cudagraph_unsafe in tags) == (name in HOST_DRIVEN)


def test_splitting_ops_are_those_that_no_capture_holds():
    assert set(sp.splitting_ops()) == {f"sparse_prefill::{name}" for name in HOST_DRIVEN}


@pytest.mark.parametrize("name", NAMES)
def test_an_op_mutates_or_returns(name):
    """An op with neither is deleted as dead code."""
    schema = overload(name)._schema
    mutated = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert bool(mutated) != bool(schema.returns)
    assert all(r.alias_info is None for r in schema.returns)


@pytest.mark.parametrize("name, options", CASES, ids=ids)
def test_only_declared_arguments_are_written(name, options):
    arguments = SAMPLES[name][0](**options)
    schema = overload(name)._schema.arguments
    read = [
        a
        for a, s in zip(arguments, schema, strict=True)
        if isinstance(a, torch.Tensor) and not (s.alias_info and s.alias_info.is_write)
    ]
    before = [ref.storage_bytes(t).clone() for t in read]
    overload(name)(*arguments)
    assert all(torch.equal(ref.storage_bytes(t), b) for t, b in zip(read, before, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_ops_run_alike_in_every_grad_mode(name):
    results = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            arguments = SAMPLES[name][0]()
            result = overload(name)(*arguments)
            kept = [result] if isinstance(result, torch.Tensor) else list(result or ())
            results.append([ref.storage_bytes(t).clone() for t in kept + [a for a in arguments if isinstance(a, torch.Tensor)]])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


class TestCompiled:
    """Inductor on whole buffers: nothing dropped, reordered or read from the wrong place."""

    @pytest.fixture(autouse=True)
    def _fresh(self, fresh_compile):
        pass

    def test_mutating_ops_are_kept_when_nothing_reads_their_results(self):
        regions, table, owners, indptr, pages, block_size, query, kept, page_stride, start, num_pages = fill_sample()
        owners_kept = zeros(8) - 7

        def step(pages, kept, owners_kept):
            sp.fill_prefill_pages(
                regions, table, owners, indptr, pages, block_size, query, kept, page_stride, start=start, num_pages=num_pages
            )
            NAMESPACE.store_owners(owners + 3, owners_kept, 2)

        expected = [t.clone() for t in (pages, kept, owners_kept)]
        step(*expected)
        actual = [t.clone() for t in (pages, kept, owners_kept)]
        torch.compile(step, fullgraph=True)(*actual)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
        assert not torch.equal(actual[0], pages) and not torch.equal(actual[2], owners_kept)

    def test_a_copy_read_beside_the_written_original_stays_a_copy_or_is_refused(self):
        """y = x.clone(); op(y, x): torch up to 2.14 passes x twice; the kernel must not see half-written input."""
        arguments = list(attention_sample())
        query = arguments[0]

        def step(out):
            copy = out.clone()
            sp.paged_attention(copy, *arguments[1:6], out, 0.3)
            return out

        expected = step(query.clone())
        try:
            actual = torch.compile(step, fullgraph=True)(query.clone())
        except Exception as error:
            assert "overlap" in str(error)
            return
        assert torch.equal(actual, expected)

    def test_two_fills_of_one_buffer_with_a_read_between(self):
        """Layers and chunks refill the same pages: every reader sees its own layer's."""
        arguments = attention_sample()
        query, cache, pages, indptr, last_page_len, owners, out = arguments[:7]
        regions = [random_regions(generator(seed), [(9 * r) % 30 for r in range(4)], 3) for seed in (1, 2)]
        table = int32([[0, 1, 2], [3, 4, 1]])

        def step(query, pages, kept, first, second):
            for layer, out in enumerate((first, second)):
                sp.fill_prefill_pages(
                    regions[layer], table, owners, indptr, pages, 16, query, kept, ref.kv_page_stride(cache), num_pages=20
                )
                sp.paged_attention(kept, cache, pages, indptr, last_page_len, owners, out, 0.3)

        cache = torch.nan_to_num(cache, nan=0.5)
        results = []
        for function in (step, torch.compile(step, fullgraph=True)):
            buffers = [pages.clone(), torch.zeros_like(query), torch.zeros_like(out), torch.zeros_like(out)]
            function(query, *buffers)
            results.append(buffers)
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)

    def test_one_compilation_for_every_number_of_rows_and_keys(self):
        from torch._dynamo.testing import CompileCounter

        counter = CompileCounter()
        compiled = torch.compile(sp.score_keys, backend=counter, fullgraph=True)
        for rows, total in ((5, 200), (3, 64), (2, 130), (1, 1), (0, 0), (9, 300)):
            q, q_scale, payload, scales, weights, ks, ke, weight_scale, _ = score_sample(rows=rows, total=total)
            sp.mark_unbacked_sizes(q, q_scale, payload, scales, weights, ks, ke)
            actual = compiled((q, q_scale), payload, scales, weights, ks, ke, weight_scale=weight_scale)
            assert torch.equal(actual, sp.score_keys((q, q_scale), payload, scales, weights, ks, ke, weight_scale=weight_scale))
        assert counter.frame_count == 1

    def test_one_compilation_for_every_number_of_chunks(self):
        from torch._dynamo.testing import CompileCounter

        counter = CompileCounter()
        compiled = torch.compile(sp.prefill_chunks, backend=counter, fullgraph=True)
        for requests, budget in (
            ([(3, 70), (2, 20)], 80),
            ([(4, 9)], 10**6),
            ([(1, 0)], 10**6),
            ([(5, 70)] * 4, 80),
            ([(2, 0)] * 3, 1),
        ):
            step = prefill_step(requests, generator(len(requests)), key_budget=budget)
            chunks = sp.build_prefill_chunks(step.query_lens, step.seq_lens, step.block_table, **step.options)
            metadata = sp.prepare_prefill_metadata(sp.PrefillMetadata(chunks, 75), 1, 0, 1)
            sp.mark_unbacked_sizes(*step.q, step.weights, step.cache, step.out, metadata)
            compiled(step.q, step.weights, step.cache, step.out, metadata, 1, 1, step.weight_scale)
            assert torch.equal(step.out, step.expected)
        assert counter.frame_count == 1
