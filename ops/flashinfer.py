"""The one file that knows FlashInfer: attention of one-row requests over 8-token pages by its fa2 kernels, planned once a shape.

With split KV off, FlashInfer's fa2 plan depends on rows, heads, head_dim, dtypes and page size only; each block reads its row's
range of pages from the device. So a plan is made once per shape and kept, and a call only hands over the step's own indptr,
last_page_len and pages. Rows are padded to a bucket, so that few plans serve all steps: padding rows have no pages.

FlashInfer 0.7.0 or later. Its graph mode (padding blocks without a mask, up to 0.7.2), its max_sequence_kv (broken with fa2, up
to 0.7.2) and tensors as k_scale (a device sync) are not used.
"""

from __future__ import annotations

import functools
import threading

import torch

from .pages.view import view_sparse_kv_pages

HEAD_DIMS = (64, 128, 192, 256)
DTYPES = (torch.bfloat16, torch.float16)
# Without split KV nothing is kept in it, but the planner wants one.
_WORKSPACE_BYTES = 16 << 20
# With this release and later, fa2 takes plans of one-row requests without a Python loop over rows.
_MIN_VERSION = (0, 7, 0)


@functools.lru_cache(None)
def module():
    """The flashinfer package; an ImportError or RuntimeError that says what is missing."""
    try:
        import flashinfer
    except ImportError as error:
        raise ImportError("backend 'flashinfer' needs the package flashinfer-python, 0.7.0 or later") from error
    version = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in flashinfer.__version__.split(".")[:3])
    if version < _MIN_VERSION:
        raise RuntimeError(f"backend 'flashinfer' found flashinfer {flashinfer.__version__}, must be 0.7.0 or later")
    return flashinfer


def check(op, heads, dim, dtype, cache_dtype):
    """Refuses what fa2 has no kernel for."""
    if dim not in HEAD_DIMS:
        raise ValueError(f"{op}: query had head_dim {dim}, must have one of {HEAD_DIMS} with backend 'flashinfer'")
    if dtype not in DTYPES:
        raise TypeError(f"{op}: query was {dtype}, must be torch.bfloat16 or torch.float16 with backend 'flashinfer'")
    if cache_dtype is not dtype:
        raise TypeError(
            f"{op}: cache was {cache_dtype}, must be {dtype} like query with backend 'flashinfer': stage an FP8 cache first, or"
            " use backend 'triton'"
        )


class _Plan:
    """A planned wrapper and the buffers of its bucket."""

    def __init__(self, device, bucket, heads, dim, dtype):
        flashinfer = module()
        with torch.cuda.device(device):
            workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
            rows = torch.arange(bucket + 1, dtype=torch.int32)
            # Lengths do not matter to the plan: one page a row.
            self.wrapper.plan(
                rows,
                rows,
                torch.zeros(bucket, dtype=torch.int32, device=device),
                torch.full((bucket,), 8, dtype=torch.int32),
                heads,
                1,
                dim,
                8,
                causal=False,
                sm_scale=1.0,
                q_data_type=dtype,
                kv_data_type=dtype,
                disable_split_kv=True,
                max_token_per_sequence=1,
            )
            # The plan is copied to the device from one pinned buffer, which must outlive the copy.
            torch.cuda.current_stream(device).synchronize()
        self.bucket = bucket
        self.lock = threading.Lock()

    def run(self, query, cache, pages, indptr, last_page_len, out, scale):
        rows, bucket = out.shape[0], self.bucket
        # Padded copies are allocated anew every call, so that calls on several streams do not share them.
        starts = indptr.new_empty(bucket + 1)
        starts[: rows + 1] = indptr[: rows + 1]
        starts[rows + 1 :] = indptr[rows]
        starts.clamp_(0, pages.shape[0])
        lengths = last_page_len.new_full((bucket,), 8)
        torch.clamp(last_page_len[:rows], 1, 8, out=lengths[:rows])
        if rows == bucket:
            source, target = query[:rows], out if out.is_contiguous() else torch.empty_like(query[:rows])
        else:
            source = query.new_empty((bucket, *query.shape[1:]))
            source[:rows] = query[:rows]
            target = torch.empty_like(source)
        with self.lock:
            wrapper = self.wrapper
            wrapper._paged_kv_indptr_buf, wrapper._paged_kv_last_page_len_buf = starts, lengths
            wrapper._paged_kv_indices_buf, wrapper._sm_scale = pages, scale
            wrapper.run(source, view_sparse_kv_pages(cache), out=target)
        if target is not out:
            out.copy_(target[:rows])


_plans: dict[tuple, _Plan] = {}
_plans_lock = threading.Lock()


def bucket_of(rows):
    """Rows a plan is made for: the next power of two, from 64."""
    return max(64, 1 << max(rows - 1, 0).bit_length())


def plan(device, rows, heads, dim, dtype):
    """The plan of a shape, made on the spot outside a capture."""
    device = torch.device(device)
    key = (device, bucket_of(rows), heads, dim, dtype)
    found = _plans.get(key)
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"paged_attention: no FlashInfer plan was made for {key[1]} rows, {heads} heads of head_dim {dim} and {dtype}:"
                " call CompactPagedPrefill.warmup or run the step once before the capture"
            )
        with _plans_lock:
            found = _plans.get(key)
            if found is None:
                found = _plans[key] = _Plan(device, *key[1:])
    return found


def paged_attention(query, cache, pages, indptr, last_page_len, out, scale):
    """Page ids must lie in the cache's view: FlashInfer does not check them (prepare_chunk clamps the ids it writes)."""
    rows, heads, dim = out.shape
    check("paged_attention", heads, dim, query.dtype, cache.dtype)
    plan(cache.device, rows, heads, dim, query.dtype).run(query, cache, pages, indptr, last_page_len, out, scale)


def prebuild(architecture, head_dims=HEAD_DIMS, dtypes=(torch.bfloat16,)):
    """Builds FlashInfer's modules of these shapes for an architecture such as "9.0a", without a GPU.

    Needs nvcc. FlashInfer finds the modules in its own cache afterwards (FLASHINFER_WORKSPACE_BASE says where that is). Returns
    the paths of the libraries.
    """
    import os

    flag = "FLASHINFER_CUDA_ARCH_LIST"
    before = os.environ.get(flag)
    os.environ[flag] = architecture
    try:
        module()
        from flashinfer.jit.attention import modules

        # 0.7.0 plans with its "primary" module, of equal strides of K and V; later releases may have one module only.
        make = getattr(modules, "_gen_batch_prefill_primary_module", modules.gen_batch_prefill_module)
        paths = []
        for dtype in dtypes:
            for dim in head_dims:
                spec = make("fa2", dtype, dtype, dtype, torch.int32, dim, dim, 0, False, False, False)
                spec.build(verbose=False)
                paths.append(str(spec.jit_library_path))
        return paths
    finally:
        if before is None:
            del os.environ[flag]
        else:
            os.environ[flag] = before
