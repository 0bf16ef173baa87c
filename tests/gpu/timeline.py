"""Reads from a profile what CUDA-graph replays did on the device, and what the host waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dspark_trt.runtime_py.communicator import SingleProcess
from dspark_trt.runtime_py.trace import trace_scope

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
WAITING_CALLS = ("Synchronize", "cudaMemcpy ", "cudaFree", "cudaMalloc")


@dataclass(frozen=True)
class Replay:
    """The work of one graph launch, in microseconds of the profile's clock."""

    start: float
    end: float
    nodes: int


def replays(events: Iterable[dict[str, Any]]) -> list[Replay]:
    """Every graph launch of a profile that did something, in order of its work."""
    found = [
        Replay(min(e["ts"] for e in nodes), max(e["ts"] + e["dur"] for e in nodes), len(nodes))
        for nodes in work_of_launches(events)
    ]
    return sorted(found, key=lambda replay: replay.start)


def graph_launches(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The host's calls that launch a graph."""
    return [event for event in events if str(event.get("name", "")).startswith("cudaGraphLaunch")]


def work_of_launches(events: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What the device did for each graph launch that did something."""
    events = list(events)
    launches = {launch["args"]["correlation"] for launch in graph_launches(events)}
    work: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") in DEVICE_WORK and event["args"].get("correlation") in launches:
            work.setdefault(event["args"]["correlation"], []).append(event)
    return list(work.values())


def steps_of(events: Iterable[dict[str, Any]]) -> list[tuple[Replay, Replay]]:
    """The replays of a profile step by step: the target's with its verification, and the draft's."""
    found = replays(events)
    return list(zip(found[::2], found[1::2], strict=False))


def idle_inside(step: tuple[Replay, Replay]) -> float:
    """The host gap of a step: microseconds in which the stream did nothing between target and draft."""
    return idle_between(*step)


def idle_between(first: Replay, second: Replay) -> float:
    """Microseconds in which the stream did nothing between two replays."""
    return max(0.0, second.start - first.end)


def waiting_calls(events: Iterable[dict[str, Any]]) -> Counter[str]:
    """How often the host called each CUDA function that can wait for the device."""
    names = (str(e["name"]) for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver"))
    return Counter(n for n in names if any(word in f"{n} " for word in WAITING_CALLS))


def profile(work: Callable[[], object], directory: Path) -> list[dict[str, Any]]:
    """The events of ``work``."""
    import json

    file = directory / "profile.json"
    with trace_scope(file, SingleProcess()):
        work()
        torch.cuda.synchronize()
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events
