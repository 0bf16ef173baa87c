"""How kernels are timed, and the file that results go to.

A figure is the replay time of a CUDA graph divided by the calls in it, so it holds a call's share of the
graph's own cost and none of Python's. For a cold L2 cache every call of the graph uses buffers of its own,
enough of them that a buffer has left the cache when its turn comes again; warm, all calls share one set.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")

READ_BYTES_PER_US = 4.53e6
"""What one kernel reads from an H200's memory at best, measured; divides bytes into ``floor_us``."""
COLD_BYTES = 150e6
"""Bytes that pass between two uses of a buffer; the L2 of an H200 holds 60 MB."""
WARM_CALLS = 40
EAGER_SETS = 24


@dataclass(frozen=True)
class Timing:
    """Microseconds per call, over the replays of a graph."""

    median_us: float
    p10_us: float
    p90_us: float


def time_graph(
    launches: Sequence[Callable[[], Any]], replays: int = 100, meet: Callable[[], Any] | None = None
) -> Timing:
    """Capture all ``launches`` in order in one graph and time its replays.

    Args:
        launches: each enqueues one call on torch's current stream.
        meet: called before the replays that count, where ranks start together.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for launch in launches[:3]:
            launch()  # compiles, loads modules, makes handles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    if meet is not None:
        meet()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    spans = [1000 * a.elapsed_time(b) / len(launches) for a, b in pairwise(marks)]
    tenths = statistics.quantiles(spans, n=10)
    return Timing(statistics.median(spans), tenths[0], tenths[-1])


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Takes ``output``, the file for the results, and ``quick``, for a run that only shows that everything works."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    return parser


def copies(tensors: list[torch.Tensor], sets: int) -> list[list[torch.Tensor]]:
    """``sets`` copies of a set of tensors, each at addresses of its own."""
    return [[t.clone() for t in tensors] for _ in range(sets)]


def time_sets(
    make: Callable[[T], Callable[[], Any]], sets: Sequence[T], cache: str, replays: int, warm_calls: int = WARM_CALLS
) -> Timing:
    """A launch a set of buffers, where ``cache`` is "warm" the first set again and again."""
    if cache == "warm":
        return time_graph([make(sets[0])] * warm_calls, replays)
    return time_graph([make(one) for one in sets], replays)


def cold_sets(set_bytes: int, most: int = 200) -> int:
    """How many buffer sets keep a call's data out of the cache; at ``most``, so tiny calls stay partly warm."""
    return max(3, min(most, -(-int(COLD_BYTES) // set_bytes)))


def peer_sets(peer: str, sets: int) -> int:
    """How many of ``sets`` buffer sets a peer is timed over; eager torch is bound by launches, not by the cache."""
    return min(sets, EAGER_SETS) if peer == "torch eager" else sets


@dataclass
class Report:
    """Results of one run, and what it ran on."""

    results: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What a reader must know: peers that could not be measured and why, and, added by hand, what figures mean."""

    def add(
        self,
        name: str,
        timing: Timing,
        *,
        rows: int,
        hidden: int,
        cache: str,
        moved_bytes: int,
        ranks: int = 1,
        peers: dict[str, float] | None = None,
        **facts: Any,
    ) -> None:
        """Add one line: ``rows`` are token rows, ``moved_bytes`` each input read and each output written once."""
        times = {k: round(v, 3) for k, v in asdict(timing).items()}
        floor = moved_bytes / READ_BYTES_PER_US
        line = {"name": name, "rows": rows, "ranks": ranks, "hidden": hidden, "cache": cache, **times}
        line |= {"bytes": moved_bytes, "floor_us": round(floor, 3), **facts}
        line["peers"] = {k: round(v, 3) for k, v in (peers or {}).items()}
        self.results.append(line)
        beside = ", ".join(f"{k} {v:.2f}" for k, v in (peers or {}).items())
        print(f"{name:32} {cache:5} rows {rows:4} ranks {ranks}: {timing.median_us:8.2f} us  {beside}", flush=True)

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
        document = {
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name(),
            "driver": driver,
            "versions": versions,
            "results": self.results,
            "summary": self.summary,
            "notes": self.notes,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")
