"""Marks sizes that change every step, so that one compilation serves them all."""

from __future__ import annotations

import dataclasses

import torch


def mark_unbacked_sizes(*values, dims: tuple[int, ...] = (0,)) -> None:
    """Marks dimensions of tensors as unbacked before a function is first compiled: one graph then serves 0, 1 and every size.

    Args:
        values: tensors, or objects that hold some: tuples, lists, :class:`FP4PrefillMetadata`, :class:`PrefillChunk`,
            :class:`StagedPrefillPages`. Of those every tensor is marked.
        dims: dimensions to mark; a tensor with fewer has those it has marked. Tables [requests, width] want (0, 1).

    Only the sizes of a step (rows, keys, requests, chunks, pages) should be marked. Block counts of caches and buffers that
    ``CompactPagedPrefill(max_rows=...)`` fixes stay static. Without this torch compiles again whenever a size first changes, and
    for every size that is 0 or 1.
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            for dim in dims:
                if dim < value.dim():
                    torch._dynamo.decorators.mark_unbacked(value, dim)
        elif isinstance(value, (tuple, list)):
            mark_unbacked_sizes(*value, dims=dims)
        elif dataclasses.is_dataclass(value):
            mark_unbacked_sizes(*(getattr(value, field.name) for field in dataclasses.fields(value)), dims=dims)
