"""The flags of how tokens are chosen and how drafts are verified, and what they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from dspark_trt.runtime_py.acceptance import Acceptance, HeadAcceptance, OnlineAcceptance
from dspark_trt.runtime_py.costs import CostTable
from dspark_trt.runtime_py.requests import SamplingParams
from dspark_trt.runtime_py.scheduling import EarlyStop, FullLength, Lookahead, Scheduler, Threshold
from dspark_trt.runtime_py.verification import BlockVerification, Method, StandardRejection

METHODS: dict[str, type[Method]] = {"standard": StandardRejection, "block": BlockVerification}
WEIGH_COSTS = {"early-stop": EarlyStop, "lookahead": Lookahead}

MakeScheduler = Callable[[Callable[[], CostTable]], Scheduler]
"""Takes what measures the costs, called only if the scheduler weighs them."""


@dataclass(frozen=True, kw_only=True)
class SamplingFlags(SamplingParams):
    """The sampling parameters as flags; :meth:`checked` refuses what is wrong, where an error carries the rank."""

    max_tokens: Annotated[int, tyro.conf.arg(name="max-output-len", aliases=("--max-tokens",))] = 128
    """Tokens per prompt, unless the model stops before."""

    def __post_init__(self) -> None:
        pass

    def checked(self) -> SamplingParams:
        """The parameters; RequestError lists those that are out of range or contradict each other."""
        return SamplingParams(**dataclasses.asdict(self))


@dataclass(frozen=True, kw_only=True)
class VerificationFlags:
    """Which rule keeps drafts, and how many of them are verified."""

    rejection_sample_method: Literal["standard", "block"] = "standard"
    """How drafts are kept at a temperature: one by one, or by block, which keeps more. Neither changes the target's
    distribution."""
    scheduler: Literal["full", "threshold", "early-stop", "lookahead"] = "full"
    """Drafts to verify: all; those before an unlikely one; as many as pay for themselves, decided draft by draft
    or two steps ahead."""
    acceptance: Literal["head", "online"] | None = None
    """Where a scheduler's acceptance probabilities come from: the confidence head (if left out), or past steps."""
    confidence_threshold: float | None = None
    """Of --scheduler threshold: the least acceptance probability that is worth a row."""
    confidence_temperatures: tuple[float, ...] = ()
    """Calibrate the confidence head by one temperature per position, as measure_acceptance.py fits them."""
    profile_costs: bool = False
    """Measure at start what steps of every size cost, for --scheduler early-stop or lookahead."""

    def drafting_flags(self, num_draft_tokens: int | None) -> list[str]:
        """The flags given that say something about drafts."""
        given = {
            "--num-draft-tokens": num_draft_tokens is not None,
            **{f"--{f.name.replace('_', '-')}": getattr(self, f.name) != f.default for f in dataclasses.fields(self)},
        }
        return [flag for flag, there in given.items() if there]

    def contradictions(self, block_size: int) -> list[str]:
        """What does not go together, a sentence each."""
        problems, scheduler = [], self.scheduler
        if self.profile_costs and scheduler not in WEIGH_COSTS:
            problems.append(
                f"--profile-costs measures what --scheduler early-stop and lookahead weigh, the scheduler is "
                f"{scheduler}; choose one of those or leave the profile out"
            )
        if not self.profile_costs and scheduler in WEIGH_COSTS:
            problems.append(f"--scheduler {scheduler} weighs costs; have them measured with --profile-costs")
        if (self.confidence_threshold is None) == (scheduler == "threshold"):
            problems.append(
                f"--confidence-threshold belongs to --scheduler threshold, the scheduler is {scheduler} and the "
                f"threshold {self.confidence_threshold}; pass both or neither"
            )
        if scheduler == "full" and (self.acceptance or self.confidence_temperatures):
            problems.append(
                "--acceptance and --confidence-temperatures serve a scheduler, and --scheduler full needs neither; "
                "choose another or leave them out"
            )
        if self.acceptance == "online" and self.confidence_temperatures:
            problems.append(
                "--confidence-temperatures calibrate the confidence head, which --acceptance online does without; "
                "leave out either"
            )
        if self.confidence_temperatures and len(self.confidence_temperatures) != block_size:
            problems.append(
                f"--confidence-temperatures has {len(self.confidence_temperatures)} values, expected {block_size}, "
                "one for each position of the draft's block"
            )
        return problems

    def scheduler_maker(self, block_size: int) -> MakeScheduler:
        """What makes the scheduler; ScheduleError for values out of range comes now, before anything is loaded."""
        online = self.acceptance == "online"
        source: Acceptance = OnlineAcceptance(block_size) if online else HeadAcceptance(self.confidence_temperatures)
        if self.scheduler in WEIGH_COSTS:
            weighing = WEIGH_COSTS[self.scheduler]
            return lambda profile: weighing(source, profile())
        limit = self.confidence_threshold
        fixed = FullLength() if limit is None else Threshold(source, limit)
        return lambda profile: fixed
