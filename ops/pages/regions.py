from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .. import validation


def append_own_region(selected: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Puts each row's own region behind its selected history regions.

    Args:
        selected: int32 [rows, k], ascending history regions out of 0 .. pos//8 - 1, then -1, as :func:`select_keys` and
            :func:`prefill_chunks` give them (all of them where there are at most k).
        positions: int32 or int64 [rows], each row's token position in its request; -1 for a padding row.

    Returns:
        int32 [rows, k + 1]: region pos//8 at index min(pos//8, k), -1 behind it. A padding row is all -1.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    for name, value in (("selected", selected), ("positions", positions)):
        validation.is_tensor("append_own_region", name, value)
    return torch.ops.sparse_prefill.append_own_region(selected, positions)


def compact_page_metadata(positions: torch.Tensor | Sequence[int], region_count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each row's pages lie, and how many tokens of its last page it sees. Host code.

    Args:
        positions: CPU tensor or sequence of ints, each row's token position; -1 for a padding row, which has no pages.
        region_count: the most regions of a row, its own included.

    Returns:
        ``(indptr, last_page_len)``, CPU int32 [rows + 1] and [rows]: row r's pages are indptr[r] .. indptr[r+1] - 1, in all
        min(pos//8 + 1, region_count), and last_page_len is pos % 8 + 1.

    Raises:
        TypeError, ValueError: an argument is not as above, or a position is below -1.
    """
    op = "compact_page_metadata"
    validation.is_int(op, "region_count", region_count, 1)
    positions = host_positions(op, positions)
    counts = np.minimum(positions // 8 + 1, region_count)
    indptr = np.concatenate(([0], np.cumsum(counts)))
    if indptr[-1] > 2**31 - 1:
        raise ValueError(f"{op}: positions had {indptr[-1]} pages in all, must be fewer than 2^31")
    return torch.from_numpy(indptr.astype(np.int32)), torch.from_numpy((positions % 8 + 1).astype(np.int32))


def host_positions(op: str, positions) -> np.ndarray:
    """Positions as an int64 array, each at least -1."""
    if isinstance(positions, torch.Tensor):
        if positions.device.type != "cpu":
            raise ValueError(f"{op}: positions was on {positions.device}, must be on the host")
        if positions.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{op}: positions was {positions.dtype}, must be torch.int32 or torch.int64")
        array = positions.numpy()
    else:
        try:
            array = np.asarray(positions)
        except ValueError:
            raise TypeError(f"{op}: positions was a ragged {type(positions).__name__}, must be a sequence of ints") from None
        if array.size == 0:
            array = array.astype(np.int64)
        if array.dtype.kind not in "iu":
            raise TypeError(f"{op}: positions was {type(positions).__name__} of {array.dtype}, must be a sequence of ints")
    if array.ndim != 1:
        raise ValueError(f"{op}: positions had {array.ndim} dimensions, must have 1")
    array = array.astype(np.int64)
    if array.size and array.min() < -1:
        row = int(array.argmin())
        raise ValueError(f"{op}: positions[{row}] was {array[row]}, must be at least -1")
    return array


def fixup_positions(positions: torch.Tensor, indptr: torch.Tensor, last_page_len: torch.Tensor, region_count: int) -> None:
    """The device's own :func:`compact_page_metadata`, written into whole buffers. Mutates ``indptr`` and ``last_page_len``.

    Args:
        positions: int32 or int64 [rows].
        indptr: int32 [n + 1], n >= rows; entries behind the rows repeat the last, so that those rows have no pages.
        last_page_len: int32 [n].
        region_count: the most regions of a row.

    Raises:
        TypeError, ValueError: an argument is not as above; nothing is written.
    """
    op = "fixup_positions"
    for name, value in (("positions", positions), ("indptr", indptr), ("last_page_len", last_page_len)):
        validation.is_tensor(op, name, value)
    validation.is_int(op, "region_count", region_count, 1)
    torch.ops.sparse_prefill.fixup_positions(positions, indptr, last_page_len, region_count)
