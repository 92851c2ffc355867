from __future__ import annotations

import torch

from .. import validation


def select_keys(
    logits: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, k: int, *, keep_first: int = 0, keep_last: int = 0
) -> torch.Tensor:
    """The k best keys of each row's window: ascending, relative to the window's start, -1 in unused slots.

    Equal logits prefer the smaller index, NaN counts as -inf, and -0 equals 0, so that the result is one set, the same on every
    run. A row with at most k keys gets all of them.

    Args:
        logits: fp32 [T, N]; columns outside a row's window are not read.
        ks, ke: int32 [T]: row t's window is ks[t] <= n < ke[t]; ke = ks for a padding row.
        k: slots a row.
        keep_first, keep_last: how many keys at the window's start and end are always selected, counted within k.

    Returns:
        int32 [T, k].

    Raises:
        TypeError, ValueError: an argument is not as above, or keep_first + keep_last > k.
    """
    op = "select_keys"
    for name, value in (("logits", logits), ("ks", ks), ("ke", ke)):
        validation.is_tensor(op, name, value)
    for name, value in (("k", k), ("keep_first", keep_first), ("keep_last", keep_last)):
        validation.is_int(op, name, value, 0)
    return torch.ops.sparse_prefill.select_keys(logits, ks, ke, k, keep_first, keep_last)
