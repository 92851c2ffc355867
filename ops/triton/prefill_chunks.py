"""Runs a step's chunk plan: stage a request set, decode its keys once, score and select its rows a tile at a time.

Everything a step needs is allocated once, whatever the number of chunks: one logits tile, the decoded keys and queries, and the
selector's scratch. Only the staged pages are allocated per request set, after the previous set's are released.
"""

import torch
import triton

from .. import validation
from .score_keys import Operands
from .select_keys import Scratch
from .stage_keys import stage_keys

# One logits tile holds at most this many bytes.
LOGITS_BYTES = 1 << 29


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
    set_rows, chunk_rows, tile_rows = sets.tolist(), chunks.tolist(), tiles.tolist()
    # Scored keys are whole pages, so a tile's row is a little longer than the plan's: a tile may take several passes.
    columns = [triton.cdiv(row[1], 64) * 64 for row in set_rows]
    passes = []
    for chunk, first_row, num_rows, row_step in tile_rows:
        index = chunk_rows[chunk][0]
        most = max(1, LOGITS_BYTES // (4 * max(1, columns[index])))
        for first in range(0, num_rows, most):
            passes.append((chunk, first_row + first * row_step, min(most, num_rows - first), row_step))
    passes = [p for p in passes if p[2] > 0]
    if not passes or k == 0:
        return
    most_rows = max(p[2] for p in passes)
    used = [columns[chunk_rows[p[0]][0]] for p in passes]
    most_keys = max(used)
    if most_keys == 0:
        for chunk, first_row, num_rows, row_step in passes:
            start = chunk_rows[chunk][1] + first_row
            out[start : start + (num_rows - 1) * row_step + 1 : row_step] = -1
        return
    tile = torch.empty(max(p[2] * n for p, n in zip(passes, used, strict=True)), dtype=torch.float32, device=q.device)
    operands = Operands(q.device, weights.shape[1], most_rows, most_keys, precision)
    scratch = Scratch(q.device, k, most_rows, most_keys)
    staged, pages = -1, None
    for (chunk, first_row, num_rows, row_step), keys in zip(passes, used, strict=True):
        index, token_start, _, window = chunk_rows[chunk]
        if index != staged:
            pages = None  # the previous set's pages are released before the next is staged
            requests, total, width, table, cu, key, _, _ = set_rows[index]
            pages = stage_keys(
                cache,
                block_tables[table : table + requests * width].view(requests, width),
                cu_seq_lens[cu : cu + requests + 1],
                token_to_seq[key : key + total],
            )
            operands.use(*pages)
            staged = index
        logits = tile[: num_rows * keys].view(num_rows, keys)
        if keys:
            rows = (token_start + first_row, num_rows, row_step)
            operands.score_rows(q, q_scale, weights, weight_scale, *rows, ks, ke, window + first_row, logits, False)
        target = (out, token_start + first_row, row_step)
        scratch.select(logits, ks, ke, window + first_row, row_step, num_rows, *target, k, keep_first, keep_last)
