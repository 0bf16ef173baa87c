"""Which executor the ranks choose: the same one on all, with one line on why."""

from __future__ import annotations

import threading
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from dspark_trt.builder.engine_dir import EngineDir
from dspark_trt.plugins import tensorrt_api
from dspark_trt.plugins.tensorrt_api import TensorRT, TensorRTUnavailableError
from dspark_trt.runtime_py import opening
from dspark_trt.runtime_py.backend import Backend, Executor, choose_executor
from dspark_trt.runtime_py.communicator import Communicator

from tests.fake_tensorrt import fake_api
from tests.placeholder_engines import NoTensorRT, make_engines
from tests.thread_ranks import outcomes

GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    return EngineDir.open(make_engines(tmp_path_factory.mktemp("engines"), 2))


class Machines:
    """What each rank finds: a TensorRT or why there is none, and the compute capability of its GPU."""

    def __init__(self, patch: pytest.MonkeyPatch, versions: list[str], capabilities: list[tuple[int, int]]):
        self._own, self._size = threading.local(), len(versions)
        self._versions = versions
        patch.setattr(tensorrt_api, "probe", self._probe)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[self._own.rank])

    def _probe(self, product: str) -> TensorRT | str:
        version = self._versions[self._own.rank]
        return TensorRT(None, product, version, None) if version else "ModuleNotFoundError: no module"

    def choose(self, directory: EngineDir, backend: Backend, device: torch.device = GPU) -> list[Executor | Exception]:
        def work(communicator: Communicator) -> Executor:
            self._own.rank = communicator.rank
            return choose_executor(directory, communicator, device, backend)

        return outcomes(self._size, work, timeout_s=20)


def test_engines_run_where_every_rank_can_run_them(directory: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Machines(monkeypatch, [NoTensorRT.version] * 2, [(8, 9)] * 2).choose(directory, "auto")
    assert all(isinstance(f, Executor) and str(f.api) == "tensorrt_rtx 0.0.0.0" and not f.reason for f in found)


@pytest.mark.parametrize(
    ("versions", "capabilities", "reason"),
    [
        ([NoTensorRT.version, ""], [(8, 9), (8, 9)], "which is not installed here: ModuleNotFoundError"),
        ([NoTensorRT.version] * 2, [(8, 9), (9, 0)], "compute capability: built for 8.9, here 9.0"),
        (["1.2.3.4", NoTensorRT.version], [(8, 9), (8, 9)], "built for 0.0.0.0, here 1.2.3.4"),
    ],
)
def test_one_rank_that_can_not_decides_for_all(
    directory: EngineDir,
    monkeypatch: pytest.MonkeyPatch,
    versions: list[str],
    capabilities: list[tuple[int, int]],
    reason: str,
) -> None:
    """ENG-2 at start: torch on every rank, or where TensorRT was asked for one error on every rank."""
    machines = Machines(monkeypatch, versions, capabilities)
    for found in machines.choose(directory, "auto"):
        assert isinstance(found, Executor) and found.api is None and reason in found.reason
    for found in machines.choose(directory, "tensorrt"):
        assert isinstance(found, TensorRTUnavailableError)
        assert reason in str(found) and "Leave the option out to use the torch session" in str(found)


def test_torch_can_be_asked_for(directory: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for found in Machines(monkeypatch, [NoTensorRT.version] * 2, [(8, 9)] * 2).choose(directory, "torch"):
        assert isinstance(found, Executor) and found.api is None


def test_a_machine_without_a_gpu_says_what_the_engines_need(
    directory: EngineDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    for found in Machines(monkeypatch, [NoTensorRT.version] * 2, []).choose(directory, "auto", cpu):
        assert str(found) == (
            "torch session on the CPU (its plans, of tensorrt_rtx 0.0.0.0, need a GPU of compute capability 8.9; "
            "there is none here)"
        )


@pytest.mark.parametrize("compared", [False, True])
def test_a_near_tie_of_engines_ends_no_job_that_did_not_ask_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compared: bool
) -> None:
    """Their kernels are TensorRT's choice, rank by rank: a near tie may be one token here and another one there, and
    steps of the host emit rank 0's."""
    directory = make_engines(tmp_path, 2)
    executor = Executor(fake_api(), torch.device("cpu"))
    monkeypatch.setattr(opening, "choose_executor", lambda *_: executor)
    for loaded in ("open_session", "load_network", "TorchSession"):
        monkeypatch.setattr(opening, loaded, MagicMock())
    asked = []

    class Opened:
        def __init__(self, *sessions: object, check_lockstep: bool, **rest: object):
            asked.append(check_lockstep)

        def capture(self) -> None: ...

    monkeypatch.setattr(opening, "Decoder", Opened)
    opened = outcomes(2, lambda c: opening.open_decoder(directory, communicator=c, check_lockstep=compared))
    assert all(isinstance(decoder, Opened) for decoder in opened), opened
    assert asked == [compared] * 2
