"""Writes the page ids a row's attention reads, and the query copy beside them."""

import torch


def fill_prefill_pages(regions, table, owners, indptr, pages, block_size, query, contiguous_query, page_stride, start, num_pages):
    rows, region_count = regions.shape
    contiguous_query[start : start + rows] = query
    if rows == 0 or region_count == 0 or table.numel() == 0:
        return
    bounds = indptr[start : start + rows + 1].to(torch.int64)
    begin, end = bounds[:-1].unsqueeze(1), bounds[1:].unsqueeze(1)
    column = torch.arange(region_count, device=regions.device)
    place = begin + column
    live = (place < end) & (place >= 0) & (place < pages.shape[0])
    if table.shape[0] == 1:
        owner = torch.zeros((rows, 1), dtype=torch.int64, device=regions.device)
    else:
        owner = owners.to(torch.int64).clamp(0, table.shape[0] - 1).unsqueeze(1)
    token = regions.to(torch.int64).clamp_min(0) * 8
    block = table[owner, (token // block_size).clamp_max(table.shape[1] - 1)].to(torch.int64)
    page = block * page_stride + token % block_size // 8
    if num_pages > 0:
        page = page.clamp(0, num_pages - 1)
    pages[place[live]] = page[live].to(torch.int32)


def store_owners(owners, kept, start):
    kept[start : start + owners.shape[0]] = owners
