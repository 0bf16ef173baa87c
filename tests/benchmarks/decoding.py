"""Times the decode loop of the trained tiny models on one GPU, and how long the stream waits for the host.

    python -m tests.benchmarks.decoding --output tests/benchmarks/results/DATE-decoding.json

For each request count: microseconds a step of target, verification and draft, by events on the stream, and
from a profile the time in which the stream was idle between the target's replay, verification included, and the
draft's, and between two steps. Beside it the same step enqueued without graphs, a step of the target alone, which emits
one token a request, replayed from graphs, and a step whose coefficients have no stream of their own.
The tiny models are far from filling a GPU; what is measured is the loop, not the model.
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


def measure(report: Report, engines: Path, requests: int, scratch: Path) -> float:
    """Add a line for steps of so many requests; return the host gap."""
    prompts = greedy_reference.prompts()[:requests]
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    facts: dict[str, Any] = {}
    draft = EngineDir.open(engines).draft
    with Decoder.from_dir(engines, device="cuda", request_counts=(requests,)) as decoder:
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
        with Decoder.from_dir(engines, device="cuda", **chosen) as decoder:
            short = SamplingParams(max_tokens=100, ignore_eos=True)
            decoder.generate(prompts, short)
            _, stats = decoder.generate(prompts, short)
            peers[name] = (stats.total_seconds - stats.prefill_seconds) / stats.device_steps * 1e6
    report.add(
        "decode_step",
        Timing(statistics.median(spans), tenths[0], tenths[-1]),
        rows=requests * (draft.block_size + 1),
        hidden=draft.hidden_size,
        cache="warm",
        moved_bytes=moved,
        peers=peers,
        requests=requests,
        **facts,
    )
    return facts["host_gap_us"]


def identical_prompts(root: Path, mode: str) -> dict[str, Any]:
    """How many of the recorded prompts come out of the GPU as out of the CPU, and why the others don't."""
    engines = make_engines(root, 1, **greedy_reference.build_options(mode))
    with Decoder.from_dir(engines, device="cuda") as decoder:
        params = SamplingParams(max_tokens=greedy_reference.TOKENS, ignore_eos=True)
        done, _ = decoder.generate(greedy_reference.prompts(), params)
    found = [completion.token_ids for completion in done]
    different = greedy_reference.divergences(engines, mode, found, "cuda")
    return {
        "prompts": len(found),
        "identical": len(found) - len(different),
        "distance_from_cpu": greedy_reference.distance_to_cpu(engines, mode, "cuda"),
        "distance_of_a_cpu_that_rounds_elsewhere": greedy_reference.recorded_spread(mode),
        "divergences": [asdict(divergence) for divergence in different],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file for the results")
    options = parser.parse_args()
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        engines = make_engines(root, 1, numerics="dequantized", dtype="bfloat16", max_seq_len=1000)
        gaps = [measure(report, engines, requests, root) for requests in REQUESTS]
        identical = {mode: identical_prompts(root, mode) for mode in greedy_reference.MODES}
    report.summary = {
        "host_gap_us": gaps[0],
        "gpu_greedy_identical_prompts": {mode: found["identical"] for mode, found in identical.items()},
        "gpu_greedy": identical,
    }
    report.write(options.output)


if __name__ == "__main__":
    main()
