"""Decodes prompts with an engine directory, speculatively, on all its ranks.

    mpirun -n 2 python examples/run.py --engine-dir ENGINES --prompt "It was" "She said"
    mpirun -n 2 python examples/run.py --engine-dir ENGINES --compare-target-only --stats-json stats.json
    python examples/run.py --engine-dir ENGINES --temperature 0.7 --top-p 0.9 --rejection-sample-method block
    python examples/run.py --engine-dir ENGINES --scheduler early-stop --profile-costs

Every rank runs this program; rank 0 speaks. ``--compare-target-only`` decodes once more without drafts and
wants the very same tokens: greedy speculative decoding changes how fast text comes, never which.

The exit status is 1 if they differ or a rank failed, and 2 if options, prompts, directory or number of ranks are
wrong.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from _common import (
    Output,
    Text,
    announced_executor,
    check_output,
    device_name,
    image_suffixes,
    import_pyplot,
    open_job,
    parse_options,
    read_prompts,
    watched,
)
from _decoding import METHODS, SamplingFlags, VerificationFlags
from dspark_trt.builder.engine_dir import EngineDir
from dspark_trt.runtime_py.backend import Backend, Executor
from dspark_trt.runtime_py.communicator import Communicator
from dspark_trt.runtime_py.costs import CostTable
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.device import DeviceChoice
from dspark_trt.runtime_py.host_step import LockstepError
from dspark_trt.runtime_py.output_files import writing
from dspark_trt.runtime_py.requests import Completion, RequestError, SamplingParams, Statistics
from dspark_trt.runtime_py.trace import trace_scope
from dspark_trt.runtime_py.verification import Verifier
from dspark_trt.runtime_py.watchdog import DEFAULT_TIMEOUT_S, Progress
from rich.table import Table

COMMAND = "python examples/run.py --engine-dir DIR"
PROFILING_RUNS = 3


@dataclass(frozen=True, kw_only=True)
class Options:
    """Decode prompts with an engine directory; start it with mpirun -n RANKS."""

    engine_dir: Path
    """Directory that dspark-build wrote."""
    prompt: tuple[str, ...] = ()
    """Texts to continue, all after one --prompt."""
    prompts_file: Path | None = None
    """File with one text a line; without any prompt, those beside this script."""
    speculative: bool = True
    """Decode with the draft."""
    compare_target_only: bool = False
    """Decode again without drafts and compare the token ids; exit status 1 if any differs."""
    stats_json: Path | None = None
    """Write the statistics here."""
    plot: Path | None = None
    """Draw the accepted tokens by position, in the format that the suffix names, such as .png."""
    backend: Backend = "auto"
    """What executes the networks."""
    device: DeviceChoice = "auto"
    """auto is a GPU of its own for every rank where there are enough."""
    timeout: float = DEFAULT_TIMEOUT_S
    """Seconds after which a prefill, a step, a capture or loading (which has more, by the size of its file) is taken
    for stuck; the job ends then."""
    check_lockstep: bool = False
    """Compare the ranks' decisions at every step of the host, not only take rank 0's; steps on GPUs always do so."""
    stream: bool = False
    """Print text as it comes; of several prompts, a line for each step of each."""
    run_profiling: bool = False
    """Decode three times more and print the times."""
    profile: bool = False
    """Print the time of a step by phase: target, verification, draft, host gap."""
    trace: Path | None = None
    """Write a timeline of all ranks that Perfetto opens, as .json or .json.gz."""
    request_counts: tuple[int, ...] | None = None
    """Request counts whose steps are captured in CUDA graphs; left out: powers of two and the largest batch."""
    debug: bool = False
    """Show tracebacks."""
    sampling: Annotated[SamplingFlags, tyro.conf.arg(name="")] = field(default_factory=SamplingFlags)
    verification: Annotated[VerificationFlags, tyro.conf.arg(name="")] = field(default_factory=VerificationFlags)

    def contradictions(self, block_size: int) -> list[str]:
        """What does not go together, a sentence each."""
        sampling, problems = self.sampling, self.verification.contradictions(block_size)
        about_drafts = self.verification.drafting_flags(sampling.num_draft_tokens) + ["--plot"] * bool(self.plot)
        if about_drafts and not self.speculative:
            problems = [f"--no-speculative makes no drafts, which {', '.join(about_drafts)} asks for; leave out either"]
        if sampling.num_draft_tokens is not None and sampling.num_draft_tokens > block_size:
            problems.append(
                f"--num-draft-tokens is {sampling.num_draft_tokens}, the draft's block has {block_size}; pass no more"
            )
        if self.compare_target_only and sampling.temperature > 0:
            problems.append(
                "--compare-target-only wants the same tokens, and at a temperature the two runs draw different ones "
                "from the same distribution; leave out either"
            )
        return problems


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(Options, arguments, __doc__)
    if (job := open_job(options.engine_dir, COMMAND)) is None:
        return 2
    directory, communicator = job
    with watched(communicator, timeout_s=options.timeout, debug=options.debug) as progress:
        return run(options, directory, communicator, progress)
    raise AssertionError("watched() ends the job")


def run(options: Options, directory: EngineDir, communicator: Communicator, progress: Progress) -> int:
    """Decode and report; returns the exit status, the same on every rank."""
    console = Output(communicator.rank, soft_wrap=True)
    if directory.target is None:
        raise RequestError(f"{directory.path}: holds a draft without its target; decoding needs both")
    block, params = directory.draft.block_size, options.sampling.checked()
    if problems := options.contradictions(block):
        raise RequestError("; ".join(problems))
    make_scheduler = options.verification.scheduler_maker(block)
    pyplot = import_pyplot() if options.plot else None
    if communicator.rank == 0:  # it writes them, and its refusal ends every rank
        check_outputs(options, pyplot)
    place, executor = announced_executor(directory, communicator, options.device, options.backend, console)
    if options.speculative and not params.greedy and not directory.build.sampling:
        console.print("drafts are greedy, built without --sampling; at a temperature fewer of them are kept")
    text = Text(directory.path, directory.target.bos_token_id)
    prompts = prompt_texts(options)
    ids = [text.encode(prompt) for prompt in prompts]
    verifier, costs = Verifier(METHODS[options.verification.rejection_sample_method]()), None

    def decoder(speculative: bool) -> Decoder:
        return Decoder.from_dir(
            options.engine_dir,
            communicator=communicator,
            speculative=speculative,
            verifier=verifier,
            online_acceptance=options.verification.acceptance == "online",
            check_lockstep=options.check_lockstep,
            device=options.device,
            backend=options.backend,
            request_counts=options.request_counts,
            progress=progress,
        )

    def profile_costs() -> CostTable:
        nonlocal costs
        costs = main_decoder.profile_costs()
        console.print(cost_table(costs))
        return costs

    main_decoder = decoder(options.speculative)
    main_decoder.scheduler = make_scheduler(profile_costs)
    stream = Stream(console, text, prompts) if options.stream else None
    with trace_scope(options.trace, communicator) if options.trace else nullcontext():
        if options.trace:
            main_decoder.trace(torch.profiler.record_function)
        completions, stats = main_decoder.generate(ids, params, stream)
    check_ranks(completions, communicator)
    status, report = 0, statistics(completions, stats, directory, communicator, options, executor)
    report |= {"device": device_name(place), "costs": costs and dataclasses.asdict(costs)}
    if options.run_profiling:
        report["profiling"] = profile(main_decoder, ids, params)
    # Closing is a collective, so a rank that fails leaves it to the end of the job.
    main_decoder.close()
    verdict = None
    if options.compare_target_only:
        plain_decoder = decoder(False)
        plain, plain_stats = plain_decoder.generate(ids, params)
        plain_decoder.close()
        difference = first_difference(completions, plain, text)
        report["identical_to_target_only"] = difference is None
        report["target_only"] = dataclasses.asdict(plain_stats)
        status = 0 if difference is None else 1
        verdict = difference or "token ids are identical to target-only decoding"
    if communicator.rank == 0:
        if options.stats_json:
            with writing(options.stats_json):
                options.stats_json.write_text(json.dumps(report, indent=2) + "\n")
        if options.plot:
            plot_acceptance(stats, options.plot, pyplot)

    # After the files, which are there then even if nobody reads what is printed.
    for prompt, completion in zip(prompts, completions, strict=True):
        if not stream:
            console.print(f"\n> {prompt}\n{completion.text}")
    console.print()
    if stats.proposed_per_position:
        console.print(acceptance_table(stats))
    console.print(summary_table(stats, len(prompts)))
    if options.profile:
        console.print(phase_table(stats))
    if options.run_profiling:
        console.print(profile_table(report["profiling"]))
    if verdict:
        console.print(verdict)
    return status


def check_outputs(options: Options, pyplot: Any) -> None:
    """Raise RequestError if a file that was asked for can't be written."""
    if options.stats_json:
        check_output(options.stats_json, "--stats-json")
    if options.trace:
        check_output(options.trace, "--trace", suffixes=(".json", ".json.gz"))
    if options.plot:
        check_output(options.plot, "--plot", suffixes=image_suffixes(pyplot))


