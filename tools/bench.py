"""Times the whole sparse prefill of one step on this machine's CPU, op by op: ``python -m sparse_prefill.tools.bench``.

By default 2,048 rows at the end of 32,768 tokens (4,096 region keys), 32 index heads, one KV group of 16 query heads of dim 128,
and 512 history regions a row beside its own. Region keys, queries, keys and values are random.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from .timing import Stopwatch, gigabytes, peak_bytes, resident_bytes

REGION = 8
INDEX_PAGE = 64
INDEX_DIM = 128


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sparse_prefill.tools.bench",
        description=__doc__.split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=2048, help="rows of the step")
    parser.add_argument("--history", type=int, default=32768, help="tokens of the request, the step's included")
    parser.add_argument("--index-heads", type=int, default=32, help="heads of the index queries")
    parser.add_argument("--heads", type=int, default=16, help="query heads of the KV group")
    parser.add_argument("--dim", type=int, default=128, help="head_dim of queries, keys and values")
    parser.add_argument("--regions", type=int, default=512, help="history regions a row attends to, its own not counted")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the KV cache")
    parser.add_argument("--repeat", type=int, default=1, help="steps after a first one; the fastest is printed")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(argv)
    for name in ("rows", "index_heads", "heads", "dim", "regions", "repeat"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} was {getattr(options, name)}, must be at least 1")
    if options.history < max(options.rows, REGION):
        parser.error(f"--history was {options.history}, must be at least --rows and {REGION}")
    return options


def shuffled_table(blocks: int, generator) -> Any:
    """int32 [1, blocks], a request's blocks in random order."""
    import torch

    return torch.randperm(blocks, generator=generator)[None].int()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Times the step; seconds of each stage, and bytes."""
    import torch

    import sparse_prefill

    generator = torch.Generator().manual_seed(0)

    def randn(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator).to(dtype)

    rows, history, block_size = options.rows, options.history, 64
    dtype = getattr(torch, options.dtype)
    region_keys = history // REGION
    table = shuffled_table(-(-history // block_size), generator)
    index_table = shuffled_table(-(-region_keys // INDEX_PAGE), generator)
    # One KV group of a cache of two, as a caller slices it.
    cache = randn(table.shape[1], 2, block_size, 2 * options.dim, dtype=dtype)[:, 1:]
    index_cache = torch.zeros(index_table.shape[1], INDEX_PAGE, 68, dtype=torch.uint8)
    keys = randn(region_keys, INDEX_DIM)
    region = torch.arange(region_keys)
    slots = index_table[0, region // INDEX_PAGE].long() * INDEX_PAGE + region % INDEX_PAGE
    index_query = randn(rows, options.index_heads, INDEX_DIM)
    weights = randn(rows, options.index_heads)
    query = randn(rows, options.heads, options.dim, dtype=dtype)
    positions = torch.arange(history - rows, history)
    owners = torch.zeros(rows, dtype=torch.int32)
    out = torch.empty_like(query)
    plan = sparse_prefill.CompactPagedPrefill(None, max_rows=rows)
    region_count = options.regions + 1

    def step(watch: Stopwatch) -> None:
        with watch.stage("plan the step"):
            chunks = sparse_prefill.build_prefill_chunks(
                [rows], [history], index_table, key_budget=region_keys, compress_ratio=REGION, own_region=True
            )
            metadata = sparse_prefill.prepare_prefill_metadata(sparse_prefill.PrefillMetadata(chunks, history), 1, 0, 1)
            plan.plan(query.shape, dtype, "cpu", positions, region_count, options.dim**-0.5, block_size, contiguous_query=False)
        with watch.stage("store index keys"):
            sparse_prefill.store_index_keys(keys, index_cache, slots)
        with watch.stage("stage, score, select"):
            selected = torch.full((rows, options.regions), -1, dtype=torch.int32)
            sparse_prefill.prefill_chunks(index_query, weights, index_cache, selected, metadata, 1, 1, 1.0)
        with watch.stage("regions and page ids"):
            regions = sparse_prefill.append_own_region(selected, positions)
            plan.prepare_chunk(0, query, cache, regions, table, owners)
        with watch.stage("attention over pages"):
            plan.finish(None, cache, out)

    before = resident_bytes()
    watches = []
    with torch.inference_mode():
        for _ in range(options.repeat + 1):
            watches.append(Stopwatch())
            step(watches[-1])
    peak = peak_bytes()
    # The first step pays for caches and allocations: reported when it is the only one asked about, else beside the best.
    best = min(watches[1:], key=lambda watch: watch.total)
    return {
        "shape": {
            name: getattr(options, name) for name in ("rows", "history", "index_heads", "heads", "dim", "regions", "dtype")
        },
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "stages_seconds": best.seconds,
        "total_seconds": best.total,
        "first_total_seconds": watches[0].total,
        "peak_growth_bytes": None if peak is None else peak - before,
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    result = run(options)
    if options.json:
        print(json.dumps(result))
        return 0
    print(
        f"{options.rows:,} rows, {options.history:,} tokens, {options.history // REGION:,} region keys, "
        f"{options.index_heads} index heads, {options.heads} query heads of dim {options.dim} in {options.dtype},"
        f" {options.regions} regions and the row's own; {result['threads']} threads, torch {result['torch']}"
    )
    for name, seconds in result["stages_seconds"].items():
        print(f"{name:<24}{seconds:9.3f} s  {seconds / result['total_seconds']:5.0%}")
    print(f"{'total':<24}{result['total_seconds']:9.3f} s         first step {result['first_total_seconds']:.3f} s")
    print(f"peak memory over the inputs: {gigabytes(result['peak_growth_bytes'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
