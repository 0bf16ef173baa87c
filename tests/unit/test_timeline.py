"""What benchmarks and GPU tests read from a profile."""

from __future__ import annotations

from typing import Any

from tests.gpu.timeline import Replay, idle_between, replays, waiting_calls


def launch(correlation: int, ts: float) -> dict[str, Any]:
    return {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": ts, "args": {"correlation": correlation}}


def node(correlation: int, ts: float, dur: float, cat: str = "kernel") -> dict[str, Any]:
    return {"cat": cat, "name": "any", "ts": ts, "dur": dur, "args": {"correlation": correlation, "stream": 7}}


def test_replays_are_what_graph_launches_ran() -> None:
    events = [
        *(launch(1, 0), launch(2, 1), launch(3, 2)),
        *(node(2, 30, 5), node(2, 36, 1, "gpu_memcpy"), node(1, 10, 8), node(1, 12, 9)),
        node(9, 50, 5),  # an eager kernel
        {"ph": "M", "name": "process_name"},
    ]
    assert replays(events) == [Replay(10, 21, 2), Replay(30, 37, 2)]
    assert idle_between(*replays(events)) == 9
    assert idle_between(Replay(0, 9, 1), Replay(8, 12, 1)) == 0


def test_calls_that_can_wait_are_counted_by_name() -> None:
    names = ["cudaEventSynchronize"] * 2 + ["cudaMemcpyAsync", "cudaMemcpy", "cudaMalloc", "cudaLaunchKernel"]
    calls = waiting_calls({"cat": "cuda_runtime", "name": name} for name in names)
    assert calls == {"cudaEventSynchronize": 2, "cudaMemcpy": 1, "cudaMalloc": 1}
