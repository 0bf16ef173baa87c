"""A timeline of all ranks that Perfetto and chrome://tracing open.

torch's profiler records the host's calls and, on a GPU, every kernel with its stream, also those replayed
from a CUDA graph, in which each branch has a track of its own. Each rank records itself; rank 0 puts the
records on one time axis, one group of tracks per rank, and writes the file.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .communicator import Communicator
from .output_files import OutputError, writing

_RANK_STRIDE = 100_000_000
"""Added to process and flow numbers for each rank; above what operating systems give."""


@contextmanager
def trace_scope(path: Path, communicator: Communicator) -> Iterator[None]:
    """Record what runs inside the ``with`` block, on every rank, into ``path`` (.json or .json.gz).

    Every rank enters and leaves; nothing is written when the block fails.

    Raises:
        OutputError: the file, or a rank's record of which it is made, can't be written.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        yield
    with tempfile.TemporaryDirectory() as directory:
        own = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(own))
        # The profiler does not say that it failed: it leaves no file, or half of one.
        try:
            record = own.read_bytes()
            json.loads(record)
        except (OSError, ValueError):
            raise OutputError(
                f"{path}: the record of rank {communicator.rank} could not be written to {directory}; make room there, "
                "lift the limit on the size of files, or name another place with TMPDIR"
            ) from None
        records = communicator.all_gather_object(gzip.compress(record, 1))
    if communicator.rank == 0:
        text = json.dumps(merge([json.loads(gzip.decompress(record)) for record in records])).encode()
        with writing(path):
            path.write_bytes(gzip.compress(text) if path.suffix.lower() == ".gz" else text)


def merge(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One Chrome trace of the ranks' traces, in rank order: process names say the rank, and times start together."""
    first = min(_base(record) for record in records)
    events = []
    for rank, record in enumerate(records):
        later_us = (_base(record) - first) / 1000
        for event in record["traceEvents"]:
            event = dict(event)
            for key in ("pid", "id"):
                if key in event:
                    event[key] = _of_rank(event[key], rank)
            if "ts" in event:
                event["ts"] = event["ts"] + later_us
            if event.get("name") == "process_name":
                event["args"] = {"name": f"rank {rank}: {event['args']['name']}"}
            elif event.get("name") == "process_labels":
                event["args"] = {"labels": f"rank {rank} {event['args']['labels']}"}
            events.append(event)
    kept = {key: value for key, value in records[0].items() if key not in ("traceEvents", "baseTimeNanoseconds")}
    return {**kept, "baseTimeNanoseconds": first, "traceEvents": events}


def _base(record: dict[str, Any]) -> int:
    """The record's base time in nanoseconds, to which its event times are relative."""
    return int(record.get("baseTimeNanoseconds", 0))


def _of_rank(number: Any, rank: int) -> Any:
    return number + rank * _RANK_STRIDE if isinstance(number, int) else f"rank {rank}: {number}"
