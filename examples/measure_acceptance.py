"""Measures how many drafts are kept, by sampling temperature, verification method and position.

    python examples/measure_acceptance.py --engine-dir ENGINES --output DIR

Decodes prompts (those beside this script by default, none of which the tiny models were trained on) once for
each temperature and method and writes DIR/acceptance.json and DIR/acceptance.png. At temperature 0 the methods
keep the same drafts, so that is measured once.

Kept at position i is the share of steps that kept i drafts or more; given the one before, of those that kept
i - 1. Intervals are percentiles of a bootstrap over prompts, because the steps of one text are alike. Steps at
which a text reaches its length count whole, with all drafts that verification kept.

The file also holds, for each setting, the temperatures that calibrate the confidence head best (spec 6.3), for
run.py's ``--confidence-temperatures``. Engines of several ranks: start it with mpirun, like run.py. The exit status
is 1 if a rank failed, and 2 if options, prompts, directory or number of ranks are wrong.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from _common import (
    Output,
    Text,
    announced_executor,
    check_output,
    device_name,
    import_pyplot,
    open_job,
    parse_options,
    read_prompts,
    watched,
)
from _decoding import METHODS
from dspark_trt.builder.engine_dir import EngineDir
from dspark_trt.runtime_py.acceptance import HeadAcceptance
from dspark_trt.runtime_py.backend import Backend
from dspark_trt.runtime_py.communicator import Communicator
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.device import DeviceChoice
from dspark_trt.runtime_py.output_files import writing
from dspark_trt.runtime_py.requests import Request, RequestError, SamplingParams
from dspark_trt.runtime_py.verification import Verdict, Verifier
from dspark_trt.runtime_py.watchdog import DEFAULT_TIMEOUT_S, Progress
from rich.table import Table
from torch import Tensor

COMMAND = "python examples/measure_acceptance.py --engine-dir DIR --output DIR"
LEVEL = 0.95
MAX_BOOTSTRAP_SAMPLES = 100_000
"""All are in memory at once, a row of each prompt; more move no interval in the digits that are shown."""
REPORT, FIGURE = "acceptance.json", "acceptance.png"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure how many drafts are kept, by temperature, method and position."""

    engine_dir: Path
    """Directory that dspark-build wrote; with --sampling, for drafts that sample at a temperature."""
    output: Path
    """Directory of acceptance.json and acceptance.png."""
    temperatures: tuple[float, ...] = (0.0, 0.3, 0.7, 1.0, 1.3)
    """Sampling temperatures to measure at; 0 is greedy, where the methods keep the same drafts."""
    methods: tuple[Literal["standard", "block"], ...] = ("standard", "block")
    """Verification methods to measure: one draft after the other, or by block."""
    prompts_file: Path | None = None
    """File with one text a line, best of text that the model was not trained on; without, the one beside this
    script."""
    max_output_len: int = 96
    """Tokens per prompt; the model's own end is passed over."""
    seed: int = 0
    """Of the first prompt; the others follow."""
    bootstrap_samples: int = 2000
    """Resamplings of the prompts that the intervals are percentiles of."""
    backend: Backend = "auto"
    """What executes the networks."""
    device: DeviceChoice = "auto"
    """auto is a GPU of its own for every rank where there are enough."""
    timeout: float = DEFAULT_TIMEOUT_S
    """Seconds after which a prefill, a step, a capture or loading (which has more, by the size of its file) is taken
    for stuck; the job ends then."""
    debug: bool = False
    """Show tracebacks."""

    def problems(self) -> list[str]:
        """What would leave nothing to measure, a sentence each."""
        problems = []
        if self.bootstrap_samples < 1:
            problems.append(f"--bootstrap-samples is {self.bootstrap_samples}, expected at least 1; pass more")
        if self.bootstrap_samples > MAX_BOOTSTRAP_SAMPLES:
            problems.append(
                f"--bootstrap-samples is {self.bootstrap_samples}, expected at most {MAX_BOOTSTRAP_SAMPLES}, which are "
                "in memory at once; pass fewer"
            )
        if self.max_output_len < 2:
            problems.append(
                f"--max-output-len is {self.max_output_len}, expected at least 2, as the first token comes without "
                "drafts; pass more"
            )
        return problems


