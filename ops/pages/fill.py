from __future__ import annotations

import torch

from .. import validation


def fill_prefill_pages(
    regions: torch.Tensor,
    table: torch.Tensor,
    owners: torch.Tensor,
    indptr: torch.Tensor,
    pages: torch.Tensor,
    block_size: int,
    query: torch.Tensor,
    contiguous_query: torch.Tensor,
    page_stride: int,
    *,
    start: int = 0,
    num_pages: int = 0,
) -> None:
    """Writes the page ids of each row's regions, and a dense copy of its query. Mutates ``pages`` and ``contiguous_query``.

    ``pages[indptr[r] + j] = table[owner, token // block_size] * page_stride + token % block_size // 8`` with
    ``token = 8 * regions[r, j]``, for every j below indptr[r + 1] - indptr[r]. Nothing else is written.

    Args:
        regions: int32 [rows, region_count], logical regions within each row's request.
        table: int32 [requests, width], KV blocks of each request; any strides.
        owners: int32 [rows], each row's request; not read where the table has one row.
        indptr: int32 [n + 1], absolute offsets into ``pages``; row r's is entry start + r.
        pages: int32, flat.
        block_size: tokens of a KV block, a multiple of 8.
        query: [rows, heads, dim], bf16, fp16, fp32 or a 2-byte integer type; any strides.
        contiguous_query: [n, heads, dim], dense; row r is written to row start + r. Inside torch.compile pass whole buffers
            and ``start``, not slices: views of mutated arguments are where the compiler goes wrong.
        page_stride: see :func:`kv_page_stride`.
        start: the first row's place in ``indptr`` and ``contiguous_query``.
        num_pages: where given, ids are clamped to [0, num_pages).

    Raises:
        TypeError, ValueError: an argument is not as above; nothing is written. Values on the device are not checked, but wrong
        ones never leave the buffers: table columns and owners are clamped to the table.
    """
    op = "fill_prefill_pages"
    for name, value in (
        ("regions", regions),
        ("table", table),
        ("owners", owners),
        ("indptr", indptr),
        ("pages", pages),
        ("query", query),
        ("contiguous_query", contiguous_query),
    ):
        validation.is_tensor(op, name, value)
    for name, value, least in (
        ("block_size", block_size, 8),
        ("page_stride", page_stride, 1),
        ("start", start, 0),
        ("num_pages", num_pages, 0),
    ):
        validation.is_int(op, name, value, least)
    torch.ops.sparse_prefill.fill_prefill_pages(
        regions, table, owners, indptr, pages, block_size, query, contiguous_query, page_stride, start, num_pages
    )
