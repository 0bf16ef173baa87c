"""Ranks: launcher detection, the wrong number of ranks, failing together, mappings."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from dspark_trt.plugins.collective import CollectiveError, collective_scope, gather_ranks
from dspark_trt.runtime_py.communicator import (
    LaunchError,
    SingleProcess,
    connect,
    fail_together,
    launcher_ranks,
)
from dspark_trt.runtime_py.mapping import Mapping, MappingError

LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", LAUNCHER_VARIABLES)
def test_launchers_are_recognised(name: str) -> None:
    assert launcher_ranks({name: "4"}) == 4
    assert launcher_ranks({}) is None
    with pytest.raises(LaunchError, match=rf"{name} is 'x', expected a number of ranks; start the program with mpirun"):
        launcher_ranks({name: "x"})


@pytest.mark.usefixtures("no_launcher")
def test_one_rank_needs_no_mpi() -> None:
    assert isinstance(connect(1), SingleProcess)


@pytest.mark.usefixtures("no_launcher")
def test_sharded_engines_without_a_launcher() -> None:
    """TP-10: the message has the size wanted, what was found, and the command to use."""
    with pytest.raises(LaunchError, match=r"built for 2 ranks.*without an MPI launcher.*mpirun -n 2 python run\.py"):
        connect(2, "python run.py")


class Recorder(SingleProcess):
    rank = 1

    def __init__(self) -> None:
        self.code: int | None = None

    def abort(self, code: int) -> None:
        self.code = code


@pytest.mark.parametrize("error", [LaunchError("no launcher"), RuntimeError("lost device")])
def test_a_failing_rank_ends_the_job(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    """TP-11: the error is printed with the rank, and every rank is told to stop; a refusal has a status of its own."""
    for refusals, code in (((), 1), ((MappingError, LaunchError), 2 if isinstance(error, LaunchError) else 1)):
        communicator = Recorder()
        with fail_together(communicator, refusals=refusals):
            raise error
        assert communicator.code == code
    printed = capsys.readouterr().err
    assert f"rank 1: {type(error).__name__}: {error}" in printed
    # The package's own errors say what to do and need no traceback; surprises do.
    assert ("Traceback" in printed) == (not isinstance(error, LaunchError))


def test_ctrl_c_ends_the_job_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    communicator = Recorder()
    with fail_together(communicator, where=lambda: "step 7"):
        raise KeyboardInterrupt
    assert communicator.code == 130
    assert capsys.readouterr().err == "rank 1: interrupted (Ctrl-C) [in step 7]\n"


@pytest.mark.parametrize("error", [ImportError("No module named 'mpi4py'"), RuntimeError("cannot load MPI library")])
def test_a_launcher_without_mpi4py_is_named(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name.split(".")[0] == "mpi4py":
                raise error

    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    for name in [name for name in sys.modules if name.split(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(LaunchError, match=rf"mpi4py can't be used \({error}\); install it with .*: pip install"):
        connect(2)


def test_what_a_rank_was_doing_is_told_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    """TP-11; of a refusal it does not matter."""
    for refusals in ((), (RuntimeError,)):
        with fail_together(Recorder(), refusals=refusals, where=lambda: "step 7"):
            raise RuntimeError("lost device")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rank 1: ")]
    assert said == ["rank 1: RuntimeError: lost device [in step 7]", "rank 1: RuntimeError: lost device"]


def test_a_rank_that_succeeds_aborts_nothing() -> None:
    communicator = Recorder()
    with fail_together(communicator):
        pass
    assert communicator.code is None


@pytest.mark.parametrize("kind", ["sequence_parallel", "mega_moe"])
def test_other_kinds_of_parallelism_are_refused_with_a_reason(kind: str) -> None:
    """Named and off, they change nothing."""
    values = {"world_size": 2, "rank": 0, "tp_size": 2}
    for off in (None, False, 0):
        assert Mapping.from_dict({**values, kind: off}) == Mapping(2, 0, 2)
    for on in (True, 2):
        with pytest.raises(MappingError, match=rf"^{kind} is {on}: .{{30,}}$"):
            Mapping.from_dict({**values, kind: on})


def test_unknown_kinds_of_parallelism_are_named() -> None:
    with pytest.raises(MappingError, match="dp_size is unknown, expected world_size, rank and tp_size"):
        Mapping.from_dict({"world_size": 1, "rank": 0, "tp_size": 1, "dp_size": 1})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"world_size": 2, "rank": 0, "tp_size": 4}, "world_size is 2, tp_size 4"),
        ({"world_size": 2, "rank": 2, "tp_size": 2}, r"rank is 2, expected 0\.\.1"),
        ({"world_size": 2, "rank": -1, "tp_size": 2}, "rank is -1"),
        ({"world_size": 0, "rank": 0, "tp_size": 0}, "expected the same positive number"),
    ],
)
def test_impossible_mappings(values: dict[str, Any], message: str) -> None:
    with pytest.raises(MappingError, match=message):
        Mapping.from_dict(values)


def test_gathering_outside_a_scope() -> None:
    """A sharded network that nobody connected says so instead of computing a partial sum."""
    with pytest.raises(CollectiveError, match=r"sharded over 2 ranks ran outside collective_scope\(\)"):
        gather_ranks(torch.zeros(3), 2)
    with (
        collective_scope(lambda t: t.unsqueeze(0)),
        pytest.raises(CollectiveError, match="gathered 1 ranks, the network has 2"),
    ):
        gather_ranks(torch.zeros(3), 2)
    assert gather_ranks(torch.ones(3), 1).shape == (1, 3)