@dataclass(frozen=True)
class Recorder(Verifier):
    """A verifier that keeps each step's request and how many of its drafts were accepted."""

    steps: list[tuple[int, int]] = field(default_factory=list)

    def __call__(self, requests: Sequence[Request], logits: Tensor, draft_logits: Tensor | None) -> Verdict:
        verdict = super().__call__(requests, logits, draft_logits)
        # The first token of a prompt is chosen without drafts.
        decided = zip(requests, verdict.accepted, strict=True)
        self.steps.extend((request.index, accepted) for request, accepted in decided if request.drafts)
        return verdict


@dataclass
class Confidences:
    """A scheduler that verifies everything and keeps what the confidence head said, as the recorder keeps steps."""

    rows: list[Tensor] = field(default_factory=list)

    def lengths(self, confidence: Tensor, limits: Sequence[int]) -> list[int]:
        self.rows.append(confidence.clone())
        return list(limits)

    def record(self, lengths: Sequence[int], accepted: Sequence[int]) -> None:
        pass


@dataclass(frozen=True)
class Estimate:
    """A share or mean with its interval."""

    mean: float
    low: float
    high: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(Options, arguments, __doc__)
    if (job := open_job(options.engine_dir, COMMAND)) is None:
        return 2
    directory, communicator = job
    with watched(communicator, timeout_s=options.timeout, debug=options.debug) as progress:
        run(options, directory, communicator, progress)
    return 0


def run(options: Options, directory: EngineDir, communicator: Communicator, progress: Progress) -> None:
    """Measure and, on rank 0, report and write."""
    console = Output(communicator.rank, width=120)
    if directory.target is None:
        raise RequestError(f"{directory.path}: holds a draft without its target; acceptance needs both")
    if problems := options.problems():
        raise RequestError("; ".join(problems))
    pyplot = import_pyplot()
    if communicator.rank == 0:  # it writes, and its refusal ends every rank
        for name in (REPORT, FIGURE):
            check_output(options.output / name, "--output")
    text = Text(directory.path, directory.target.bos_token_id)
    prompts_file = options.prompts_file or Path(__file__).with_name("prompts.txt")
    prompts = [text.encode(prompt) for prompt in read_prompts(prompts_file)]
    params = {t: sampling(options, t, len(prompts)) for t in options.temperatures}
    place, executor = announced_executor(directory, communicator, options.device, options.backend, console)
    rows = []
    for row in measure(options, prompts, params, communicator, progress):
        rows.append(row)
        steps, tokens = row["steps"], row["tokens_per_step"].mean
        told = f"{steps} steps, {tokens:.2f} tokens per step"
        console.print(f"temperature {row['temperature']:g}, {row['method']}: {told}")
    rows.sort(key=lambda row: row["temperature"])
    if communicator.rank == 0:
        document = {
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            "device": f"{device_name(place)}, {platform.machine()}, torch {torch.__version__}",
            "executor": str(executor.api or "torch"),
            "weights_hash": directory.weights_hash,
            "numerics": directory.build.numerics.value,
            "dtype": directory.build.dtype,
            "drafts": "sampled" if directory.build.sampling else "greedy",
            "prompts": f"{prompts_file.name}, {len(prompts)}",
            "max_output_len": options.max_output_len,
            "seed": options.seed,
            "interval": f"{LEVEL:.0%}, bootstrap over prompts, {options.bootstrap_samples} samples",
            "acceptance": rows,
        }
        written = json.dumps(document, indent=1, default=dataclasses.asdict)
        with writing(options.output / REPORT):
            (options.output / REPORT).write_text(written + "\n")
        with writing(options.output / FIGURE):
            draw(rows, pyplot).savefig(options.output / FIGURE, dpi=80)
    for what in ("kept", "kept_given_before"):
        console.print(acceptance_table(rows, what))
    console.print(f"wrote {options.output}/{REPORT} and {FIGURE}")


def sampling(options: Options, temperature: float, prompts: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=options.max_output_len, temperature=temperature, seed=options.seed + i, ignore_eos=True
        )
        for i in range(prompts)
    ]


