"""The timeline of several ranks: one time axis, tracks that don't mix, names that say the rank."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dspark_trt.runtime_py.communicator import Communicator, SingleProcess
from dspark_trt.runtime_py.output_files import OutputError
from dspark_trt.runtime_py.trace import merge, trace_scope

from tests.thread_ranks import on_ranks


def record(base_ns: int) -> dict[str, Any]:
    """What two ranks could both write, process and flow numbers included."""
    return {
        "schemaVersion": 1,
        "baseTimeNanoseconds": base_ns,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 17, "tid": 0, "ts": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "ts": 0, "args": {"labels": "GPU 0"}},
            {"ph": "X", "name": "target", "pid": 17, "tid": 17, "ts": 10.5, "dur": 2.0},
            {"ph": "s", "name": "ac2g", "id": 4, "pid": 17, "tid": 17, "ts": 11.0, "bp": "e"},
            {"ph": "i", "name": "note", "pid": "Traces", "tid": "t", "ts": 12.0},
        ],
    }


def test_ranks_share_a_time_axis_and_nothing_else() -> None:
    merged = merge([record(5_000_000), record(2_000_000)])
    first, second = merged["traceEvents"][:5], merged["traceEvents"][5:]
    # Rank 0's clock started 3 ms after rank 1's.
    assert [e["ts"] for e in first] == [3000.0, 3000.0, 3010.5, 3011.0, 3012.0]
    assert [e["ts"] for e in second] == [0, 0, 10.5, 11.0, 12.0]
    assert not {e["pid"] for e in first} & {e["pid"] for e in second}
    assert first[3]["id"] != second[3]["id"]
    assert [e["args"]["name"] for e in (first[0], second[0])] == ["rank 0: python", "rank 1: python"]
    assert second[1]["args"]["labels"] == "rank 1 GPU 0"


@pytest.mark.parametrize("name", ["trace.json", "deeper/trace.json.gz", "TRACE.JSON.GZ"])
def test_what_ran_is_in_the_file(name: str, tmp_path: Path) -> None:
    with trace_scope(tmp_path / name, SingleProcess()), torch.profiler.record_function("draft"):
        torch.ones(4, 4) @ torch.ones(4, 4)
    data = (tmp_path / name).read_bytes()
    events = json.loads(gzip.decompress(data) if name.lower().endswith(".gz") else data)["traceEvents"]
    names = {event["name"] for event in events}
    assert {"draft", "aten::matmul"} <= names


def kernel(name: str, stream: int, ts: float) -> dict[str, Any]:
    """As the profiler records a kernel: the track of a GPU is a stream."""
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": 2.0}


def track(stream: int) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": 0, "tid": stream, "args": {"name": f"stream {stream}"}}


def test_a_side_stream_has_a_track_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU kernels are recorded, and what ran beside each other on two streams of one rank lies on two tracks
    with names, on every rank."""
    asked: list[Any] = []

    class Profile:
        def __init__(self, activities: list[Any]):
            asked.append(activities)

        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def export_chrome_trace(self, path: str) -> None:
            kernels = [kernel("attention", 7, 10.0), kernel("mhc_coefficients", 20, 10.5)]
            Path(path).write_text(json.dumps({"traceEvents": [track(7), track(20), *kernels]}))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.profiler, "profile", Profile)

    def write(communicator: Communicator) -> None:
        with trace_scope(tmp_path / "trace.json", communicator):
            pass

    on_ranks(2, write)
    assert all(torch.profiler.ProfilerActivity.CUDA in activities for activities in asked) and len(asked) == 2
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(tracks) == 4 and sorted(tracks.values()) == ["stream 20", "stream 20", "stream 7", "stream 7"]
    where = {(e["name"], tracks[e["pid"], e["tid"]]) for e in events if e["ph"] == "X"}
    assert where == {("attention", "stream 7"), ("mhc_coefficients", "stream 20")}
    assert len({e["pid"] for e in events}) == 2


def test_nothing_is_written_of_a_run_that_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="step"), trace_scope(tmp_path / "trace.json", SingleProcess()):
        raise RuntimeError("step")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_file_that_cannot_be_written_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    wanted = rf"^{tmp_path / name}: No space left on device, expected to write the file there; make room, .*path$"
    with pytest.raises(OutputError, match=wanted), trace_scope(tmp_path / name, SingleProcess()):
        pass


@pytest.mark.parametrize("left", [None, '{"traceEvents": [{"name": "tar'])
def test_a_record_that_cannot_be_written_is_told(
    left: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profiler says nothing where its temporary file has no room, and leaves none or a part of it."""

    def export(self: torch.profiler.profile, path: str) -> None:
        if left:
            Path(path).write_text(left)

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    wanted = (
        rf"^{tmp_path}/trace\.json: the record of rank 0 could not be written to /.*; make room there, lift the limit"
    )
    with pytest.raises(OutputError, match=wanted), trace_scope(tmp_path / "trace.json", SingleProcess()):
        pass
    assert not list(tmp_path.iterdir())
