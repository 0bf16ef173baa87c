"""Forks and joins inside a capture: the order that plain waits give, with no edge that others imply.

CUDA is a model here: a capture that adds nodes to a graph as CUDA does. GPU runs count the edges of real graphs
(``two_streams`` in the results of tests/benchmarks/mhc.py).
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dspark_trt.plugins.hc_collapse import HC_COLLAPSE
from dspark_trt.plugins.mhc_coefficients import MHC_COEFFICIENTS
from dspark_trt.plugins.op import Op
from dspark_trt.runtime_py import cuda_runtime, side_stream
from dspark_trt.runtime_py.capture_order import CaptureError, fork, join
from dspark_trt.runtime_py.side_stream import SideStream
from torch import Tensor

from tests.fake_streams import FakeStreams

NAMES = {12: ("cudaStreamGetCaptureInfo_v3", "cudaStreamUpdateCaptureDependencies_v2")}
NAMES[13] = tuple(name.rsplit("_", 1)[0] for name in NAMES[12])
PROGRAMMATIC = bytes([1, 0, 1, 0, 0, 0, 0, 0])


class Stream:
    """A stream of the model; ``ends`` maps what its next node waits for to the edge's bytes."""

    def __init__(self, capture: Capture):
        self.cuda_stream = 1 + len(capture.streams)
        self.ends: dict[int, bytes] = {}
        capture.streams[self.cuda_stream] = self

    def wait_stream(self, other: Stream) -> None:
        self.ends = {**self.ends, **other.ends}


class Capture(FakeStreams):
    """One capture and its graph: ``edges`` of a node are the nodes it waits for."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.edges: dict[int, set[int]] = {}
        self.status, self.error = 1, 0
        self._kept: list[Any] = []
        self.main = self.current = Stream(self)

    def stream(self, device: Any = None) -> Stream:
        return Stream(self)

    def add_node(self) -> int:
        """Enqueue something on the current stream."""
        node = 1000 + len(self.edges)
        self.edges[node], self.current.ends = set(self.current.ends), {node: PROGRAMMATIC}
        return node

    def get(self, stream: Any, status: Any, ident: None, graph: None, nodes: Any, edges: Any, count: Any) -> int:
        ends = self.streams[stream.value].ends
        self._kept += [(ctypes.c_void_p * len(ends))(*ends), ctypes.create_string_buffer(b"".join(ends.values()))]
        status._obj.value, count._obj.value = self.status, len(ends)
        nodes._obj.contents = ctypes.c_void_p.from_buffer(self._kept[-2]) if ends else ctypes.c_void_p()
        edges._obj.value = ctypes.addressof(self._kept[-1])
        return self.error

    def update(self, stream: Any, nodes: Any, edges: Any, count: Any, flags: Any) -> int:
        assert flags.value == 1
        data = [edges.raw[8 * i : 8 * i + 8] for i in range(count.value)]
        self.streams[stream.value].ends = dict(zip(nodes, data, strict=True))
        return self.error

    def reached(self) -> dict[int, set[int]]:
        """All nodes that each node runs after."""
        found: dict[int, set[int]] = {}
        for node, waited in self.edges.items():
            found[node] = waited.union(*(found[one] for one in waited))
        return found

    def implied_edges(self) -> int:
        """Edges that order nothing that others do not."""
        behind = self.reached()
        return sum(any(one in behind[other] for other in waited) for waited in self.edges.values() for one in waited)


@pytest.fixture(params=[12, 13], ids=["cuda12", "cuda13"])
def new_capture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Capture]:
    """Starts a capture in the model's place of CUDA's."""

    def start() -> Capture:
        capture = Capture()
        get, update = NAMES[request.param]
        runtime = type("Runtime", (), {get: staticmethod(capture.get), update: staticmethod(capture.update)})
        monkeypatch.setattr(cuda_runtime, "cuda_runtime", lambda: runtime)
        monkeypatch.setattr(torch.version, "cuda", f"{request.param}.0")
        capture.install(monkeypatch)

        def execute(op: Op, attributes: Any, tensors: Any, bindings: Any) -> tuple[Tensor, ...]:
            capture.add_node()
            return (torch.empty(1), torch.empty(1))

        monkeypatch.setattr(side_stream, "execute", execute)
        return capture

    return start


def play(capture: Capture, program: str) -> None:
    """Run what a network of these letters would enqueue: c coefficients, b a boundary that reads them all, x others."""
    side, read, unread = SideStream(torch.device("cpu")), torch.empty(1), []
    kept = []  # no two tensors at one address
    with side.joined():
        for letter in program:
            if letter == "c":
                unread += side.execute(MHC_COEFFICIENTS, {}, [read], {})
            else:
                side.execute(HC_COLLAPSE, {}, unread if letter == "b" else [read], {})
                kept += unread if letter == "b" else []
                unread = [] if letter == "b" else unread
    capture.add_node()  # what comes after the network


def waits_added(capture: Capture, program: str, monkeypatch: pytest.MonkeyPatch) -> Capture:
    """The same with plain waits."""
    with monkeypatch.context() as patch:
        patch.setattr(side_stream, "fork", lambda main, side: side.wait_stream(main))
        patch.setattr(side_stream, "join", lambda main, side, _: main.wait_stream(side))
        play(capture, program)
    return capture


def test_the_order_is_that_of_plain_waits(new_capture: Callable[[], Capture], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every program of up to six letters, and of long ones."""
    long = ["".join(random.Random(seed).choices("cbx", k=30)) for seed in range(20)]
    short = ("".join(letters) for n in range(1, 7) for letters in itertools.product("cbx", repeat=n))
    for program in (*short, *long):
        ours = new_capture()
        play(ours, program)
        plain = waits_added(new_capture(), program, monkeypatch)
        assert ours.reached() == plain.reached(), program
        assert ours.implied_edges() <= plain.implied_edges(), program


@pytest.mark.parametrize("program", ["xcb" * 8, "xcxxb" * 8, "cb" * 8, "cxb" * 8])
def test_layers_have_no_implied_edges(
    program: str, new_capture: Callable[[], Capture], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = new_capture()
    play(ours, program)
    assert ours.implied_edges() == 0
    assert waits_added(new_capture(), program, monkeypatch).implied_edges() >= 7


def test_edges_keep_their_kind(new_capture: Callable[[], Capture]) -> None:
    """A kernel that may start while the one before it runs still may."""
    capture = new_capture()
    side, main = Stream(capture), capture.main
    capture.add_node()
    forked = fork(main, side)
    assert side.ends == main.ends and set(side.ends.values()) == {PROGRAMMATIC}
    with capture.use(side):
        node = capture.add_node()
    join(main, side, forked)
    assert main.ends == {node: PROGRAMMATIC}


@pytest.mark.parametrize("status", [0, 2], ids=["none", "invalidated"])
def test_without_a_live_capture_streams_wait(status: int, new_capture: Callable[[], Capture]) -> None:
    capture = new_capture()
    capture.status = status
    side, main = Stream(capture), capture.main
    first = capture.add_node()
    assert fork(main, side) is None
    with capture.use(side):
        second = capture.add_node()
    join(main, side, None)
    assert set(main.ends) == {first, second}


def test_a_refusal_is_named(new_capture: Callable[[], Capture]) -> None:
    capture = new_capture()
    capture.error = 901
    with pytest.raises(CaptureError, match=r"cudaStreamGetCaptureInfo\w* failed with CUDA error 901; open"):
        fork(capture.main, Stream(capture))
