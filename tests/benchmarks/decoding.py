"""Times the decode loop of the trained tiny models, and how long the stream waits for the host.

    python -m tests.benchmarks.decoding --output tests/benchmarks/results/DATE-decoding.json
    mpirun -n 2 python -m tests.benchmarks.decoding --output ...        two GPUs, tensor parallel

For each request count: microseconds a step of target, verification and draft, by events on the stream, and
from a profile the time in which the stream was idle between the target's replay, verification included, and the
draft's, and between two steps. Beside it the same step enqueued without graphs, a step of the target alone, which emits
one token a request, replayed from graphs, and a step whose coefficients have no stream of their own.
The tiny models are far from filling a GPU; what is measured is the loop, not the model. Of several ranks, the first
one's figures count: the ranks meet at every boundary.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from dspark_trt.builder.engine_dir import EngineDir
from dspark_trt.runtime_py.communicator import Communicator, connect, fail_together, launcher_ranks
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.requests import SamplingParams
from dspark_trt.runtime_py.session import TorchSession

from tests import greedy_reference
from tests.benchmarks.benchmark import Report, Timing
from tests.gpu.timeline import Replay, idle_between, profile, replays
from tests.placeholder_engines import make_engines

REQUESTS = (1, 2, 4, 8)
TOKENS = 600
PARTS = 2


def steps_of(events: list[dict[str, Any]]) -> list[list[Replay]]:
    """The replays of a profile, step by step."""
    found = replays(events)
    return [found[i : i + PARTS] for i in range(0, len(found) - PARTS + 1, PARTS)]


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of both networks' weights; a step reads each at most once."""
    sessions = (decoder._host.target, decoder._host.draft)
    networks = [session.network for session in sessions if isinstance(session, TorchSession)]
    return sum(p.nbytes for network in networks for p in network.parameters())


def measure(report: Report, engines: Path, requests: int, scratch: Path, communicator: Communicator) -> float:
    """Add a line for steps of so many requests; return the host gap."""
    prompts = greedy_reference.prompts()[:requests]
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    facts: dict[str, Any] = {}
    draft = EngineDir.open(engines).draft
    where: dict[str, Any] = {"device": "cuda", "communicator": communicator}
    with Decoder.from_dir(engines, request_counts=(requests,), **where) as decoder:
        decoder.generate(prompts, params)  # captures, warms up
        _, stats = decoder.generate(prompts, params)
        for part in ("target", "verify", "draft", "gap"):
            facts[f"{part}_us"] = round(getattr(stats, f"{part}_seconds") / stats.device_steps * 1e6, 2)
        facts["tokens_per_step"] = round(stats.tokens_per_step, 3)
        facts["tokens_per_second"] = round(stats.tokens / (stats.total_seconds - stats.prefill_seconds))
        moved = weight_bytes(decoder)
        steps = steps_of(profile(lambda: decoder.generate(prompts, params), scratch))
    inside = [idle_between(target, draft) for target, draft in steps]
    between = [idle_between(a[-1], b[0]) for a, b in pairwise(steps)]
    facts["host_gap_us"] = round(statistics.median(inside), 2)
    facts["step_gap_us"] = round(statistics.median(between), 2)
    spans = [b[0].start - a[0].start for a, b in pairwise(steps)]
    tenths = statistics.quantiles(spans, n=10)
    others: dict[str, dict[str, Any]] = {
        "without graphs": {"request_counts": ()},
        "target alone": {"request_counts": (requests,), "speculative": False},
        "one stream": {"request_counts": (requests,), "side_stream": False},
    }
    peers = {}
    for name, chosen in others.items():
        with Decoder.from_dir(engines, **chosen, **where) as decoder:
            short = SamplingParams(max_tokens=100, ignore_eos=True)
            decoder.generate(prompts, short)
            _, stats = decoder.generate(prompts, short)
            peers[name] = (stats.total_seconds - stats.prefill_seconds) / stats.device_steps * 1e6
    report.add(
        "decode_step",
        Timing(statistics.median(spans), tenths[0], tenths[-1]),
        rows=requests * (draft.block_size + 1),
        hidden=draft.hidden_size,
        ranks=communicator.size,
        cache="warm",
        moved_bytes=moved,
        peers=peers,
        requests=requests,
        **facts,
    )
    return facts["host_gap_us"]


def identical_prompts(engines: Path, mode: str, communicator: Communicator) -> dict[str, Any]:
    """How many of the recorded prompts come out of the GPU as out of the CPU, and why the others don't."""
    with Decoder.from_dir(engines, device="cuda", communicator=communicator) as decoder:
        params = SamplingParams(max_tokens=greedy_reference.TOKENS, ignore_eos=True)
        done, _ = decoder.generate(greedy_reference.prompts(), params)
    found = [completion.token_ids for completion in done]
    different = greedy_reference.divergences(engines, mode, found, "cuda", communicator)
    return {
        "prompts": len(found),
        "identical": len(found) - len(different),
        "distance_from_cpu": greedy_reference.distance_to_cpu(engines, mode, "cuda", communicator),
        "distance_of_a_cpu_that_rounds_elsewhere": greedy_reference.recorded_spread(mode),
        "divergences": [asdict(divergence) for divergence in different],
    }


def run(root: Path, communicator: Communicator) -> Report:
    """All figures; ``root`` is a directory that all ranks share."""
    report = Report()
    bfloat16 = {"numerics": "dequantized", "dtype": "bfloat16", "max_seq_len": 1000}
    builds = {"": bfloat16, **{mode: greedy_reference.build_options(mode) for mode in greedy_reference.MODES}}
    made = None
    if communicator.rank == 0:
        made = {name: make_engines(root, communicator.size, **options) for name, options in builds.items()}
    engines: dict[str, Path] = communicator.broadcast(made)
    with tempfile.TemporaryDirectory() as scratch:
        gaps = [measure(report, engines[""], requests, Path(scratch), communicator) for requests in REQUESTS]
    identical = {mode: identical_prompts(engines[mode], mode, communicator) for mode in greedy_reference.MODES}
    report.summary = {
        "host_gap_us": gaps[0],
        "gpu_greedy_identical_prompts": {mode: found["identical"] for mode, found in identical.items()},
        "gpu_greedy": identical,
    }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file for the results")
    options = parser.parse_args()
    communicator = connect(launcher_ranks() or 1)
    with fail_together(communicator), tempfile.TemporaryDirectory() as root:
        report = run(Path(root), communicator)
        if communicator.rank == 0:
            report.write(options.output)
        communicator.barrier()  # rank 0's directory is everyone's


if __name__ == "__main__":
    main()
