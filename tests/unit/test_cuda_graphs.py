"""What a capture that fails says, with a model in the place of CUDA's; tests/gpu/test_decoding.py has the real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from dspark_trt.runtime_py.cuda_graphs import GraphError, GraphPool


class Stream:
    def synchronize(self) -> None:
        pass


@contextmanager
def broken_capture(*_: Any, **__: Any) -> Iterator[None]:
    """Ending a capture that an operation has invalidated raises."""
    try:
        yield
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")


@contextmanager
def joined() -> Iterator[None]:
    """Joining a side stream in it raises as well."""
    try:
        yield
    finally:
        raise RuntimeError("operation not permitted: the capture was invalidated")


def synchronises() -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


def synchronises_beside_a_side_stream() -> None:
    with joined():
        synchronises()


def fails_for_a_reason_of_its_own() -> None:
    try:
        {}["weights"]
    except KeyError:
        raise ValueError("weights are missing") from None


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (synchronises, "operation not permitted when stream is capturing"),
        (synchronises_beside_a_side_stream, "operation not permitted when stream is capturing"),
        (fails_for_a_reason_of_its_own, "weights are missing"),
    ],
)
def test_the_first_error_is_the_one_that_is_told(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], None], reason: str
) -> None:
    """GR-2: not what came of it."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "graph", broken_capture)
    with pytest.raises(GraphError, match=f"a step can't be captured in a CUDA graph: {reason}; if it runs outside"):
        GraphPool(Stream()).capture(call, "a step")  # type: ignore[arg-type]
