"""Times the decode loop of the trained tiny models, and how long the stream waits for the host.

    python -m tests.benchmarks.decoding --output tests/benchmarks/results/DATE-decoding.json
    mpirun -n 2 python -m tests.benchmarks.decoding --output ...        two GPUs, tensor parallel

For each request count: microseconds per step by events on the stream, of runs without a profiler, which would slow the
host down. ``median_us``, ``p10_us`` and ``p90_us`` are of ``runs`` runs, of each the mean of its steps; the same over
all runs is split into ``target_us``, ``verify_us``, ``draft_us`` and ``gap_us``, between two steps. Beside it the same
step enqueued without graphs, a step of the target alone, which emits one token per request, replayed from graphs, and a
step whose coefficients have no stream of their own: medians of such means too. ``tokens_per_second`` is by the host's
clock and holds the first draft of a run, which is enqueued without a graph.

From another run, under the profiler: ``host_gap_us``, the median time in which the stream was idle between the
target's replay, verification included, and the draft's, which are enqueued one after the other; and ``step_gap_us``,
between two steps, which the profiler's own cost for the host makes longer than ``gap_us``.

The summary says how the tokens compare with the CPU's, and of one rank three things more, which
tests/gpu/test_decoding.py asserts: whether replayed steps leave the tokens and caches of enqueued ones, by what memory
grows in many steps, and the calls of each step that can make the host wait.

The tiny models are far from filling a GPU; what is measured is the loop, not the model. Of several ranks, the first
one's figures count: the ranks meet at every boundary.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from dspark_trt.builder.engine_dir import EngineDir
from dspark_trt.runtime_py.communicator import Communicator, connect, fail_together, launcher_ranks
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.requests import SamplingParams, Statistics
from dspark_trt.runtime_py.session import TorchSession

from tests import greedy_reference
from tests.benchmarks.benchmark import Report, Timing
from tests.gpu.decode_runs import decode, late_growth, memory_over_steps, same_bits, waits_of_steps
from tests.gpu.timeline import idle_between, idle_inside, profile, steps_of
from tests.placeholder_engines import make_engines

REQUESTS = (1, 2, 4, 8)
TOKENS, RUNS = 600, 11
PEER_TOKENS, PEER_RUNS = 100, 3
PARTS = ("target", "verify", "draft", "gap")
LEAK_STEPS = 10_000


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def part_us(runs: Sequence[Statistics], part: str) -> float:
    """Microseconds of a step's part by the stream's clock, the mean of all steps of some runs."""
    return sum(getattr(stats, f"{part}_seconds") for stats in runs) / sum(stats.device_steps for stats in runs) * 1e6


def step_us(stats: Statistics) -> float:
    """Microseconds per step by the stream's clock, the mean of a run."""
    return sum(part_us([stats], part) for part in PARTS)


def timed_runs(decoder: Decoder, prompts: Sequence[Sequence[int]], tokens: int, runs: int) -> list[Statistics]:
    """Of so many runs, after one that captures and warms up."""
    return [decoder.generate(prompts, greedy(tokens))[1] for _ in range(runs + 1)][1:]


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of both networks' weights; a step reads each at most once."""
    sessions = (decoder._host.target, decoder._host.draft)
    networks = [session.network for session in sessions if isinstance(session, TorchSession)]
    return sum(p.nbytes for network in networks for p in network.parameters())


def measure(report: Report, engines: Path, requests: int, scratch: Path, communicator: Communicator) -> float:
    """Add a line for steps of so many requests; return the host gap."""
    prompts = greedy_reference.prompts()[:requests]
    facts: dict[str, Any] = {}
    draft = EngineDir.open(engines).draft
    where: dict[str, Any] = {"device": "cuda", "communicator": communicator}
    with Decoder.from_dir(engines, request_counts=(requests,), **where) as decoder:
        runs = timed_runs(decoder, prompts, TOKENS, RUNS)
        facts["runs"] = RUNS
        facts |= {f"{part}_us": round(part_us(runs, part), 2) for part in PARTS}
        facts["tokens_per_step"] = round(runs[-1].tokens_per_step, 3)
        rates = [stats.tokens / (stats.total_seconds - stats.prefill_seconds) for stats in runs]
        facts["tokens_per_second"] = round(statistics.median(rates))
        moved = weight_bytes(decoder)
        steps = steps_of(profile(lambda: decoder.generate(prompts, greedy(TOKENS)), scratch))
    facts["host_gap_us"] = round(statistics.median(map(idle_inside, steps)), 2)
    between = [idle_between(a[-1], b[0]) for a, b in pairwise(steps)]
    facts["step_gap_us"] = round(statistics.median(between), 2)
    means = [step_us(stats) for stats in runs]
    tenths = statistics.quantiles(means, n=10)
    others: dict[str, dict[str, Any]] = {
        "without graphs": {"request_counts": ()},
        "target alone": {"request_counts": (requests,), "speculative": False},
        "one stream": {"request_counts": (requests,), "side_stream": False},
    }
    peers = {}
    for name, chosen in others.items():
        with Decoder.from_dir(engines, **chosen, **where) as decoder:
            peers[name] = statistics.median(map(step_us, timed_runs(decoder, prompts, PEER_TOKENS, PEER_RUNS)))
    report.add(
        "decode_step",
        Timing(statistics.median(means), tenths[0], tenths[-1]),
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
    options: dict[str, Any] = {"device": "cuda", "communicator": communicator}
    with Decoder.from_dir(engines, **options) as decoder:
        done, _ = decoder.generate(greedy_reference.prompts(), greedy(greedy_reference.TOKENS))
    found = [completion.token_ids for completion in done]
    view = greedy_reference.View(engines, **options)
    distance, different = greedy_reference.compare_with_cpu(view, mode, found)
    return {
        "prompts": len(found),
        "identical": len(found) - len(different),
        "distance_from_cpu": distance,
        "distance_of_a_cpu_that_rounds_elsewhere": greedy_reference.recorded_spread(mode, communicator.size),
        "divergences": [asdict(divergence) for divergence in different],
    }


def checks_of_steps(engines: Path, scratch: Path) -> dict[str, Any]:
    """What must hold of the steps of one rank, as it was found."""
    prompts = greedy_reference.prompts()
    (replayed, _, left), (enqueued, _, wanted) = (
        decode(engines, prompts, greedy(60), **chosen) for chosen in ({}, {"replayed": False})
    )
    with Decoder.from_dir(engines, device="cuda", request_counts=(1, 2)) as decoder:
        waits = waits_of_steps(decoder, prompts[:1], scratch)
        samples = memory_over_steps(decoder, prompts[:2], greedy(900), LEAK_STEPS, every=LEAK_STEPS // 10)
    grown = late_growth(samples)
    return {
        "replayed_equals_eager": replayed == enqueued and same_bits(left, wanted),
        "steps_without_leak": {
            "steps": samples[-1].steps,
            "second_half": grown.steps,
            "torch_bytes": grown.allocated,
            "device_bytes": grown.device,
            "host_bytes": grown.host,
        },
        "waiting_calls_per_step": {name: round(count / waits.steps, 3) for name, count in waits.calls.items()},
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
        checks = checks_of_steps(engines[""], Path(scratch)) if communicator.size == 1 else {}
    identical = {mode: identical_prompts(engines[mode], mode, communicator) for mode in greedy_reference.MODES}
    report.summary = {
        "host_gap_us": gaps[0],
        "gpu_greedy_identical_prompts": {mode: found["identical"] for mode, found in identical.items()},
        **checks,
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
