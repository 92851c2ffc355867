from __future__ import annotations

import torch

from .. import validation
from ..meta.view import PAGE, view_shape


def kv_page_stride(cache: torch.Tensor) -> int:
    """8-token pages from one block of a KV cache to the next, gaps between blocks included.

    Args:
        cache: [blocks, 1, tokens, 2*dim], one KV group of a paged cache, K before V; any strides with stride(3) = 1.

    Returns:
        stride(0) / (8 * stride(2)). The page of token t of block b is b * kv_page_stride + t // 8.

    Raises:
        TypeError, ValueError: ``cache`` is not as above, or its block stride is no whole number of pages.
    """
    validation.kv_cache("kv_page_stride", cache)
    return cache.stride(0) // (PAGE * cache.stride(2))


def kv_page_count(cache: torch.Tensor) -> int:
    """Pages in the view of a cache, gaps included: ids lie in [0, kv_page_count). Same argument as :func:`kv_page_stride`."""
    validation.kv_cache("kv_page_count", cache)
    return view_shape(cache)[0][0]


def view_sparse_kv_pages(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A paged KV cache seen as 8-token pages, without a copy: its K half and its V half.

    Args:
        cache: [blocks, 1, tokens, 2*dim], see :func:`kv_page_stride`; bf16, fp16, fp32, float8_e4m3fn or uint8.

    Returns:
        ``(k, v)``, each [pages, 8, 1, dim], aliases of ``cache``: later writes to it are seen. Pages that lie in gaps between
        blocks hold other groups' or layers' memory.

    Raises:
        TypeError, ValueError: ``cache`` is not as above. Inside ``torch.compile`` also where torch would read the wrong
        memory: a cache with gaps that an ATen op wrote in the same graph before the view was taken, or that was sliced there
        from a tensor with a storage offset. A gapped cache written by an ATen op after its view was taken, in one
        graph, can't be detected: write caches by this library's ops, or outside.
    """
    validation.is_tensor("view_sparse_kv_pages", "cache", cache)
    return torch.ops.sparse_prefill.view_sparse_kv_pages(cache)
