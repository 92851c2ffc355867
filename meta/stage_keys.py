"""Compact pages of 64 keys: payload [pages, 1, 4, 64, 16] and scales [pages, 1, 4, 64], uint8."""


def _pages(like, total):
    pages = (total + 63) // 64
    return like.new_empty((pages, 1, 4, 64, 16)), like.new_empty((pages, 1, 4, 64))


def stage_keys(cache, block_table, cu_seq_lens, token_to_seq):
    return _pages(cache, token_to_seq.shape[0])


def pack_keys(cache, block_table, local_cu_seq_lens, max_local_keys):
    return cache.new_empty((max_local_keys, 68))


def restore_keys(gathered, token_to_seq, cu_seq_lens, all_cu, world, interleave):
    return _pages(gathered, token_to_seq.shape[0])
