"""How the nodes of a captured graph wait for each other.

Programmatic edges let a kernel start while the one before it still runs (programmatic dependent launch); over a full
edge it starts when that one has ended and its writes are visible.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from dspark_trt.runtime_py.cuda_runtime import function_with_edges

_KINDS = {0: "full", 1: "programmatic"}


class _EdgeData(ctypes.Structure):
    """``cudaGraphEdgeData``."""

    _fields_ = [
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    ]


def edge_kinds(call: Callable[[], Any], times: int = 1) -> dict[str, int]:
    """Edges of each kind in a graph of ``call``, ``times`` in a row; ``call`` must have run before."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    get = function_with_edges("cudaGraphGetEdges", "_v2")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    if status := get(handle, None, None, None, ctypes.byref(count)):
        raise RuntimeError(f"cudaGraphGetEdges failed with error {status}")
    nodes, data = (ctypes.c_void_p * count.value), (_EdgeData * count.value)()
    if status := get(handle, nodes(), nodes(), data, ctypes.byref(count)):
        raise RuntimeError(f"cudaGraphGetEdges failed with error {status}")
    return dict(Counter(_KINDS.get(edge.type, str(edge.type)) for edge in data))