def prompt_texts(options: Options) -> list[str]:
    if options.prompt and options.prompts_file:
        raise RequestError("--prompt and --prompts-file were both given; pass one of them")
    if options.prompt:
        return list(options.prompt)
    return read_prompts(options.prompts_file or Path(__file__).with_name("prompts.txt"))


class Stream:
    """Prints tokens as they are accepted: one prompt as running text, several as one line per step and prompt."""

    def __init__(self, console: Output, text: Text, prompts: Sequence[str]):
        self._console, self._text, self._several = console, text, len(prompts) > 1
        self._ids: list[list[int]] = [[] for _ in prompts]
        self._shown = [""] * len(prompts)
        if not self._several:
            console.print(f"> {prompts[0]}")

    def __call__(self, index: int, tokens: list[int]) -> None:
        self._ids[index] += tokens
        whole = self._text.decode(self._ids[index])
        if whole.endswith("\N{REPLACEMENT CHARACTER}"):  # the rest of a character is still to come
            return
        new, self._shown[index] = whole[len(self._shown[index]) :], whole
        line = f"{index}: {new!r}" if self._several else new
        self._console.print(line, end="\n" if self._several else "")


def check_ranks(completions: Sequence[Completion], communicator: Communicator) -> None:
    """Raise :class:`LockstepError` unless every rank has the same completions."""
    gathered = communicator.all_gather_object([c.token_ids for c in completions])
    for rank, ids in enumerate(gathered):
        if ids != gathered[0]:
            raise LockstepError(
                f"rank {rank} produced other tokens than rank 0; run again with --check-lockstep to see where"
            )


