"""The paged KV cache seen as 8-token pages: its shape, and the view itself, which is the same on every device."""

from __future__ import annotations

import torch

PAGE = 8


def view_shape(cache: torch.Tensor) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Size and strides of the page view of a cache [B, 1, N, 2*dim]; gaps between blocks lie inside it, never addressed."""
    blocks, _, tokens, width = cache.shape
    row = cache.stride(2)
    size = ((blocks - 1) * cache.stride(0) + tokens * row) // (PAGE * row)
    # Of no blocks there are no pages, whatever their stride. Dynamo shows symbolic sizes as ints, and block counts as constants.
    size = max(size, 0) if type(size) is int else torch.sym_max(size, 0)
    return (size, PAGE, 1, width), (PAGE * row, row, width, 1)


def view_sparse_kv_pages(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from .. import validation

    validation.view_sparse_kv_pages(cache)
    blocks, _, tokens, width = cache.shape
    if (type(blocks) is int and blocks <= 1) or cache.stride(0) == tokens * cache.stride(2):
        # Without gaps between blocks ordinary views do, and those compose under functionalization.
        pages = cache.squeeze(1).view(blocks * tokens // PAGE, PAGE, width).unsqueeze(2)
    else:
        pages = _strided(cache, *view_shape(cache))
    # Two narrow views: the outputs of one split may not be written through.
    dim = width // 2
    return pages.narrow(3, 0, dim), pages.narrow(3, dim, dim)


def _strided(cache, size, stride):
    if type(cache) is torch.Tensor:
        return cache.as_strided(size, stride)
    from torch._subclasses.functional_tensor import FunctionalTensor

    if not isinstance(cache, FunctionalTensor):
        return cache.as_strided(size, stride)
    if cache._is_view():
        # Sliced inside the graph: as_strided of its base is the one case functionalization keeps the offset of.
        base = cache._base
        if base.storage_offset() != 0:
            raise ValueError(
                "view_sparse_kv_pages: cache was sliced inside the graph from a tensor with a storage offset, which torch"
                " would read at the wrong place; must be sliced outside the compiled function"
            )
        return base.as_strided(size, stride, cache.storage_offset())
    torch._sync(cache)
    if torch._from_functional_tensor(cache.elem).stride() != cache.stride():
        raise ValueError(
            "view_sparse_kv_pages: cache has gaps and was written by an ATen op inside the graph, which torch rewrites without"
            " its gaps; must be written by this library's ops, or outside the compiled function"
        )
    return cache.as_strided(size, stride)
