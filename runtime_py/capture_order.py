"""Forks a stream and joins it again, inside a capture without edges that others imply.

A stream under capture carries the set of nodes that its next node will depend on. Waiting for another stream adds that
stream's nodes to the set and removes none. Without correction, the first node of each later fork would also depend on
the side stream's previous work, and a join with nothing beside it would depend on both ends of the fork. Such edges
impose no new order, but a node that waits for two others starts microseconds later (tests/benchmarks/results, two
streams). Under capture the set is therefore replaced, not added to. Outside of a capture, streams wait for events as
usual.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from .cuda_runtime import function_with_edges

_ACTIVE = 1  # cudaStreamCaptureStatusActive; an invalidated capture has another status and takes no more nodes
_SET = 1  # cudaStreamSetCaptureDependencies
_EDGE_BYTES = 8  # sizeof(cudaGraphEdgeData)


class CaptureError(RuntimeError):
    """CUDA can't tell or set what a captured stream waits for."""


@dataclass(frozen=True)
class Dependencies:
    """The nodes that a captured stream's next node will depend on."""

    nodes: tuple[int, ...]
    edges: bytes
    """A ``cudaGraphEdgeData`` of each; empty where all are full edges."""


def fork(main: torch.cuda.Stream, side: torch.cuda.Stream) -> Dependencies | None:
    """Let ``side``, all of whose work ``main`` has waited for, go on from where ``main`` is.

    Returns:
        What :func:`join` needs; None outside of a capture.

    Raises:
        CaptureError: CUDA does not tell, or refuses.
    """
    side.wait_stream(main)
    known = dependencies(main)
    if known:
        _set(side, known)
    return known


def join(main: torch.cuda.Stream, side: torch.cuda.Stream, forked: Dependencies | None) -> None:
    """Let ``main`` wait for ``side``.

    Args:
        forked: what :func:`fork` returned for it.

    Raises:
        CaptureError: CUDA does not tell, or refuses.
    """
    ends = dependencies(side) if forked and dependencies(main) == forked else None
    if ends:  # nothing ran beside: all that main waits for, side's work waits for
        _set(main, ends)
    else:
        main.wait_stream(side)


def dependencies(stream: torch.cuda.Stream) -> Dependencies | None:
    """What the stream's next node will depend on; None outside of a capture, and at its start.

    Raises:
        CaptureError: CUDA does not tell.
    """
    status, count = ctypes.c_int(), ctypes.c_size_t()
    nodes, edges = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_void_p()
    outputs = (ctypes.byref(x) for x in (nodes, edges, count))
    _call(
        "cudaStreamGetCaptureInfo",
        "_v3",
        ctypes.c_void_p(stream.cuda_stream),
        ctypes.byref(status),
        None,
        None,
        *outputs,
    )
    if status.value != _ACTIVE or not count.value:
        return None
    held = ctypes.string_at(edges.value, _EDGE_BYTES * count.value) if edges.value else b""
    return Dependencies(tuple(nodes[i] or 0 for i in range(count.value)), held)


def _set(stream: torch.cuda.Stream, wanted: Dependencies) -> None:
    count = len(wanted.nodes)
    nodes = (ctypes.c_void_p * count)(*wanted.nodes)
    edges = ctypes.create_string_buffer(wanted.edges, len(wanted.edges)) if wanted.edges else None
    handle = ctypes.c_void_p(stream.cuda_stream)
    _call(
        "cudaStreamUpdateCaptureDependencies", "_v2", handle, nodes, edges, ctypes.c_size_t(count), ctypes.c_uint(_SET)
    )


def _call(name: str, suffix: str, *arguments: Any) -> None:
    if error := function_with_edges(name, suffix)(*arguments):
        raise CaptureError(f"{name} failed with CUDA error {error}; open the decoder with side_stream=False")
