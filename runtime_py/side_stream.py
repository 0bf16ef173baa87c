"""Computes a sublayer's mHC coefficients beside the sublayer itself.

A sublayer's coefficients come from the streams that enter it and are needed only at the boundary after
it, so on a GPU they can be computed on a second stream while attention or experts keep the first one busy.
The second stream is forked from the first where the residual streams are known, and joined before the first operation
that reads a coefficient, at the latest when the network ends. Forks and joins are events, so a capture turns them into
edges of the graph. Every way out of a scope joins, so a capture that fails reports its own error and not unjoined work.

Memory needs no further care. What is computed on the side comes from the side stream's own pool, and what
it reads lives until the boundary that joins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..plugins.kernels import execute
from ..plugins.mhc_coefficients import MHC_COEFFICIENTS
from ..plugins.op import Op
from .capture_order import Dependencies, fork, join


class SideStream:
    """One extra stream of one device; serves any number of networks that run one after the other."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._pending: set[int] = set()
        self._forked: Dependencies | None = None

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Join when the ``with`` block ends, in whatever way; :meth:`execute` is for inside of it."""
        try:
            yield
        finally:
            self._join()

    def execute(self, op: Op, attributes: Any, tensors: Sequence[Tensor], bindings: Mapping[str, Any]) -> Any:
        """Run an operation by kernel, the coefficients on the side; an :data:`~dspark_trt.plugins.op.OpExecutor`."""
        if any(t.data_ptr() in self._pending for t in tensors):
            self._join()
        if op is not MHC_COEFFICIENTS:
            return execute(op, attributes, tensors, bindings)
        if self._pending:  # a fork would let go of what was not joined yet
            self._stream.wait_stream(torch.cuda.current_stream())
        else:
            self._forked = fork(torch.cuda.current_stream(), self._stream)
        with torch.cuda.stream(self._stream):
            results = execute(op, attributes, tensors, bindings)
        self._pending |= {t.data_ptr() for t in results}
        return results

    def _join(self) -> None:
        if self._pending:
            join(torch.cuda.current_stream(), self._stream, self._forked)
            self._pending, self._forked = set(), None
