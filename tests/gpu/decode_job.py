"""A job of ranks that decodes the recorded prompts, with one backend after the other; rank 0 reports as JSON.

    mpirun -n 2 python -m tests.gpu.decode_job ENGINES TOKENS GPUS BACKEND [BACKEND] [--mode MODE] [--in-flight N ...]

Of two backends, the report also says how far the first one's logits lie from the second's, and where texts part. With
``--mode`` the same of the first backend and the CPU, and whether enqueued steps give the tokens and caches of replayed
ones. With ``--in-flight`` what the first backend's steps of so many requests give.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dspark_trt.builder.engine_dir import EngineDir
from dspark_trt.runtime_py.backend import Backend
from dspark_trt.runtime_py.communicator import connect, fail_together
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.requests import SamplingParams, Statistics
from dspark_trt.runtime_py.watchdog import Watchdog

from tests import greedy_reference
from tests.gpu.decode_runs import caches, enqueue, same_bits
from tests.gpu.gpus import ranks_on
from tests.greedy_reference import View


def in_flight(requests: int) -> slice:
    """Which prompts run beside each other alone: others than the first, so that slots have new ones."""
    return slice(requests, 2 * requests)


def main(
    engines: Path, tokens: int, gpus: int, backends: Sequence[Backend], mode: str | None, requests: Sequence[int]
) -> None:
    directory = EngineDir.open(engines)
    communicator = connect(directory.tp_size)
    prompts, params = greedy_reference.prompts(), SamplingParams(max_tokens=tokens, ignore_eos=True)
    texts: list[list[list[int]]] = []
    stats: list[Statistics] = []
    report: dict[str, Any] = {}

    with (
        fail_together(communicator),
        Watchdog(communicator.rank, communicator.abort, timeout_s=60) as watchdog,
    ):
        options: dict[str, Any] = {"communicator": communicator, "device": "cuda"}
        options |= {"check_lockstep": True, "progress": watchdog}

        def decode(decoder: Decoder, chosen: slice = slice(None)) -> tuple[list[list[int]], Statistics]:
            done, counted = decoder.generate(prompts[chosen], params)
            found = [completion.token_ids for completion in done]
            assert all(other == found for other in communicator.all_gather_object(found)), "the ranks' tokens differ"
            return found, counted

        with ranks_on(gpus):
            for backend in backends:
                with Decoder.from_dir(engines, backend=backend, **options) as decoder:
                    found, counted = decode(decoder)
                    texts.append(found)
                    stats.append(counted)
                    if len(texts) == 1:
                        left = caches(decoder)
                        report["in_flight"] = {count: decode(decoder, in_flight(count))[0] for count in requests}
            if mode:
                with Decoder.from_dir(engines, backend=backends[0], **options) as decoder:
                    enqueue(decoder)
                    enqueued = {"tokens": decode(decoder)[0] == texts[0], "caches": same_bits(caches(decoder), left)}
                report["enqueued_equals_replayed"] = communicator.all_gather_object(enqueued)
        # Of the views, only those on a GPU may be told which one.
        views = [View(engines, "cuda", backend, communicator, partial(ranks_on, gpus)) for backend in backends]
        if mode:
            report["cpu"] = _comparison(*greedy_reference.compare_with_cpu(views[0], mode, texts[0]))
        if len(backends) > 1:
            first, second = zip(texts, views, strict=True)
            report |= _comparison(*greedy_reference.compare_texts(first[0], second[0], first[1], second[1]))
        report |= {"tokens": texts, "stats": [dataclasses.asdict(counted) for counted in stats]}
        if communicator.rank == 0:
            print(json.dumps(report))


def _comparison(distance: dict[str, float], parted: Sequence[greedy_reference.Divergence]) -> dict[str, Any]:
    return {"distance": distance, "parted": [dataclasses.asdict(divergence) for divergence in parted]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", type=Path)
    parser.add_argument("tokens", type=int)
    parser.add_argument("gpus", type=int)
    parser.add_argument("backends", nargs="+", choices=["torch", "tensorrt"])
    parser.add_argument("--mode", choices=list(greedy_reference.MODES))
    parser.add_argument("--in-flight", type=int, nargs="*", default=[])
    given = parser.parse_args()
    main(given.engines, given.tokens, given.gpus, given.backends, given.mode, given.in_flight)
