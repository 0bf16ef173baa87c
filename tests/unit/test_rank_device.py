"""Which device a rank takes: one of its own, the same kind on every rank, or an error on every rank."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from dspark_trt.runtime_py import device as device_module
from dspark_trt.runtime_py.communicator import Communicator, LaunchError
from dspark_trt.runtime_py.device import DeviceChoice, rank_device

from tests.thread_ranks import outcomes


def devices(
    monkeypatch: pytest.MonkeyPatch, ranks: Sequence[tuple[str, list[str]]], choice: DeviceChoice = "auto"
) -> list[torch.device | Exception]:
    """What each rank takes; a rank is its host and the GPUs that it sees there."""
    own = threading.local()

    def work(communicator: Communicator) -> torch.device:
        own.host, own.gpus = ranks[communicator.rank]
        return rank_device(communicator, choice)

    monkeypatch.setattr(device_module.socket, "gethostname", lambda: own.host)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(own.gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=own.gpus[index]))
    return outcomes(len(ranks), work, timeout_s=20)


def test_ranks_of_a_node_take_its_gpus_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [("a", ["g0", "g1"]), ("b", ["h0", "h1"]), ("a", ["g0", "g1"]), ("b", ["h0", "h1"])]
    assert [str(d) for d in devices(monkeypatch, nodes)] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


def test_a_rank_that_sees_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """TP-8: every rank with a CUDA_VISIBLE_DEVICES of its own."""
    assert [str(d) for d in devices(monkeypatch, [("a", ["g0"]), ("a", ["g1"])])] == ["cuda:0", "cuda:0"]


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([("a", ["g0"]), ("a", ["g0"])], "rank 1 shares that of rank 0 on a"),
        ([("a", ["g0"]), ("b", [])], "rank 1 on b has none"),
        ([("a", []), ("a", [])], "rank 0 on a has none; rank 1 on a has none"),
    ],
)
def test_a_rank_without_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, ranks: list[tuple[str, list[str]]], reason: str
) -> None:
    """The job goes to the CPU as a whole, or where GPUs were asked for ends with the same error everywhere."""
    assert devices(monkeypatch, ranks) == [torch.device("cpu")] * 2
    for found in devices(monkeypatch, ranks, "cuda"):
        assert isinstance(found, LaunchError)
        assert reason in str(found)
        assert str(found).endswith("or pass --device cpu")


def test_the_cpu_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices(monkeypatch, [("a", ["g0"])], "cpu") == [torch.device("cpu")]
