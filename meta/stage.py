"""A dense cache of one KV group: [pages, 1, block_size, 2 * dim]."""

import torch


def stage_prefill_pages(cache, pages, dtype, k_scale, v_scale):
    return cache.new_empty((pages.shape[0], 1, cache.shape[2], cache.shape[3]), dtype=getattr(torch, dtype))
