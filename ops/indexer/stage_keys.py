from __future__ import annotations

import torch

from .. import validation
from .layout import LAYOUT


def stage_keys(
    cache: torch.Tensor,
    chunk,
    world: int = 1,
    interleave: int = 1,
    all_cu: torch.Tensor | None = None,
    *,
    layout: str = LAYOUT,
    group=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies one request set's index keys, in the set's order, into compact pages of 64.

    Args:
        cache: uint8 [num_blocks, 64, 68], strides (P, 68, 1), P >= 4352 bytes.
        chunk: any object with ``block_table`` int32 [R, width] (any row stride), ``cu_seq_lens`` int32 [R + 1] and
            ``token_to_seq`` int32 [total], such as a :class:`PrefillChunk`. ``total`` may exceed the device's own
            ``cu_seq_lens[R]``; table entries past a request's keys are never read through.
        world, interleave: context-parallel ranks and positions a rank holds in turn. Only world 1 is supported so far.
        all_cu: every rank's cumulative local counts, int32 [world, R + 1]; unused at world 1.
        layout: "preshuffled64".
        group: the process group of the exchange; must be None at world 1.

    Returns:
        ``(payload, scales)``: uint8 [pages, 1, 4, 64, 16] and uint8 [pages, 1, 4, 64], pages = ceil(total / 64). Key g is in
        page g // 64, row g % 64; its scale bytes in column (g % 16) * 4 + g % 64 // 16. Every byte past the last key is zero.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    op = "stage_keys"
    validation.layout(op, layout)
    validation.one_rank(op, world)
    validation.is_int(op, "interleave", interleave, 1)
    if group is not None:
        raise ValueError(f"{op}: group was {group!r}, must be None at world 1")
    validation.is_tensor(op, "cache", cache)
    block_table, cu_seq_lens, token_to_seq = chunk_tensors(op, chunk)
    return torch.ops.sparse_prefill.stage_keys(cache, block_table, cu_seq_lens, token_to_seq)


def chunk_tensors(op: str, chunk) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The request-set tensors of a chunk, which may be any object with these attributes."""
    tensors = []
    for name in ("block_table", "cu_seq_lens", "token_to_seq"):
        if not hasattr(chunk, name):
            raise TypeError(f"{op}: chunk was {type(chunk).__name__}, must have an attribute {name}")
        value = getattr(chunk, name)
        validation.is_tensor(op, f"chunk.{name}", value)
        tensors.append(value)
    return tuple(tensors)