def first_difference(found: Sequence[Completion], wanted: Sequence[Completion], text: Text) -> str | None:
    """Where speculative and plain decoding part, as a sentence; None if they are the same to the token."""
    for index, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        for position, (a, b) in enumerate(zip_longest(ours.token_ids, theirs.token_ids)):
            if a != b:
                names = ["the end" if t is None else f"token {t} ({text.decode([t])!r})" for t in (a, b)]
                return (
                    f"prompt {index} differs from target-only decoding at output position {position}: "
                    f"{names[0]} with drafts, {names[1]} without"
                )
        if ours.finish_reason != theirs.finish_reason:
            return f"prompt {index} finished by {ours.finish_reason.value}, without drafts {theirs.finish_reason.value}"
    return None


def acceptance_table(stats: Statistics) -> Table:
    table = Table("position", "proposed", "accepted", "share", "", title="accepted drafts by position")
    for i, (n, k) in enumerate(zip(stats.proposed_per_position, stats.accepted_per_position, strict=True)):
        share = k / n if n else 0.0
        table.add_row(str(i + 1), str(n), str(k), f"{share:.0%}", "█" * round(share * 30))
    return table


def summary_table(stats: Statistics, prompts: int) -> Table:
    table = Table(show_header=False, title="summary")
    # The first token of each prompt comes from its prefill, not from a step.
    tokens = stats.tokens + prompts
    for name, value in {
        "prompts": prompts,
        "tokens": tokens,
        "tokens per step": f"{stats.tokens_per_step:.2f}",
        "prefill": f"{stats.prefill_seconds:.2f} s",
        "target": f"{stats.target_seconds:.2f} s",
        "verification": f"{stats.verify_seconds:.2f} s",
        "draft": f"{stats.draft_seconds:.2f} s",
        "together": f"{stats.total_seconds:.2f} s, {tokens / stats.total_seconds:.1f} tokens per second",
    }.items():
        table.add_row(name, str(value))
    return table


