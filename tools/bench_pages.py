"""Benchmark of the paged path: attention beside FlashInfer and dense attention, page filling and staging beside a copy.

    python -m sparse_prefill.tools.bench_pages [--json FILE] [--quick]

Needs a GPU. FlashInfer is measured where it is installed. Peer and op alternate in one process; figures are medians of rounds
after warm-up; inputs rotate between two sets that together exceed the L2 cache. Short kernels are timed in a captured graph, so
that launches do not count. Attention's time includes building unions and every other launch of the call.
"""

import argparse
import json
import statistics
import sys

import torch

import sparse_prefill as sp

BLOCK = 64
GROUPS = 4
# Regions that a row replaces of those its neighbour picked: gives these unions of 8 rows over one row's regions.
SHARING = {"union 1.25": 0.0357, "union 1.6": 0.0857, "random": None}


def regions_of(rows, region_count, tokens, change, seed):
    """int32 [rows, region_count] of the last `rows` positions of a prompt: each row keeps most of its neighbour's regions.

    change None: every row picks at random.
    """
    generator = torch.Generator().manual_seed(seed)
    first = tokens - rows
    candidates = max(first // 8, region_count)
    own = (first + torch.arange(rows)) // 8
    history = region_count - 1
    if change is None:
        picked = torch.empty((rows, history), dtype=torch.int64)
        for start in range(0, rows, 1024):
            part = picked[start : start + 1024]
            part.copy_(torch.rand((part.shape[0], candidates), generator=generator).topk(history, dim=1).indices)
    else:
        order = torch.randperm(candidates, generator=generator)
        current, spare = order[:history].clone(), order[history:].clone()
        picked = torch.empty((rows, history), dtype=torch.int64)
        replaced = torch.binomial(torch.full((rows,), float(history)), torch.full((rows,), change), generator=generator).long()
        for row in range(rows):
            picked[row] = current
            count = min(int(replaced[row]), spare.shape[0])
            out = torch.randperm(history, generator=generator)[:count]
            back = torch.randint(0, max(spare.shape[0] - count, 0) + 1, (1,), generator=generator).item()
            current[out], spare[back : back + count] = spare[back : back + count].clone(), current[out].clone()
    return torch.cat((picked.sort(dim=1).values, own[:, None]), dim=1).to(torch.int32)


def time_calls(calls, rounds=7, repeats=5):
    """Medians in milliseconds of calls(i), which alternate; i counts up so that inputs may rotate."""
    times = {name: [] for name in calls}
    for call in calls.values():
        for i in range(3):
            call(i)
    for turn in range(rounds):
        for name, call in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for i in range(repeats):
                call(turn * repeats + i)
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def captured(call, repeats=8):
    """A call that replays a graph of `repeats` calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
        call(1)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeats):
            call(i)
    return lambda i: graph.replay()


def copy_bandwidth():
    """Bytes a second, read and written, of a device-to-device copy."""
    source = [torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device="cuda") for _ in range(2)]
    target = torch.empty_like(source[0])
    return 2 * source[0].numel() / time_calls({"copy": lambda i: target.copy_(source[i % 2])})["copy"] * 1e3


def flashinfer_call(queries, caches, pages, indptr, last_page_len, scale, out):
    """FlashInfer's fa2 attention of the same pages, planned once; None where it is not installed."""
    try:
        import flashinfer
    except ImportError:
        return None
    rows, heads, dim = queries[0].shape
    workspace = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    wrapper.plan(
        torch.arange(rows + 1, dtype=torch.int32),
        indptr.cpu(),
        pages,
        last_page_len.cpu(),
        heads,
        1,
        dim,
        8,
        causal=False,
        sm_scale=scale,
        q_data_type=queries[0].dtype,
        kv_data_type=caches[0].dtype,
        disable_split_kv=True,
        max_token_per_sequence=1,
    )
    views = [sp.view_sparse_kv_pages(cache) for cache in caches]
    return lambda i: wrapper.run(queries[i % 2], views[i % 2], out=out)


def attention(name, rows, heads, dim, tokens, region_count=513, cache_dtype=torch.bfloat16, dense=False):
    """One row of the table: {"case", "union", milliseconds and ratios}."""
    change = SHARING[name]
    regions = regions_of(rows, region_count, tokens, change, seed=rows + dim).cuda()
    generator = torch.Generator("cuda").manual_seed(dim)
    blocks = tokens // BLOCK
    scale = dim**-0.5
    new = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)  # noqa: E731
    caches = [new(blocks, GROUPS, BLOCK, 2 * dim).to(cache_dtype)[:, 1:2] for _ in range(2)]
    queries = [new(rows, heads, dim) for _ in range(2)]
    table = torch.randperm(blocks, device="cuda", generator=generator).to(torch.int32)[None]
    owners = torch.zeros(rows, dtype=torch.int32, device="cuda")
    positions = torch.arange(tokens - rows, tokens)
    indptr, last_page_len = (x.cuda() for x in sp.compact_page_metadata(positions, region_count))
    pages = torch.empty(rows * region_count, dtype=torch.int32, device="cuda")
    stride = sp.kv_page_stride(caches[0])
    sp.fill_prefill_pages(regions, table, owners, indptr, pages, BLOCK, queries[0], torch.empty_like(queries[0]), stride)
    scales = {} if cache_dtype == torch.bfloat16 else dict(k_scale=torch.ones(1).cuda(), v_scale=torch.ones(1).cuda())
    out, peer_out = torch.empty_like(queries[0]), torch.empty_like(queries[0])

    def op(i):
        sp.paged_attention(queries[i % 2], caches[i % 2], pages, indptr, last_page_len, owners, out, scale, **scales)

    calls = {"op": op}
    if cache_dtype == torch.bfloat16:
        peer = flashinfer_call(queries, caches, pages, indptr, last_page_len, scale, peer_out)
        if peer is not None:
            calls["flashinfer"] = peer
    if dense:
        # What attending to everything costs: one KV head, all rows against all tokens.
        key, value = new(1, 1, tokens, dim), new(1, 1, tokens, dim)
        query = queries[0].transpose(0, 1)[None]
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def cudnn(i):
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)

        try:
            cudnn(0)
            calls["dense"] = cudnn
        except RuntimeError as error:
            print(f"cuDNN attention does not run here: {error}", file=sys.stderr)
    result = {"case": name, "rows": rows, "heads": heads, "dim": dim, "tokens": tokens, "cache": str(cache_dtype)[6:]}
    picked = regions.view(-1, 8 * region_count)[:: max(rows // 512, 1)]
    result["union"] = round(sum(len(set(tile)) for tile in picked.tolist()) / len(picked) / region_count, 3)
    result |= {f"{key}_ms": round(value, 4) for key, value in time_calls(calls).items()}
    if "flashinfer" in calls:
        op(0), calls["flashinfer"](0)
        result["difference"] = round(((out.float() - peer_out.float()).norm() / peer_out.float().norm()).item(), 5)
    for peer in ("flashinfer", "dense"):
        if peer in calls:
            result[f"times_{peer}"] = round(result[f"{peer}_ms"] / result["op_ms"], 3)
    return result


def fill(rows, heads, dim, region_count, bandwidth):
    """Page ids and query copy: regions read, ids written, queries read and written."""
    tokens = 131072
    regions = [regions_of(rows, region_count, tokens, None, seed).cuda() for seed in range(2)]
    table = torch.randperm(tokens // BLOCK, device="cuda").to(torch.int32)[None]
    owners = torch.zeros(rows, dtype=torch.int32, device="cuda")
    indptr = sp.compact_page_metadata(torch.arange(tokens - rows, tokens), region_count)[0].cuda()
    pages = torch.empty(rows * region_count, dtype=torch.int32, device="cuda")
    queries = [
        torch.randn(rows, GROUPS * heads, dim, device="cuda", dtype=torch.bfloat16)[:, heads : 2 * heads] for _ in range(2)
    ]
    dense = torch.empty(rows, heads, dim, device="cuda", dtype=torch.bfloat16)

    def call(i):
        arguments = (regions[i % 2], table, owners, indptr, pages, BLOCK, queries[i % 2], dense, GROUPS * BLOCK // 8)
        sp.fill_prefill_pages(*arguments, num_pages=1 << 20)

    size = 2 * pages.numel() * 4 + 2 * dense.numel() * 2
    return bandwidth_row("fill_prefill_pages", call, size, bandwidth, rows=rows, heads=heads, dim=dim)


def stage(blocks, dim, bandwidth):
    """FP8 to bf16: a byte read and two written an element."""
    full = torch.randn(blocks, GROUPS, BLOCK, 2 * dim, device="cuda").to(torch.float8_e4m3fn)
    staged = sp.plan_staged_prefill_pages(torch.randperm(blocks, dtype=torch.int32)[None].cuda(), [blocks * BLOCK], BLOCK)
    one = torch.ones(1, device="cuda")

    def call(i):
        sp.stage_prefill_pages(full[:, 1:2], staged, torch.bfloat16, one, one)

    return bandwidth_row("stage_prefill_pages", call, 3 * blocks * BLOCK * 2 * dim, bandwidth, blocks=blocks, dim=dim)


def bandwidth_row(name, call, size, bandwidth, **sizes):
    milliseconds = time_calls({"op": captured(call)}, repeats=1)["op"] / 8
    return {"case": name, **sizes, "op_ms": round(milliseconds, 4), "of_copy": round(size / milliseconds * 1e3 / bandwidth, 3)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="one shape only")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_pages: no GPU was found, must run on one")
    bandwidth = copy_bandwidth()
    results = [{"case": "copy", "gpu": torch.cuda.get_device_name(), "terabytes_a_second": round(bandwidth / 1e12, 3)}]
    print(json.dumps(results[0]), flush=True)

    def add(row):
        results.append(row)
        print(json.dumps(row), flush=True)

    shapes = [(8192, 16, 192, 131072)]
    if not options.quick:
        shapes += [(8192, 16, 128, 131072), (8192, 8, 192, 131072), (2048, 16, 192, 32768)]
    for rows, heads, dim, tokens in shapes:
        for name in SHARING:
            add(attention(name, rows, heads, dim, tokens, dense=name == "random" and heads == 16 and dim == 192))
    if not options.quick:
        for rows in (64, 256, 1024):
            for name in ("union 1.25", "random"):
                add(attention(name, rows, 16, 192, 32768))
        add(attention("union 1.25", 8192, 16, 192, 131072, cache_dtype=torch.float8_e4m3fn))
        add(attention("random", 8192, 16, 192, 131072, cache_dtype=torch.float8_e4m3fn))
    add(fill(16384, 16, 192, 513, bandwidth))
    add(stage(4096, 192, bandwidth))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
