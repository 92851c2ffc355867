"""Both ops write their buffers and return nothing."""


def fill_prefill_pages(regions, table, owners, indptr, pages, block_size, query, contiguous_query, page_stride, start, num_pages):
    return None


def store_owners(owners, kept, start):
    return None
