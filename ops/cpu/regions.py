"""A row's regions and its page counts."""

import torch


def append_own_region(selected, positions):
    rows, k = selected.shape
    own = torch.div(positions.to(torch.int64), 8, rounding_mode="floor")
    out = torch.empty((rows, k + 1), dtype=torch.int32, device=selected.device)
    out[:, :k] = selected
    out[:, k] = -1
    # The own region is the last of a row's own.shape[0] = min(own, k) + 1 entries; nothing may follow it.
    column = torch.arange(k + 1, device=selected.device)
    last = own.clamp(max=k).unsqueeze(1)
    out = torch.where(column == last, own.to(torch.int32).unsqueeze(1), out)
    return out.masked_fill_((column > last) | (own < 0).unsqueeze(1), -1)


def fixup_positions(positions, indptr, last_page_len, region_count):
    rows = positions.shape[0]
    positions = positions.to(torch.int64)
    counts = (torch.div(positions, 8, rounding_mode="floor") + 1).clamp(0, region_count)
    indptr[0] = 0
    ends = counts.cumsum(0).to(torch.int32)
    indptr[1 : rows + 1] = ends
    indptr[rows + 1 :] = indptr[rows].clone()
    last_page_len[:rows] = positions.remainder(8).to(torch.int32) + 1
    last_page_len[rows:] = 8
