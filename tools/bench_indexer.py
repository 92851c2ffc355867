"""Times each step of the FP4 indexer path beside its peer and its ceiling, in one run on one GPU.

    python -m sparse_prefill.tools.bench_indexer --json results.json --png roofline.png

Every figure is the median over rounds in which the step and its peer alternate. Inputs rotate among buffers larger than the L2
cache, steps are timed as replays of a CUDA graph where they can be captured, and data is random. The FLOPs of scoring are
2 * H * D * sum(ke - ks), its time includes decoding.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch

import sparse_prefill as sp

D = 128
OPS = torch.ops.sparse_prefill


def captured(calls: list[Callable[[], object]]) -> Callable[[], object]:
    """A replay of all ``calls``, so that launches cost the CPU nothing."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def alternate(sides: dict[str, tuple[Callable[[], object], int]], rounds: int = 7) -> dict[str, float]:
    """Median milliseconds of one call of each side; each side is a function and how many calls one run of it makes."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for run, _ in sides.values():
        run()
    for _ in range(rounds):
        for name, (run, calls) in sides.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def bf16_matmul(n: int = 8192):
    a, b = (torch.randn((n, n), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return (lambda: a @ b), 2 * n**3


def fp8_matmul(n: int = 8192):
    a, b = (torch.randn((n, n), device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    return (lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)), 2 * n**3


def random_bytes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")


def bench_stage(keys: int) -> list[dict]:
    """stage_keys from a cache of shuffled pages, and pack then restore, beside a copy of the same bytes."""
    rows, pages = [], keys // 64
    cu = torch.tensor([0, keys], dtype=torch.int32, device="cuda")
    seq = torch.zeros(keys, dtype=torch.int32, device="cuda")
    for stride in (4352, 8704):
        caches = [random_bytes(pages * stride).as_strided((pages, 64, 68), (stride, 68, 1)) for _ in range(3)]
        table = torch.randperm(pages, device="cuda").int().view(1, pages)
        sources = [random_bytes(keys * 68) for _ in range(3)]
        target = torch.empty_like(sources[0])
        both_cu = torch.stack((cu,))

        def pair(cache, table=table, both_cu=both_cu):
            packed = OPS.pack_keys(cache, table, cu, keys)
            OPS.restore_keys(packed, seq, cu, both_cu, 1, 1)

        result = alternate(
            {
                "stage": (captured([lambda c=c, t=table: OPS.stage_keys(c, t, cu, seq) for c in caches] * 3), 9),
                "copy": (captured([lambda s=s, t=target: t.copy_(s) for s in sources] * 3), 9),
                "pair": (captured([lambda c=c, f=pair: f(c) for c in caches] * 3), 9),
            }
        )
        row = {"op": "stage_keys", "keys": keys, "page_stride": stride, "ms": result["stage"], "peer": "copy of the same bytes"}
        row |= {"peer_ms": result["copy"], "ratio": result["copy"] / result["stage"], "target": 0.85}
        row["times_pack_and_restore"] = result["pair"] / result["stage"]
        row |= {"bytes": 136 * keys}
        rows.append(row)
    return rows


def scoring_inputs(m: int, n: int, heads: int):
    q, q_scale = random_bytes(m, heads, 64), random_bytes(m, heads, 4, low=121, high=133)
    payload, scales = random_bytes(n // 64, 1, 4, 64, 16), random_bytes(n // 64, 1, 4, 64, low=121, high=133)
    return q, q_scale, payload, scales, torch.randn((m, heads), device="cuda")


def windows(kind: str, m: int, n: int):
    ks = torch.zeros(m, dtype=torch.int32, device="cuda")
    if kind == "full":
        return ks, torch.full_like(ks, n)
    return ks, (torch.arange(1, m + 1, device="cuda") * n // m).int()


def bench_score(quick: bool) -> list[dict]:
    rows, (matmul, flops) = [], bf16_matmul()
    sizes = [(2048, 65536)] if quick else [(2048, 32768), (2048, 131072), (8192, 32768)]
    for heads in (64, 32):
        for m, n in sizes:
            inputs = scoring_inputs(m, n, heads)
            for kind in ("full", "causal"):
                ks, ke = windows(kind, m, n)
                work = 2 * heads * D * int((ke - ks).sum(dtype=torch.int64))
                result = alternate(
                    {
                        "score": (captured([lambda a=inputs, w=(ks, ke): OPS.score_keys(*a, *w, 1.0, "exact")]), 1),
                        "matmul": (captured([matmul]), 1),
                    }
                )
                rate, peer = work / result["score"] / 1e9, flops / result["matmul"] / 1e9
                rows.append(
                    {
                        "op": "score_keys exact",
                        "heads": heads,
                        "rows": m,
                        "keys": n,
                        "windows": kind,
                        "ms": result["score"],
                        "tflops": rate,
                        "peer": "bf16 matmul",
                        "peer_tflops": peer,
                        "ratio": rate / peer,
                        "target": 0.90,
                        "flops": work,
                        "bytes": n * 68 + m * heads * 72 + 4 * m * n,
                    }  # fmt: skip
                )
    return rows


def selection_logits(kind: str, rows: int, columns: int):
    shape = (rows, columns)
    if kind in ("random", "causal"):
        return torch.randn(shape, device="cuda")
    if kind == "near-tied":
        return 1 + torch.randint(0, 4096, shape, device="cuda") * 2.0**-23
    if kind == "equal":
        return torch.full(shape, 1.5, device="cuda")
    if kind == "sorted":
        return torch.arange(columns, device="cuda").float().expand(shape).contiguous()
    raise ValueError(kind)


def bench_select(rows: int, columns: int, k: int) -> list[dict]:
    results = []
    for kind in ("random", "near-tied", "equal", "sorted", "causal"):
        logits = selection_logits(kind, rows, columns)
        ks, ke = windows("causal" if kind == "causal" else "full", rows, columns)
        result = alternate(
            {
                "select": (captured([lambda x=logits, w=(ks, ke): OPS.select_keys(x, *w, k, 0, 0)]), 1),
                "topk": (lambda x=logits: torch.topk(x, k, dim=1, sorted=False), 1),
            }
        )
        results.append(
            {
                "op": "select_keys",
                "rows": rows,
                "columns": columns,
                "k": k,
                "logits": kind,
                "ms": result["select"],
                "peer": "torch.topk",
                "peer_ms": result["topk"],
                "ratio": result["topk"] / result["select"],
                "target": 4.0,
                "bytes": 4 * int((ke - ks).sum(dtype=torch.int64)),
            }  # fmt: skip
        )
    return results


def bench_prefill(rows: int, keys: int, k: int) -> list[dict]:
    """prefill_chunks whole, beside the scoring in it alone, and its peak scratch beside prefill_workspace_bytes."""
    results = []
    for heads in (64, 32):
        pages = keys // 64
        cache = random_bytes(pages * 4352).as_strided((pages, 64, 68), (4352, 68, 1))
        cache.view(pages, 4352)[:, 4096:].clamp_(121, 133)
        table = torch.randperm(pages, device="cuda").int().view(1, pages)
        q, q_scale, payload, scales, weights = scoring_inputs(rows, keys, heads)
        chunks = sp.build_prefill_chunks([rows], [keys], table, key_budget=keys)
        plan = sp.prepare_prefill_metadata(sp.PrefillMetadata(chunks, keys), 1, 0, 1)
        out = torch.empty((rows, k), dtype=torch.int32, device="cuda")
        ks, ke = windows("full", rows, keys)
        ke = keys - rows + torch.arange(1, rows + 1, device="cuda", dtype=torch.int32)
        step = 2**29 // (4 * keys)

        def score(q=q, q_scale=q_scale, payload=payload, scales=scales, weights=weights, ks=ks, ke=ke, step=step):
            for first in range(0, rows, step):
                t = slice(first, first + step)
                OPS.score_keys(q[t], q_scale[t], payload, scales, weights[t], ks[t], ke[t], 1.0, "exact")

        def whole(q=q, q_scale=q_scale, weights=weights, cache=cache, out=out, plan=plan):
            sp.prefill_chunks((q, q_scale), weights, cache, out, plan, 1, 1, 1.0)

        result = alternate({"whole": (whole, 1), "score": (score, 1)})
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        whole()
        peak = torch.cuda.max_memory_allocated() - before
        results.append(
            {
                "op": "prefill_chunks",
                "heads": heads,
                "rows": rows,
                "keys": keys,
                "k": k,
                "ms": result["whole"],
                "peer": "its scoring alone",
                "peer_ms": result["score"],
                "added": result["whole"] / result["score"] - 1,
                "target": 0.15 if heads == 64 else 0.25,
                "peak_bytes": peak,
                "workspace_bytes": sp.prefill_workspace_bytes(keys, 1, 1, 1),
            }  # fmt: skip
        )
    return results


def roofline(path: str, rows: list[dict], copy: float, matmul: float) -> None:
    """The steps over their arithmetic intensity, under the measured copy and matmul ceilings."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    intensity = [2.0**i for i in range(-3, 14)]
    axes.loglog(intensity, [min(matmul, copy * x) for x in intensity], color="black", label="measured ceilings")
    for row in rows:
        if "flops" in row:
            axes.scatter(row["flops"] / row["bytes"], row["tflops"], s=18, label=None)
        elif "bytes" in row:
            # A step without arithmetic: one operation a byte stands for its bandwidth.
            axes.scatter(1, row["bytes"] / row["ms"] / 1e9, s=18, marker="s")
    axes.set_xlabel("operations per byte of device memory")
    axes.set_ylabel("10^12 operations (or bytes) per second")
    axes.set_title("FP4 indexer path")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write every figure here")
    parser.add_argument("--png", help="write a roofline here (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="one size a step")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    source, (matmul, flops), (fp8, _) = random_bytes(1 << 31), bf16_matmul(), fp8_matmul()
    target = torch.empty_like(source)
    ceiling = alternate({"copy": (lambda: target.copy_(source), 1), "bf16": (matmul, 1), "fp8": (fp8, 1)})
    copy = 2 * source.numel() / ceiling["copy"] / 1e9
    ceilings = {"copy_tb_per_s": copy, "bf16_tflops": flops / ceiling["bf16"] / 1e9, "fp8_tflops": flops / ceiling["fp8"] / 1e9}
    print(torch.cuda.get_device_name(), "torch", torch.__version__, {name: round(x, 2) for name, x in ceilings.items()})
    rows: list[dict] = []
    steps = (
        lambda: bench_stage(1 << 20),
        lambda: bench_score(options.quick),
        lambda: bench_select(4096, 65536, 2048),
        lambda: bench_prefill(8192, 65536, 2048),
    )
    for step in steps:
        for row in step():
            rows.append(row)
            skip = ("bytes", "flops", "peer_tflops")
            print({n: round(v, 4) if isinstance(v, float) else v for n, v in row.items() if n not in skip}, flush=True)
    if options.json:
        with open(options.json, "w") as file:
            device = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
            json.dump({"device": device, "ceilings": ceilings, "results": rows}, file, indent=1)
    if options.png:
        roofline(options.png, rows, copy, ceilings["bf16_tflops"])
    return rows


if __name__ == "__main__":
    main()
