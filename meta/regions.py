"""append_own_region adds one column; fixup_positions writes its buffers and returns nothing."""


def append_own_region(selected, positions):
    return selected.new_empty((selected.shape[0], selected.shape[1] + 1))


def fixup_positions(positions, indptr, last_page_len, region_count):
    return None
