from __future__ import annotations

import torch

from .. import validation
from .chunks import FP4PrefillMetadata
from .layout import LAYOUT
from .score_keys import split_queries


def prefill_chunks(
    q,
    weights: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    metadata: FP4PrefillMetadata,
    world: int,
    interleave: int,
    weight_scale: float,
    *,
    keep_first: int = 0,
    keep_last: int = 0,
    precision: str = "exact",
    layout: str = LAYOUT,
    group=None,
) -> None:
    """Stages, scores and selects every chunk of a step. Mutates ``out``.

    A chunk's request set is staged once, also when several chunks in a row share it, and its pages are released before the next
    set is staged; one logits tile is reused. See :func:`prefill_workspace_bytes` for the peak scratch memory.

    Args:
        q: the step's queries, (packed uint8 [T, H, 64], scale uint8 [T, H, 4]) or bf16/fp16 [T, H, 128].
        weights: bf16 or fp32 [T, H].
        cache: uint8 [num_blocks, 64, 68], see :func:`store_index_keys`.
        out: int32 [T, k]. Rows of a chunk are wholly rewritten (ascending request-local indices, then -1); all others are left
            alone. Requests without keys make no chunk: fill ``out`` with -1 first where their rows matter.
        metadata: what :func:`prepare_prefill_metadata` returned.
        world, interleave: as given there. Only world 1 is supported so far.
        weight_scale: a factor of every weight.
        keep_first, keep_last: see :func:`select_keys`.
        precision: see :func:`score_keys`.
        layout: "preshuffled64".
        group: the process group of the exchange; must be None at world 1.

    Raises:
        TypeError, ValueError: an argument is not as above; nothing is written.
    """
    op = "prefill_chunks"
    validation.layout(op, layout)
    validation.one_rank(op, world)
    validation.is_int(op, "interleave", interleave, 1)
    if group is not None:
        raise ValueError(f"{op}: group was {group!r}, must be None at world 1")
    if not isinstance(metadata, FP4PrefillMetadata):
        raise TypeError(
            f"{op}: metadata was {type(metadata).__name__}, must be the FP4PrefillMetadata that prepare_prefill_metadata returns"
        )
    q, q_scale = split_queries(op, q)
    for name, value in (("weights", weights), ("cache", cache), ("out", out)):
        validation.is_tensor(op, name, value)
    validation.is_number(op, "weight_scale", weight_scale)
    validation.is_int(op, "keep_first", keep_first, 0)
    validation.is_int(op, "keep_last", keep_last, 0)
    validation.one_of(op, "precision", precision, validation.PRECISIONS)
    plans = metadata.plans
    validation.plan_ranks(op, plans, world, interleave)
    torch.ops.sparse_prefill.prefill_chunks(
        q,
        q_scale,
        weights,
        cache,
        out,
        plans.sets,
        plans.chunks,
        plans.tiles,
        plans.block_tables,
        plans.cu_seq_lens,
        plans.token_to_seq,
        plans.ks,
        plans.ke,
        plans.all_cu,
        world,
        interleave,
        weight_scale,
        keep_first,
        keep_last,
        precision,
    )
