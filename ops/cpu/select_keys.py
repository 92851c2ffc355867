"""The k largest logits of each row's window, as ascending window-relative indices; equal logits prefer the smaller index."""

import torch


def select_window(logits, ks, ke, k, keep_first, keep_last, base=0):
    """Selection over columns ``base .. base + logits.shape[1] - 1``; columns outside a row's [ks, ke) may hold anything."""
    rows, columns = logits.shape
    ks, ke = ks.to(torch.int64).unsqueeze(1), ke.to(torch.int64).unsqueeze(1)
    column = torch.arange(base, base + columns, device=logits.device).unsqueeze(0)
    # Orderable integer of each fp32: NaN counts as -inf, -0 as +0.
    value = torch.where(logits.isnan(), -torch.inf, logits) + 0.0
    bits = value.view(torch.int32).to(torch.int64)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    inside = (column >= ks) & (column < ke)
    forced = (column < ks + keep_first) | (column >= ke - keep_last)
    order = torch.where(forced, 1 << 32, order)
    order = torch.where(inside, order, -(1 << 33))
    # The low 24+ bits break ties by column, so that all keys differ and any top-k algorithm gives one set.
    width = max(columns - 1, 1).bit_length()
    order = (order << width) + (columns - 1 - torch.arange(columns, device=logits.device))
    taken = min(k, columns)
    best = order.topk(taken, dim=1, sorted=False).indices + base
    # Columns outside the window sort last and become -1.
    beyond = torch.iinfo(torch.int64).max
    best = torch.where((best >= ks) & (best < ke), best - ks, beyond).sort(dim=1).values
    out = torch.full((rows, k), -1, dtype=torch.int32, device=logits.device)
    out[:, :taken] = torch.where(best == beyond, -1, best)
    return out


# Rows selected at once, so that the int64 scratch stays near 32 MiB whatever the number of rows.
_ELEMENTS = 1 << 20


def select_keys(logits, ks, ke, k, keep_first, keep_last):
    rows, columns = logits.shape
    out = torch.full((rows, k), -1, dtype=torch.int32, device=logits.device)
    if columns == 0:
        return out
    # Wrong windows never leave the logits.
    ks, ke = ks.clamp(0, columns), ke.clamp(0, columns)
    step = max(1, _ELEMENTS // columns)
    for first in range(0, rows, step):
        tile = slice(first, first + step)
        out[tile] = select_window(logits[tile], ks[tile], ke[tile], k, keep_first, keep_last)
    return out