def phase_table(stats: Statistics) -> Table:
    """Milliseconds of a step of the whole batch by phase."""
    phases = {name: getattr(stats, f"{name}_seconds") for name in ("target", "verify", "draft")}
    decoding = stats.total_seconds - stats.prefill_seconds
    # Where all steps are the device's the gap is measured; elsewhere it is what no phase accounts for.
    on_device = stats.device_steps == stats.decode_calls
    phases["host gap"] = stats.gap_seconds if on_device else decoding - sum(phases.values())
    steps = max(stats.decode_calls, 1)
    table = Table("phase", "ms per step", "share", title="a step")
    for name, seconds in phases.items():
        table.add_row(name, f"{1000 * seconds / steps:.3f}", f"{seconds / decoding:.0%}" if decoding else "")
    return table


def cost_table(costs: CostTable) -> Table:
    """Milliseconds of steps by size; sizes between cost as much as the next larger."""
    table = Table("size", "draft step of so many requests", "target step of so many rows", title="costs, ms")
    for size in sorted({*costs.draft_seconds, *costs.verify_seconds}):
        measured = [seconds.get(size) for seconds in (costs.draft_seconds, costs.verify_seconds)]
        table.add_row(str(size), *("" if s is None else f"{1000 * s:.2f}" for s in measured))
    return table


def statistics(
    completions: Sequence[Completion],
    stats: Statistics,
    directory: EngineDir,
    communicator: Communicator,
    options: Options,
    executor: Executor,
) -> dict[str, Any]:
    """What ``--stats-json`` writes."""
    return {
        "tokens_per_step": stats.tokens_per_step,
        "accepted_per_position": stats.accepted_per_position,
        "proposed_per_position": stats.proposed_per_position,
        "identical_to_target_only": None,
        "world_size": communicator.size,
        "speculative": options.speculative,
        "sampling": dataclasses.asdict(options.sampling),
        "verification": dataclasses.asdict(options.verification),
        "executor": executor.api.product if executor.api else "torch",
        "numerics": directory.build.numerics.value,
        "dtype": directory.build.dtype,
        "weights_hash": directory.weights_hash,
        **{f.name: getattr(stats, f.name) for f in dataclasses.fields(stats) if "position" not in f.name},
        "completions": [
            {"prompt_tokens": len(c.prompt_ids), "token_ids": c.token_ids, "finish_reason": c.finish_reason.value}
            for c in completions
        ],
    }


def profile(decoder: Decoder, ids: list[list[int]], params: SamplingParams) -> list[dict[str, float]]:
    """Seconds of further runs; the one before was the warm-up."""
    runs = (decoder.generate(ids, params)[1] for _ in range(PROFILING_RUNS))
    phases = ("prefill", "target", "draft", "total")
    return [{name: getattr(stats, f"{name}_seconds") for name in phases} for stats in runs]


def profile_table(runs: Sequence[dict[str, float]]) -> Table:
    table = Table("run", "prefill", "target", "draft", "together", title="seconds")
    for i, seconds in enumerate(runs):
        table.add_row(str(i + 1), *(f"{value:.3f}" for value in seconds.values()))
    return table


def plot_acceptance(stats: Statistics, path: Path, pyplot: Any) -> None:
    """Draw the share of drafts accepted at each position, in the format of the path's suffix."""
    shares = [k / max(n, 1) for n, k in zip(stats.proposed_per_position, stats.accepted_per_position, strict=True)]
    positions = range(1, len(shares) + 1)
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    bars = axes.bar(positions, shares, color="#76b900")
    axes.bar_label(bars, [f"{share:.0%}" for share in shares])
    axes.set(
        title=f"{stats.tokens_per_step:.2f} tokens per step",
        xlabel="position in the draft block",
        ylabel="share of drafts accepted",
        xticks=positions,
        ylim=(0, 1.05),
    )
    with writing(path):
        figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
