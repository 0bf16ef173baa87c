"""The timeline of a job: the steps of each rank, coefficients beside the sublayers, all ranks on one time axis."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.gpus import over_gpus
from tests.gpu.timeline import Replay, graph_launches, steps_of, work_of_launches
from tests.mpi_jobs import run_example
from tests.placeholder_engines import make_engines

pytestmark = pytest.mark.timeout(150)

Event = dict[str, Any]
SPANS = ("target and verify", "draft")


@over_gpus
def test_what_ran_when_and_where(gpus: int, tmp_path: Path) -> None:
    """A rank on each GPU."""
    engines = make_engines(tmp_path, gpus, numerics="dequantized", dtype="bfloat16", max_seq_len=200)
    trace, written = tmp_path / "trace.json", tmp_path / "stats.json"
    job = run_example(
        None if gpus == 1 else gpus,
        engines,
        *("--prompt", "The river", "--max-output-len", "60", "--device", "cuda"),
        *("--trace", trace, "--stats-json", written),
        timeout=120,
    )
    assert job.status == 0, job.err
    replayed = json.loads(written.read_text())["device_steps"]
    assert replayed > 5
    events = json.loads(trace.read_text())["traceEvents"]
    by_rank = [steps_of_rank(of_rank(events, rank), replayed) for rank in range(gpus)]
    assert not of_rank(events, gpus)
    # Ranks meet at every boundary, so none can have ended a step before another began it; two clocks are as far apart
    # as the host's and the device's of either rank.
    starts, ends = ([[getattr(step, edge) for step in steps] for steps in by_rank] for edge in ("start", "end"))
    overlaps = [min(e) - max(s) for s, e in zip(zip(*starts, strict=True), zip(*ends, strict=True), strict=True)]
    print(f"the ranks' steps overlap by at least {min(overlaps):.0f} us")
    assert min(overlaps) > -200


def of_rank(events: list[Event], rank: int) -> list[Event]:
    """What lies on the tracks that are named after a rank."""
    named = [e for e in events if e["name"] == "process_name" and e["args"]["name"].startswith(f"rank {rank}: ")]
    numbers = {event["pid"] for event in named}
    return [event for event in events if event.get("pid") in numbers]


def steps_of_rank(events: list[Event], replayed: int) -> list[Replay]:
    """The target's replays, after a look at everything else on a rank's tracks."""
    steps = steps_of(events)
    assert len(steps) == replayed
    assert all(target.end <= draft.start for target, draft in steps)
    # The host's spans alternate, and what each enqueues lies inside of it.
    spans = sorted((e for e in events if e.get("cat") == "user_annotation" and e["name"] in SPANS), key=started)
    launches = sorted(graph_launches(events), key=started)
    with_replays = [span for span in spans if any(inside(launch, span) for launch in launches)]
    assert [span["name"] for span in with_replays] == list(SPANS) * replayed
    assert len(launches) == 2 * replayed
    # In a replay every branch of the graph has a track of its own: coefficients are on others than their sublayers.
    work = list(chain.from_iterable(work_of_launches(events)))
    side = [event for event in work if "project_kernel" in event["name"]]
    streams = {event["tid"] for event in side}
    main = [event for event in work if event["tid"] not in streams]
    print(f"coefficients on {streams}, the rest on { ({e['tid'] for e in work} - streams) }")
    assert side and main
    beside = [event for event in side if any(together(event, other) for other in main)]
    print(f"{len(beside)} of {len(side)} coefficients ran beside other work")
    assert len(beside) > len(side) / 4
    return [target for target, _ in steps]


def started(event: Event) -> float:
    time: float = event["ts"]
    return time


def inside(event: Event, span: Event) -> bool:
    return event["tid"] == span["tid"] and span["ts"] <= event["ts"] < span["ts"] + span["dur"]


def together(one: Event, other: Event) -> bool:
    """Whether two events overlap in time."""
    return max(one["ts"], other["ts"]) < min(one["ts"] + one["dur"], other["ts"] + other["dur"])