def measure(
    options: Options,
    prompts: Sequence[Sequence[int]],
    params: dict[float, list[SamplingParams]],
    communicator: Communicator,
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """A row for each method and temperature, as the JSON file has them, with estimates in the place of numbers."""
    for index, method in enumerate(dict.fromkeys(options.methods)):
        recorder = Recorder(METHODS[method]())
        decoder = Decoder.from_dir(
            options.engine_dir,
            communicator=communicator,
            verifier=recorder,
            device=options.device,
            backend=options.backend,
            progress=progress,
        )
        for temperature, own in params.items():
            if temperature == 0 and index:
                continue
            recorder.steps.clear()
            decoder.scheduler = confidences = Confidences()
            decoder.generate(prompts, own)
            confidence = torch.cat(confidences.rows)
            accepted = torch.tensor([n for _, n in recorder.steps])
            block = confidence.shape[1]
            head = HeadAcceptance.calibrated(confidence, torch.full_like(accepted, block), accepted)
            yield {
                "temperature": temperature,
                "method": method if temperature else "greedy",
                "steps": len(recorder.steps),
                **estimates(recorder.steps, block, options.bootstrap_samples),
                "confidence_temperatures": [round(t, 3) for t in head.temperatures],
            }
        decoder.close()


def estimates(steps: Sequence[tuple[int, int]], block: int, samples: int) -> dict[str, Any]:
    """Tokens per step, and by position the share of drafts kept, of all steps and given the draft before.

    Args:
        steps: a prompt's index and how many of its ``block`` drafts were kept, for each step.
    """
    prompts, accepted = np.array(steps).T
    # Of each prompt, the steps that kept 0, 1 .. block drafts or more.
    reached = np.stack([np.bincount(prompts[accepted >= i], minlength=prompts.max() + 1) for i in range(block + 1)], 1)
    reached = reached[reached[:, 0] > 0]
    count = len(reached)
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=samples)
    # The measured sums first, then those of the bootstrap's samples.
    sums = np.concatenate((reached.sum(0, keepdims=True), draws @ reached)).astype(float)

    def estimate(value: np.ndarray) -> Estimate | None:
        if np.isnan(value[0]):
            return None
        low, high = np.nanquantile(value[1:], ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
        return Estimate(*(round(float(v), 4) for v in (value[0], low, high)))

    with np.errstate(invalid="ignore"):
        kept, given = sums[:, 1:] / sums[:, :1], sums[:, 1:] / sums[:, :-1]
    return {
        "tokens_per_step": estimate(1 + kept.sum(1)),
        "kept": [estimate(column) for column in kept.T],
        "kept_given_before": [estimate(column) for column in given.T],
    }


def acceptance_table(rows: Sequence[dict[str, Any]], what: str) -> Table:
    """One line a setting; ``what`` is the list of estimates to show by position."""
    title = {"kept": "drafts kept by position, %", "kept_given_before": "drafts kept, given the one before, %"}[what]
    positions = [str(i + 1) for i in range(len(rows[0][what]))]
    table = Table("temperature", "method", "tokens per step", *positions, title=f"{title} ({LEVEL:.0%} interval)")
    for row in rows:
        shares = ["-" if e is None else interval(e, "{:.0f}", 100) for e in row[what]]
        table.add_row(f"{row['temperature']:g}", row["method"], interval(row["tokens_per_step"], "{:.2f}"), *shares)
    return table


def interval(estimate: Estimate, form: str, factor: float = 1) -> str:
    mean, low, high = (form.format(factor * v) for v in (estimate.mean, estimate.low, estimate.high))
    return f"{mean} ({low}-{high})"


def draw(rows: Sequence[dict[str, Any]], pyplot: Any) -> Any:
    """A figure: tokens per step by temperature, and the share kept by position; block verification dashed."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for method, style in {"standard": "o-", "block": "o--"}.items():
        own = [row for row in rows if row["method"] in (method, "greedy")]
        if any(row["method"] == method for row in own):
            tokens = [row["tokens_per_step"] for row in own]
            below, above = [t.mean - t.low for t in tokens], [t.high - t.mean for t in tokens]
            means = [t.mean for t in tokens]
            left.errorbar([r["temperature"] for r in own], means, (below, above), fmt=style, capsize=3, label=method)
    temperatures = sorted({row["temperature"] for row in rows})
    colours = dict(zip(temperatures, pyplot.cm.viridis(np.linspace(0, 0.85, len(temperatures))), strict=True))
    labelled = set()
    for row in rows:
        shares, temperature = [e.mean for e in row["kept"]], row["temperature"]
        label = None if temperature in labelled else f"temperature {temperature:g}"
        labelled.add(temperature)
        style = "o--" if row["method"] == "block" else "o-"
        right.plot(range(1, len(shares) + 1), shares, style, color=colours[temperature], label=label, markersize=4)
    left.set(xlabel="temperature", title=f"tokens per step, {LEVEL:.0%} intervals")
    right.set(xlabel="position in the draft block", title="share of drafts kept; dashed: block verification")
    right.set(ylim=(0, 1), xticks=range(1, len(rows[0]["kept"]) + 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    return figure


if __name__ == "__main__":
    sys.exit(main())
