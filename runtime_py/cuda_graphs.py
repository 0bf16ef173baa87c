"""Turns a step into a CUDA graph.

A call is captured only after it has run twice on the same stream: the first run of a kernel, a library
handle or a collective may allocate or synchronise, which a capture forbids. Each capture is checked to contain work: a
call that fails in the middle of a capture can leave an empty graph, which would replay without an error. Memory that a
call allocates comes from a pool that all graphs of one :class:`GraphPool` share and nothing else uses. So their replays
must follow each other on one stream, and a graph must leave its results for others in tensors made beforehand.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from .cuda_runtime import cuda_runtime

WARM_UP_RUNS = 2


class GraphError(RuntimeError):
    """A call can't be captured."""


class GraphPool:
    """Captures calls on one stream of one device."""

    def __init__(self, stream: torch.cuda.Stream):
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._broken: list[torch.cuda.CUDAGraph] = []

    def capture(self, call: Callable[[], object], name: str) -> Callable[[], None]:
        """A function that replays ``call`` on the current stream. ``call`` must have run at least twice.

        Raises:
            GraphError: the call failed or enqueued nothing; the next eager call and the next capture work again. Only
                torch's default generator of random numbers, which no network here uses, may refuse from then on.
        """
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._stream.synchronize()
        try:
            # The outer scope gives the caller's stream back where ending a broken capture raises. Other threads, such
            # as a watchdog, may use CUDA meanwhile.
            with (
                torch.cuda.stream(self._stream),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                call()
        except Exception as error:
            # If CUDA invalidated the capture, torch's allocators still take the pool for one that is being recorded to,
            # and ask the graph for the stream. So the graph must outlive them, and the next capture gets a new pool.
            self._broken.append(graph)
            self._pool = torch.cuda.graph_pool_handle()
            # Joining streams and ending a broken capture raise again; the first error is the one that says why.
            cause: BaseException = error
            while cause.__context__ and not cause.__suppress_context__:
                cause = cause.__context__
            raise GraphError(
                f"{name} can't be captured in a CUDA graph: {cause}; if it runs outside of a capture, leave its size "
                "out of --request-counts"
            ) from cause
        if not count_nodes(graph):
            raise GraphError(
                f"the capture of {name} is empty: it enqueued no work on the stream that was captured; enqueue it on "
                "torch's current stream"
            )
        graph.instantiate()
        return graph.replay


def count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Number of nodes of a captured graph that was kept.

    Raises:
        GraphError: the CUDA runtime refuses the graph.
        CudaRuntimeError: there is no CUDA runtime of torch's version.
    """
    count = ctypes.c_size_t()
    status = cuda_runtime().cudaGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    if status:
        raise GraphError(f"cudaGraphGetNodes failed with error {status}")
    return count.value
