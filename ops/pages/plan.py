"""A plan for one step's paged attention: the buffers that hold page ids and lengths, and the order they are filled in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import validation
from .attention import paged_attention
from .fill import fill_prefill_pages
from .regions import compact_page_metadata, fixup_positions
from .view import kv_page_count, kv_page_stride


class PagedPrefillMetadata(NamedTuple):
    """What a selector needs to write page ids into a plan itself.

    Attributes:
        owners: int32 [rows], each row's request.
        table: int32 [requests, width], KV blocks of each request.
        pages: int32, the plan's whole buffer.
        indptr: int32 [rows + 1], absolute offsets into ``pages``.
        block_size: tokens of a KV block.
        page_stride: see :func:`kv_page_stride`.
    """

    owners: torch.Tensor
    table: torch.Tensor
    pages: torch.Tensor
    indptr: torch.Tensor
    block_size: int
    page_stride: int


class CompactPagedPrefill:
    """Paged attention over each row's few regions, planned once a step and shared by layers and KV groups.

    Call :meth:`plan`, then :meth:`fixup_positions` if the planned positions were bounds, then :meth:`prepare_chunk` (or write the
    pages :meth:`page_metadata` gives), then :meth:`finish`. One KV group a call: loop over groups with
    ``cache[:, g:g+1]``. All but plan may be traced by ``torch.compile``; inside a graph the number of rows is that of the
    tensors given.

    Args:
        workspace: scratch memory of a backend that takes it, uint8 [bytes], or None. "torch" takes none.
        max_rows: the most rows of any step; fixes every buffer at the first plan. Without it buffers grow when a plan needs it.
        backend: "auto", or by name: "torch" on a CPU, "triton" on a GPU. "auto" is the first of its device's.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """

    def __init__(self, workspace: torch.Tensor | None, *, max_rows: int | None = None, backend: str = "auto"):
        op = "CompactPagedPrefill"
        if workspace is not None:
            validation.is_tensor(op, "workspace", workspace)
            if workspace.dtype is not torch.uint8 or workspace.dim() != 1:
                raise ValueError(
                    f"{op}: workspace was {workspace.dtype} {validation.shape_text(workspace)}, must be torch.uint8 [bytes]"
                )
        if max_rows is not None:
            validation.is_int(op, "max_rows", max_rows, 1)
        validation.one_of(op, "backend", backend, validation.BACKENDS)
        self.workspace = workspace
        self.max_rows = max_rows
        self.backend = backend
        self.rows = None  # of the latest plan; None before one
        self.pages = self.indptr = self.last_page_len = self.owners = self.query = None

    def plan(
        self,
        query_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        positions: torch.Tensor | Sequence[int],
        region_count: int,
        scale: float,
        block_size: int,
        *,
        contiguous_query: bool = True,
    ) -> None:
        """Sets the plan up for one step. Host code: raises under stream capture and while a graph is traced.

        Args:
            query_shape: (rows, heads, dim) of one KV group's queries.
            dtype: their dtype: bf16, fp16 or fp32.
            device: where the step runs.
            positions: each row's token position in its request, or an upper bound of it, on the host; -1 for padding rows.
            region_count: the most regions of a row, its own included.
            scale: softmax scale, usually dim ** -0.5.
            block_size: tokens of a KV block, a multiple of 8.
            contiguous_query: True: :meth:`finish` reads the query it is given. False: the plan owns a query buffer that
                :meth:`prepare_chunk` fills and finish reads.

        Raises:
            TypeError, ValueError: an argument is not as above, or the step does not fit the buffers that max_rows fixed.
            RuntimeError: called under stream capture or while a graph is traced.
        """
        op = "CompactPagedPrefill.plan"
        if torch.compiler.is_compiling():
            raise RuntimeError(f"{op} is host code and can't be traced: call it once a step, outside the compiled function")
        rows, heads, dim = self._shape(op, query_shape)
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise TypeError(f"{op}: dtype was {dtype!r}, must be torch.bfloat16, torch.float16 or torch.float32")
        try:
            device = torch.empty(0, device=device).device  # "cuda" is "cuda:0"
        except (AssertionError, RuntimeError, TypeError) as error:
            raise ValueError(f"{op}: device was {device!r}, must be a device that torch has here: {error}") from None
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{op} is host code and can't be captured in a CUDA graph: call it before the capture")
        validation.is_int(op, "region_count", region_count, 1)
        validation.is_number(op, "scale", scale)
        validation.block_size_of_8(op, block_size)
        if not isinstance(contiguous_query, bool):
            raise TypeError(f"{op}: contiguous_query was {contiguous_query!r}, must be a bool")
        validation.attention_backend(op, self.backend, device)
        if self.max_rows is not None and rows > self.max_rows:
            raise ValueError(f"{op}: query_shape had {rows} rows, must have at most max_rows = {self.max_rows}")
        try:
            indptr, last_page_len = compact_page_metadata(positions, region_count)
        except (TypeError, ValueError) as error:
            raise type(error)(str(error).replace("compact_page_metadata", op, 1)) from None
        if last_page_len.shape[0] != rows:
            raise ValueError(f"{op}: positions had {last_page_len.shape[0]} rows, must have {rows} like query_shape")

        self._reserve(op, rows, heads, dim, dtype, device, region_count, contiguous_query)
        # One pinned staging buffer a plan, so that copies neither wait for the device nor race with those of the next plan: torch
        # gives its memory out again only after the copies.
        capacity = self.capacity
        host = torch.empty(2 * capacity + 1, dtype=torch.int32, pin_memory=device.type == "cuda")
        host[: rows + 1], host[rows + 1 : capacity + 1] = indptr, indptr[-1]
        host[capacity + 1 : capacity + 1 + rows], host[capacity + 1 + rows :] = last_page_len, 8
        self.indptr.copy_(host[: capacity + 1], non_blocking=True)
        self.last_page_len.copy_(host[capacity + 1 :], non_blocking=True)
        self.rows, self.heads, self.dim = rows, heads, dim
        self.dtype, self.device = dtype, device
        self.region_count, self.scale, self.block_size = region_count, float(scale), block_size
        self.contiguous_query = contiguous_query

    def warmup(self, cache: torch.Tensor, *, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None) -> None:
        """Builds or loads every kernel that steps of the planned shape need, up to max_rows rows. Run it once, before a capture.

        Args:
            cache: the KV group's [blocks, 1, tokens, 2*dim]; nothing of it is written.
            k_scale, v_scale: as in :meth:`finish`.

        Raises:
            ValueError: no plan was made.
            RuntimeError: called under stream capture or while a graph is traced.
        """
        op = "CompactPagedPrefill.warmup"
        self._planned(op)
        if torch.compiler.is_compiling() or (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            raise RuntimeError(f"{op} compiles kernels and can't be captured or traced: call it before")
        new = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=self.device)  # noqa: E731
        # Kernels differ for few and for many rows; a FlashInfer plan serves rows up to the next power of two.
        sizes = {min(1 << bits, self.capacity) for bits in range(6, max(self.capacity - 1, 1).bit_length() + 1)}
        for rows in sorted(sizes):
            query = torch.zeros((rows, self.heads, self.dim), dtype=self.dtype, device=self.device)
            regions = torch.full((rows, self.region_count), -1, dtype=torch.int32, device=self.device)
            indptr, last_page_len, owners = new(rows + 1), new(rows), new(rows)
            pages = new(rows * self.region_count)
            for requests in (1, 2):
                fill_prefill_pages(
                    regions, new(requests, 1), owners, indptr, pages, self.block_size, query, torch.empty_like(query),
                    kv_page_stride(cache),
                )  # fmt: skip
            torch.ops.sparse_prefill.store_owners(owners, new(rows), 0)
            for dtype in (torch.int32, torch.int64):
                dead = torch.full((rows,), -1, dtype=dtype, device=self.device)
                fixup_positions(dead, indptr, last_page_len, self.region_count)
            paged_attention(
                query, cache, pages, indptr, last_page_len, owners, torch.empty_like(query), self.scale,
                k_scale=k_scale, v_scale=v_scale, backend=self.backend,
            )  # fmt: skip

    def fixup_positions(self, positions: torch.Tensor) -> None:
        """Replaces the planned counts and lengths by those of the exact positions, int32 or int64 [rows] on the device.

        Exact positions are at most the planned bounds. Rows behind those given have no pages from here on.
        """
        op = "CompactPagedPrefill.fixup_positions"
        self._planned(op)
        validation.is_tensor(op, "positions", positions)
        self._same_rows(op, "positions", positions)
        fixup_positions(positions, self.indptr, self.last_page_len, self.region_count)

    def page_metadata(
        self, table: torch.Tensor, owners: torch.Tensor, page_stride: int, start: int = 0, end: int | None = None
    ) -> PagedPrefillMetadata | None:
        """What a selector needs to write the page ids of rows start .. end - 1 itself.

        Args:
            table: int32 [requests, width].
            owners: int32 [rows], each row's request, for all rows of the step; the plan keeps a copy of those of the rows.
            page_stride: see :func:`kv_page_stride`.
            start, end: the rows; all of them by default.

        Returns:
            A :class:`PagedPrefillMetadata`, or None where the plan owns a query buffer: :meth:`prepare_chunk` must fill that.
        """
        op = "CompactPagedPrefill.page_metadata"
        self._planned(op)
        if not self.contiguous_query:
            return None
        validation.kv_table(op, table)
        validation.is_tensor(op, "owners", owners)
        validation.is_int(op, "page_stride", page_stride, 1)
        validation.is_int(op, "start", start, 0)
        if end is None:
            end = owners.shape[0]
        validation.is_int(op, "end", end, start)
        validation.row_range(op, owners, end, self.capacity)
        part = owners[start:end]
        torch.ops.sparse_prefill.store_owners(part, self.owners, start)
        return PagedPrefillMetadata(part, table, self.pages, self.indptr[start : end + 1], self.block_size, page_stride)

    def prepare_chunk(
        self,
        start: int,
        query: torch.Tensor,
        cache: torch.Tensor,
        regions: torch.Tensor,
        table: torch.Tensor,
        owners: torch.Tensor,
    ) -> None:
        """Fills the pages, owners and queries of rows start .. start + n - 1. Only with ``contiguous_query=False``.

        Args:
            start: the first row.
            query: [n, heads, dim]; any strides.
            cache: the KV group's [blocks, 1, tokens, 2*dim], for its page stride and size.
            regions: int32 [n, region_count], history regions ascending, then the row's own, then -1
                (:func:`append_own_region`).
            table: int32 [requests, width]; any strides.
            owners: int32 [n]; not read by the page ids where the table has one row.
        """
        op = "CompactPagedPrefill.prepare_chunk"
        self._planned(op)
        if self.contiguous_query:
            raise ValueError(
                f"{op}: the plan was made with contiguous_query=True, must be False for prepare_chunk: it fills the plan's query"
                " buffer; with True write the pages that page_metadata gives"
            )
        validation.is_int(op, "start", start, 0)
        for name, value in (
            ("query", query),
            ("cache", cache),
            ("regions", regions),
            ("table", table),
            ("owners", owners),
        ):
            validation.is_tensor(op, name, value)
        validation.chunk_regions(op, regions, self.region_count)
        validation.cache_block(op, cache, self.block_size)
        fill_prefill_pages(
            regions,
            table,
            owners,
            self.indptr,
            self.pages,
            self.block_size,
            query,
            self.query,
            kv_page_stride(cache),
            start=start,
            num_pages=kv_page_count(cache),
        )
        torch.ops.sparse_prefill.store_owners(owners, self.owners, start)

    def finish(
        self,
        query: torch.Tensor | None,
        cache: torch.Tensor,
        out: torch.Tensor,
        *,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """One attention call over all rows. Mutates ``out``.

        Args:
            query: [rows, heads, dim]; not read (may be None) where the plan owns the query buffer.
            cache: the KV group's [blocks, 1, tokens, 2*dim].
            out: [rows, heads, dim], stride(2) = 1. Rows without pages get exactly 0.
            k_scale, v_scale: fp32 tensors of one element, for an FP8 cache.
        """
        op = "CompactPagedPrefill.finish"
        self._planned(op)
        validation.is_tensor(op, "out", out)
        self._same_rows(op, "out", out)
        if not self.contiguous_query:
            query = self.query
        else:
            validation.is_tensor(op, "query", query)
            self._same_rows(op, "query", query)
        paged_attention(
            query,
            cache,
            self.pages,
            self.indptr,
            self.last_page_len,
            self.owners,
            out,
            self.scale,
            k_scale=k_scale,
            v_scale=v_scale,
            backend=self.backend,
        )

    @staticmethod
    def _shape(op, query_shape):
        try:
            rows, heads, dim = query_shape
        except (TypeError, ValueError):
            raise ValueError(f"{op}: query_shape was {query_shape!r}, must be (rows, heads, dim)") from None
        for name, value, least in (("rows", rows, 0), ("heads", heads, 1), ("dim", dim, 1)):
            validation.is_int(op, f"query_shape's {name}", value, least)
        return rows, heads, dim

    def _reserve(self, op, rows, heads, dim, dtype, device, region_count, contiguous_query):
        """Buffers for this step; kept as they are where they fit, so that graphs may hold their addresses."""
        if self.pages is not None and self.pages.device != device:
            if self.max_rows is not None:
                raise ValueError(f"{op}: device was {device}, must be {self.pages.device}, where max_rows fixed the buffers")
            self.pages = None
        capacity = self.max_rows if self.max_rows is not None else rows
        if self.pages is None or (self.max_rows is None and capacity > self.capacity):
            self.capacity = capacity
            self.indptr = torch.zeros(capacity + 1, dtype=torch.int32, device=device)
            self.last_page_len = torch.full((capacity,), 8, dtype=torch.int32, device=device)
            self.owners = torch.zeros(capacity, dtype=torch.int32, device=device)
            self.pages = torch.zeros(capacity * region_count, dtype=torch.int32, device=device)
            self.query = None
        if self.pages.shape[0] < self.capacity * region_count:
            if self.max_rows is not None:
                raise ValueError(
                    f"{op}: region_count was {region_count}, must be at most {self.pages.shape[0] // self.capacity}, for which"
                    " max_rows fixed the buffers at the first plan"
                )
            self.pages = torch.zeros(self.capacity * region_count, dtype=torch.int32, device=device)
        if not contiguous_query:
            shape = (self.capacity, heads, dim)
            if self.query is None or tuple(self.query.shape) != shape or self.query.dtype != dtype:
                if self.query is not None and self.max_rows is not None:
                    raise ValueError(
                        f"{op}: query_shape and dtype were {(rows, heads, dim)} and {dtype}, must have heads and dim"
                        f" {tuple(self.query.shape[1:])} and {self.query.dtype}, for which max_rows fixed the query buffer"
                    )
                self.query = torch.zeros(shape, dtype=dtype, device=device)

    def _planned(self, op):
        if self.pages is None or self.indptr is None:
            raise ValueError(f"{op}: no plan was made, must call plan first")

    def _same_rows(self, op, name, tensor):
        # Inside a graph the rows are the tensors': a check against the plan's number would make one graph a number.
        if not torch.compiler.is_compiling() and tensor.dim() and tensor.shape[0] != self.rows:
            raise ValueError(f"{op}: {name} had {tensor.shape[0]} rows, must have {self.rows} like the plan")
