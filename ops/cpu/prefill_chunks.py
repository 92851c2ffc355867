"""Runs a step's chunk plan: stage a request set, score and select its rows a tile at a time, hand the selections over."""

import torch

from .. import validation
from . import score_keys as scoring
from .select_keys import select_window
from .stage_keys import stage_keys


def prefill_chunks(
    q,
    q_scale,
    weights,
    cache,
    out,
    sets,
    chunks,
    tiles,
    block_tables,
    cu_seq_lens,
    token_to_seq,
    ks,
    ke,
    all_cu,
    world,
    interleave,
    weight_scale,
    keep_first,
    keep_last,
    precision,
):
    validation.plan_tables("prefill_chunks", out.shape[0], sets, chunks, tiles, block_tables, cu_seq_lens, token_to_seq, ks)
    k = out.shape[1]
    set_rows, chunk_rows = sets.tolist(), chunks.tolist()
    staged, keys = -1, None
    for chunk, first_row, num_rows, row_step in tiles.tolist():
        index, token_start, _, window = chunk_rows[chunk]
        if index != staged:
            keys = None  # the previous set's pages are released before the next is staged
            keys = _stage(cache, set_rows[index], block_tables, cu_seq_lens, token_to_seq)
            staged = index
        total = min(set_rows[index][1], len(keys))
        step = scoring.row_step(total, weights.shape[1])
        for first in range(0, num_rows, step):
            start = first_row + first * row_step
            stop = first_row + (min(first + step, num_rows) - 1) * row_step + 1
            rows = slice(token_start + start, token_start + stop, row_step)
            windows = slice(window + start, window + stop, row_step)
            low, high = ks[windows].clamp(0, total), ke[windows].clamp(0, total)
            bounds = scoring.window_bounds(low, high)
            if bounds is None:
                out[rows] = -1
                continue
            begin, end = bounds
            logits = torch.empty((high.shape[0], end - begin), device=q.device)
            scale = None if q_scale is None else q_scale[rows]
            scoring.score_rows(q[rows], scale, keys, scoring.scaled_weights(weights[rows], weight_scale), begin, end, logits)
            out[rows] = select_window(logits, low, high, k, keep_first, keep_last, begin)


def _stage(cache, row, block_tables, cu_seq_lens, token_to_seq):
    requests, total, width, table, cu, key, _, _ = row
    return scoring.Keys(
        *stage_keys(
            cache,
            block_tables[table : table + requests * width].view(requests, width),
            cu_seq_lens[cu : cu + requests + 1],
            token_to_seq[key : key + total],
        )
    )
