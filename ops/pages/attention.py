from __future__ import annotations

import torch

from .. import validation


def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    pages: torch.Tensor,
    indptr: torch.Tensor,
    last_page_len: torch.Tensor,
    owners: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Softmax attention of every row over its own 8-token pages, without a causal mask. Mutates ``out``.

    Row r sees pages indptr[r] .. indptr[r+1] - 1, all 8 tokens of each but the last, of which it sees last_page_len[r]. A row
    without pages gives exactly 0.

    Args:
        query: [n, heads, dim] bf16, fp16 or fp32, the heads of one KV group; n >= rows; stride(2) = 1.
        cache: [blocks, 1, tokens, 2*dim] of query's dtype, or float8_e4m3fn (uint8 is viewed as it) with scales.
        pages: int32, flat page ids of :func:`view_sparse_kv_pages`.
        indptr: int32 [>= rows + 1].
        last_page_len: int32 [>= rows], 1 to 8.
        owners: int32 [>= rows], each row's request; kernels that take neighbouring rows together never join two owners.
        out: [rows, heads, dim] of query's dtype, stride(2) = 1, any row stride.
        scale: what a query-key product is multiplied by before the softmax, usually dim ** -0.5.
        k_scale, v_scale: fp32 tensors of one element, for an FP8 cache.
        backend: "auto", or one of those of :class:`CompactPagedPrefill`.

    Raises:
        TypeError, ValueError: an argument is not as above; nothing is written. Device values are not checked, but wrong ones
        never leave the buffers.
    """
    op = "paged_attention"
    for name, value in (
        ("query", query),
        ("cache", cache),
        ("pages", pages),
        ("indptr", indptr),
        ("last_page_len", last_page_len),
        ("owners", owners),
        ("out", out),
    ):
        validation.is_tensor(op, name, value)
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        if value is not None:
            validation.is_tensor(op, name, value)
    validation.is_number(op, "scale", scale)
    validation.one_of(op, "backend", backend, validation.BACKENDS)
    torch.ops.sparse_prefill.paged_attention(
        query, cache, pages, indptr, last_page_len, owners, out, scale, k_scale, v_scale, backend
    )
