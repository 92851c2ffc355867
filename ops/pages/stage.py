from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .. import validation
from ..indexer.chunks import host_lengths

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


class StagedPrefillPages(NamedTuple):
    """Live KV blocks of a step, and the table that names them in their staged order.

    Attributes:
        pages: int32 [P], the block ids of all requests, one after the other; a block two requests share appears twice.
        table: int32 [requests, width], for each request the staged blocks base .. base + count - 1, zeros behind them.
    """

    pages: torch.Tensor
    table: torch.Tensor


def plan_staged_prefill_pages(table: torch.Tensor, lengths: Sequence[int], block_size: int) -> StagedPrefillPages:
    """Lists the KV blocks a step reads, so that :func:`stage_prefill_pages` copies those and no others.

    Args:
        table: int32 [requests, width], KV blocks of each request; any strides.
        lengths: host ints, tokens of each request; ceil(length / block_size) of its blocks are live.
        block_size: tokens of a block, a multiple of 8.

    Returns:
        :class:`StagedPrefillPages` on ``table``'s device; the host does not wait for it.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    op = "plan_staged_prefill_pages"
    validation.kv_table(op, table)
    validation.block_size_of_8(op, block_size)
    lengths = host_lengths(op, "lengths", lengths)
    requests, width = table.shape
    if len(lengths) != requests:
        raise ValueError(f"{op}: lengths had {len(lengths)} requests, must have {requests} like table")
    counts = -(-lengths // block_size)
    if (long := np.nonzero(counts > width)[0]).size:
        i = long[0]
        raise ValueError(f"{op}: lengths[{i}] was {lengths[i]}, must be at most {width * block_size}, what its table row holds")
    base = np.concatenate(([0], np.cumsum(counts)))
    live = np.arange(width) < counts[:, None]
    remapped = np.where(live, base[:-1, None] + np.arange(width), 0).astype(np.int32)
    # Flat places of the live entries, so that the device gathers them without a data-dependent size.
    place = torch.from_numpy(np.flatnonzero(live)).to(table.device)
    pages = table.reshape(-1)[place]
    return StagedPrefillPages(pages, torch.from_numpy(remapped).to(table.device))


def stage_prefill_pages(
    cache: torch.Tensor,
    staged: StagedPrefillPages,
    dtype: torch.dtype | str,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Copies the live blocks of one KV group into a dense cache of ``dtype``.

    Args:
        cache: [blocks, 1, tokens, 2*dim], see :func:`kv_page_stride`; bf16, fp16, fp32, float8_e4m3fn, or uint8, which is
            viewed as float8_e4m3fn.
        staged: what :func:`plan_staged_prefill_pages` returned.
        dtype: torch.bfloat16, torch.float16 or torch.float32, or its name.
        k_scale, v_scale: fp32 tensors of one element, what an FP8 cache's values are multiplied by (in fp32, then rounded
            once); ignored for other caches.

    Returns:
        [P, 1, tokens, 2*dim]. Its page stride is tokens // 8 and its table ``staged.table``. A block id outside the cache gives
        zeros.

    Raises:
        TypeError, ValueError: an argument is not as above, or an FP8 cache comes without scales.
    """
    op = "stage_prefill_pages"
    validation.is_tensor(op, "cache", cache)
    if not (isinstance(staged, tuple) and len(staged) == 2):
        raise TypeError(f"{op}: staged was {type(staged).__name__}, must be a StagedPrefillPages")
    validation.is_tensor(op, "staged.pages", staged[0])
    name = dtype if isinstance(dtype, str) else _DTYPES.get(dtype)
    if name is None:
        raise TypeError(f"{op}: dtype was {dtype!r}, must be torch.bfloat16, torch.float16 or torch.float32")
    validation.one_of(op, "dtype", name, tuple(_DTYPES.values()))
    for scale_name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            validation.is_tensor(op, scale_name, scale)
    return torch.ops.sparse_prefill.stage_prefill_pages(cache, staged[0], name, k_scale, v_scale)
