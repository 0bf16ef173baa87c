"""Coefficients on a second stream: forked where they can start, joined before anything reads them, always."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from dspark_trt.plugins.hc_collapse import HC_COLLAPSE
from dspark_trt.plugins.mhc_all_reduce import MHC_ALL_REDUCE_RESIDUAL_ONLY
from dspark_trt.plugins.mhc_coefficients import MHC_COEFFICIENTS
from dspark_trt.plugins.op import Op, executor_scope
from dspark_trt.runtime_py import capture_order, side_stream
from dspark_trt.runtime_py.side_stream import SideStream
from torch import Tensor

from tests.fake_streams import FakeStreams

HIDDEN = 256


class Device(FakeStreams):
    """Two streams that write down what is enqueued on them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.streams: list[FakeStream] = []
        self.main = self.current = FakeStream("main", self)

    def stream(self, device: Any = None) -> FakeStream:
        self.streams.append(FakeStream("side", self))
        return self.streams[-1]


class FakeStream:
    def __init__(self, name: str, device: Device):
        self.name, self._device = name, device

    def wait_stream(self, other: FakeStream) -> None:
        self._device.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device()
    fake.install(monkeypatch)

    def execute(op: Op, attributes: Any, tensors: Any, bindings: Any) -> Any:
        fake.log.append(f"{op.name} on {fake.current.name}")
        return op.reference(attributes, *tensors)

    monkeypatch.setattr(side_stream, "execute", execute)
    monkeypatch.setattr(capture_order, "dependencies", lambda _: None)  # no capture: test_capture_order.py has them
    return fake


@contextmanager
def side_scope() -> Iterator[None]:
    side = SideStream(torch.device("cpu"))
    with side.joined(), executor_scope(side.execute):
        yield


def streams() -> Tensor:
    return torch.randn(2, 4, HIDDEN)


def coefficients(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    parameters = torch.randn(24, 4 * HIDDEN), torch.ones(3), torch.zeros(24)
    return MHC_COEFFICIENTS(values, *parameters, rms_eps=1e-6, hc_eps=1e-6, sinkhorn_iters=20)


def test_the_boundary_waits_for_the_coefficients(device: Device) -> None:
    with side_scope():
        values = streams()
        pre, post, comb = coefficients(values)
        HC_COLLAPSE(values, torch.ones(2, 4))  # of other coefficients: need not wait
        values = MHC_ALL_REDUCE_RESIDUAL_ONLY(torch.randn(2, HIDDEN), values, post, comb, tp_size=1)
        HC_COLLAPSE(values, pre)  # has been waited for
    assert device.log == [
        *("side waits for main", "MhcCoefficients on side"),
        "HcCollapse on main",
        *("main waits for side", "MhcAllReduceResidualOnly on main"),
        "HcCollapse on main",
    ]


def test_a_network_that_ends_has_joined(device: Device) -> None:
    with side_scope():
        coefficients(streams())
    assert device.log[-1] == "main waits for side"


def test_an_error_joins_and_is_the_error_that_comes_out(device: Device) -> None:
    """Otherwise a capture would end with a complaint about unjoined work."""
    with pytest.raises(ZeroDivisionError), side_scope():
        coefficients(streams())
        _ = 1 / 0
    assert device.log[-1] == "main waits for side"


def test_nothing_to_wait_for_is_not_waited_for(device: Device) -> None:
    with side_scope():
        HC_COLLAPSE(streams(), torch.ones(2, 4))
    assert device.log == ["HcCollapse on main"]
