"""Kernels that write a row's page ids and copy its query, in one launch."""

import triton
import triton.language as tl

WARPS = 4


@triton.jit(do_not_specialize=["table_rows", "table_width", "pages_size", "start", "num_pages"])
def _fill_prefill_pages_kernel(
    regions,
    table,
    owners,
    indptr,
    pages,
    query,
    contiguous_query,
    region_count,
    table_rows,
    table_width,
    pages_size,
    page_stride,
    start,
    num_pages,
    stride_region_row,
    stride_region,
    stride_table_row,
    stride_table,
    stride_query_row,
    stride_head,
    stride_dim,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ONE_OWNER: tl.constexpr,
    IDS: tl.constexpr,
    IDS_BLOCK: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # The query loads go first: they do not wait for the chain of indptr, region and table entry.
    element = tl.arange(0, COPY_BLOCK)
    size: tl.constexpr = HEADS * DIM
    source = query + row * stride_query_row
    target = contiguous_query + (start + row) * size
    head = (element // DIM).to(tl.int64)
    value = tl.load(source + head * stride_head + (element % DIM) * stride_dim, mask=element < size)

    if IDS:
        begin = tl.load(indptr + start + row).to(tl.int64)
        end = tl.load(indptr + start + row + 1).to(tl.int64)
        end = tl.minimum(end, pages_size)
        if ONE_OWNER:
            blocks = table
        else:
            owner = tl.load(owners + row)
            owner = tl.minimum(tl.maximum(owner, 0), table_rows - 1)
            blocks = table + owner.to(tl.int64) * stride_table_row
        for first in range(0, region_count, IDS_BLOCK):
            column = first + tl.arange(0, IDS_BLOCK)
            place = begin + column
            live = (column < region_count) & (place < end) & (place >= 0)
            region = tl.load(
                regions + row * stride_region_row + column.to(tl.int64) * stride_region, mask=column < region_count, other=0
            )
            region = tl.maximum(region, 0).to(tl.uint32)
            # A block holds BLOCK_SIZE / 8 regions; both quotients are of non-negative numbers.
            per_block: tl.constexpr = BLOCK_SIZE // 8
            index = tl.minimum(region // per_block, (table_width - 1).to(tl.uint32)).to(tl.int64)
            block = tl.load(blocks + index * stride_table, mask=live, other=0).to(tl.int64)
            page = block * page_stride + (region % per_block).to(tl.int64)
            if num_pages > 0:
                page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
            tl.store(pages + place, page.to(tl.int32), mask=live)

    tl.store(target + element, value, mask=element < size)
    for first in range(COPY_BLOCK, size, COPY_BLOCK):
        rest = first + element
        head = (rest // DIM).to(tl.int64)
        value = tl.load(source + head * stride_head + (rest % DIM) * stride_dim, mask=rest < size)
        tl.store(target + rest, value, mask=rest < size)


def fill_prefill_pages(regions, table, owners, indptr, pages, block_size, query, contiguous_query, page_stride, start, num_pages):
    rows, region_count = regions.shape
    if rows == 0:
        return
    heads, dim = query.shape[1], query.shape[2]
    if heads * dim == 0:
        # Nothing to copy, but the ids are still due.
        heads, dim = 0, 1
    _fill_prefill_pages_kernel[(rows,)](
        regions,
        table,
        owners,
        indptr,
        pages,
        query,
        contiguous_query,
        region_count,
        table.shape[0],
        table.shape[1],
        pages.shape[0],
        page_stride,
        start,
        num_pages,
        regions.stride(0),
        regions.stride(1),
        table.stride(0),
        table.stride(1),
        query.stride(0),
        query.stride(1),
        query.stride(2),
        BLOCK_SIZE=block_size,
        HEADS=heads,
        DIM=dim,
        ONE_OWNER=table.shape[0] == 1,
        IDS=region_count > 0 and table.numel() > 0,
        IDS_BLOCK=min(triton.next_power_of_2(max(region_count, 1)), 512),
        COPY_BLOCK=min(triton.next_power_of_2(max(heads * dim, 1)), 4096),
        num_warps=WARPS,
    )


@triton.jit(do_not_specialize=["start", "rows"])
def _store_owners_kernel(owners, kept, start, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(kept + start + row, tl.load(owners + row, mask=row < rows), mask=row < rows)


def store_owners(owners, kept, start):
    rows = owners.shape[0]
    if rows:
        _store_owners_kernel[(triton.cdiv(rows, 1024),)](owners, kept, start, rows, BLOCK=1024)
