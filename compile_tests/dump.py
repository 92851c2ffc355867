"""What the compiler sees of a function, as text that is the same on every supported torch version."""

from __future__ import annotations

import torch
from torch._dynamo.testing import AotEagerAndRecordGraphs, normalize_gm


def graphs(function, *args, device=False) -> str:
    """The Dynamo graph and the AOT graph of ``function(*args)``, which must be traced without a break.

    Strides are part of the text: they are what kernels see.
    """
    backend = AotEagerAndRecordGraphs()
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    assert len(backend.graphs) == len(backend.fw_graphs) == 1

    def text(graph):
        return normalize_gm(graph.print_readable(print_output=False, include_stride=True, include_device=device)).strip()

    return f"{text(backend.graphs[0])}\n\n{text(backend.fw_graphs[0])}\n"
