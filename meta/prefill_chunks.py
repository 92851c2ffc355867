"""prefill_chunks writes its out and returns nothing."""


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
    return None
