"""Attention of every row over its own 8-token pages, in fp32."""

import torch

from ..meta.view import view_shape

PAGE = 8
# fp32 elements of K gathered for a tile of rows: few enough to stay in cache between the gather and the products.
_TILE = 1 << 19
# fp32 elements of K converted together for all rows that share them.
_COMPACT = 1 << 25


def _fp32_pages(cache, ids, k_scale, v_scale):
    """K and V of the named pages, fp32 [ids + 1, 8*dim] each; the last page is zeros."""
    size, stride = view_shape(cache)
    raw = cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache
    width = cache.shape[3]
    dim = width // 2
    pages = raw.as_strided((size[0], PAGE, width), (stride[0], stride[1], 1), raw.storage_offset())
    k = torch.zeros((ids.shape[0] + 1, PAGE, dim), device=cache.device)
    v = torch.zeros_like(k)
    step = max(1, _TILE // (PAGE * width))
    for first in range(0, ids.shape[0], step):
        part = pages[ids[first : first + step]]
        if part.dtype is torch.uint8:
            part = part.view(torch.float8_e4m3fn)
        k[first : first + part.shape[0]].copy_(part[..., :dim])
        v[first : first + part.shape[0]].copy_(part[..., dim:])
    if raw.dtype is torch.uint8:
        k *= k_scale
        v *= v_scale
    return k.view(-1, PAGE * dim), v.view(-1, PAGE * dim)


def paged_attention(query, cache, pages, indptr, last_page_len, owners, out, scale, k_scale, v_scale, backend):
    rows = out.shape[0]
    if rows == 0:
        return
    limit = view_shape(cache)[0][0]
    bounds = indptr[: rows + 1].to(torch.int64)
    begin = bounds[:-1].clamp(0, pages.shape[0])
    count = (torch.minimum(bounds[1:], torch.tensor(pages.shape[0])) - begin).clamp_min(0)
    live = count.nonzero().squeeze(1)
    if live.numel() < rows:
        out[:] = 0
    if live.numel() == 0:
        return
    tail = last_page_len[:rows].to(torch.int64).clamp(1, PAGE)
    dim = query.shape[2]
    # Rows are taken in order, as many as keep a tile's keys, and the fp32 pages they share, in bounds.
    row = 0
    while row < live.shape[0]:
        ends = count[live[row:]].cumsum(0)
        stop = row + max(1, int(torch.searchsorted(ends, _COMPACT // (PAGE * dim), right=True)))
        _attend(query, cache, pages, begin, count, tail, live[row:stop], out, scale, k_scale, v_scale, limit)
        row = stop


def _attend(query, cache, pages, begin, count, tail, rows, out, scale, k_scale, v_scale, limit):
    """Rows whose distinct pages are converted to fp32 together."""
    total = count[rows]
    widest = int(total.max())
    column = torch.arange(widest, device=query.device)
    used = column < total.unsqueeze(1)
    place = begin[rows].unsqueeze(1) + torch.where(used, column, 0)
    # A page id outside the cache reads the nearest page inside it.
    ids = pages[place].to(torch.int64).clamp(0, limit - 1)
    names, index = torch.unique(ids, return_inverse=True)
    k_pages, v_pages = _fp32_pages(cache, names, k_scale, v_scale)
    index = torch.where(used, index, names.shape[0])
    dim = query.shape[2]
    token = torch.arange(PAGE, device=query.device)
    step = max(1, _TILE // (PAGE * widest * dim))
    k_tile, v_tile = torch.empty((2, step * widest, PAGE * dim), device=query.device)
    for first in range(0, rows.shape[0], step):
        part = rows[first : first + step]
        n, most = part.shape[0], int(count[part].max())
        tile = index[first : first + step, :most].reshape(-1)
        k = torch.index_select(k_pages, 0, tile, out=k_tile[: n * most]).view(n, most * PAGE, dim)
        v = torch.index_select(v_pages, 0, tile, out=v_tile[: n * most]).view(n, most, PAGE, dim)
        # Tokens past the last page's length are seen by no row: they must not reach the sum, not even as 0 * NaN.
        line = torch.arange(n, device=query.device)
        last = count[part] - 1
        hidden = token >= tail[part].unsqueeze(1)
        v[line, last] = v[line, last].masked_fill(hidden.unsqueeze(-1), 0.0)
        mask = torch.arange(most * PAGE, device=query.device) >= (last * PAGE + tail[part]).unsqueeze(1)
        logits = torch.bmm(query[part].to(torch.float32) * scale, k.transpose(1, 2))
        logits.masked_fill_(mask.unsqueeze(1), -torch.inf)
        out[part] = torch.bmm(logits.softmax(dim=-1), v.view(n, most * PAGE, dim)).to(out.dtype)
