from __future__ import annotations

import torch

from .. import validation


def split_queries(op: str, q) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(q, q_scale)`` of a bf16 or fp16 tensor or a (packed, scale) pair."""
    if isinstance(q, (tuple, list)):
        if len(q) != 2:
            raise ValueError(f"{op}: q was a {type(q).__name__} of {len(q)}, must be a tensor or a (packed, scale) pair")
        validation.is_tensor(op, "q[0]", q[0])
        validation.is_tensor(op, "q[1]", q[1])
        return q[0], q[1]
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"{op}: q was {type(q).__name__}, must be a torch.Tensor or a (packed, scale) pair of them")
    return q, None


def score_keys(
    q,
    payload: torch.Tensor,
    scales: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    total_keys: int | None = None,
    *,
    weight_scale: float = 1.0,
    precision: str = "exact",
) -> torch.Tensor:
    """Index logits of every query row against the staged keys of its window.

    ``logit[t, n] = sum over heads h of weights[t, h] * weight_scale * max(dot(q[t, h], key[n]), 0)`` for
    ``ks[t] <= n < ke[t]``, accumulated in fp32; -inf elsewhere. A logit's bits depend on its row and key alone.

    Args:
        q: (packed uint8 [T, H, 64], scale uint8 [T, H, 4]) in MXFP4, or a bf16 or fp16 tensor [T, H, 128], which is quantized
            first. 1 <= H <= 128.
        payload, scales: as :func:`stage_keys` returns them.
        weights: bf16 or fp32 [T, H]; may be negative.
        ks, ke: int32 [T], each row's window of staged keys.
        total_keys: columns to return, at most 64 * pages; all of them when None.
        weight_scale: a factor of every weight.
        precision: "exact" (error at most 2e-6 of the sum of the magnitudes), or "fast", which lets a GPU use fp8 tensor cores
            (5e-4 of it) and is exact on a CPU.

    Returns:
        fp32 [T, total_keys]. A key or query group with scale byte 255 gives NaN.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    op = "score_keys"
    q, q_scale = split_queries(op, q)
    for name, value in (("payload", payload), ("scales", scales), ("weights", weights), ("ks", ks), ("ke", ke)):
        validation.is_tensor(op, name, value)
    validation.is_number(op, "weight_scale", weight_scale)
    validation.one_of(op, "precision", precision, validation.PRECISIONS)
    if total_keys is not None:
        validation.total_keys(op, total_keys, payload)
    logits = torch.ops.sparse_prefill.score_keys(q, q_scale, payload, scales, weights, ks, ke, weight_scale, precision)
    return logits if total_keys is None else logits.narrow(1, 0, total_keys)
