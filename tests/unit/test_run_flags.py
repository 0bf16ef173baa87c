"""The flags of examples/run.py: what they make, and what they refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import tyro
from dspark_trt.runtime_py.acceptance import ScheduleError
from dspark_trt.runtime_py.costs import CostTable
from dspark_trt.runtime_py.requests import RequestError, SamplingParams
from dspark_trt.runtime_py.scheduling import EarlyStop, FullLength, Lookahead, Scheduler, Threshold

from tests.example_scripts import load_example

run, decoding = load_example("run"), load_example("_decoding")
BLOCK = 5
COSTS = CostTable({1: 0.0}, {n: 1.0 + 0.1 * n for n in range(1, 7)})


def options(*flags: str) -> Any:
    return tyro.cli(run.Options, args=["--engine-dir", "engines", *flags])


def scheduler(*flags: str) -> Scheduler:
    return options(*flags).verification.scheduler_maker(BLOCK)(lambda: COSTS)  # type: ignore[no-any-return]


def test_every_sampling_parameter_is_a_flag() -> None:
    """Names, defaults and values arrive as the API has them."""
    assert options().sampling.checked() == SamplingParams()
    given = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "seed": 2**63,
        "num_draft_tokens": 2,
        "stop_token_ids": [4, 5],
        "stop": ["The end", "\n"],
        "ignore_eos": True,
    }
    assert given.keys() == {f.name for f in dataclasses.fields(SamplingParams)}
    flags: list[str] = []
    for name, value in given.items():
        flags.append("--" + name.replace("_", "-"))
        flags += [] if value is True else map(str, value) if isinstance(value, list) else [str(value)]
    assert options(*flags).sampling.checked() == SamplingParams(**given)
    assert options("--max-output-len", "9").sampling.checked().max_tokens == 9, "TensorRT-LLM's name"


def test_sampling_parameters_are_checked_late() -> None:
    """Parsing ends the process without a word about the rank; the check can be reported by the job."""
    sampling = options("--top-k", "-3", "--temperature", "-1").sampling
    with pytest.raises(RequestError, match=r"temperature is -1\.0.*top_k is -3"):
        sampling.checked()


def test_schedulers() -> None:
    """Each kind with its source of probabilities; costs are measured for those that weigh them, once."""
    confidence = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]])  # survival 0.88, 0.64, 0.32 ..
    assert isinstance(scheduler(), FullLength)
    threshold = scheduler("--scheduler", "threshold", "--confidence-threshold", "0.6")
    assert isinstance(threshold, Threshold) and threshold.lengths(confidence, [5]) == [2]
    online = scheduler("--scheduler", "threshold", "--confidence-threshold", "0.6", "--acceptance", "online")
    assert online.lengths(confidence, [5]) == [5], "no step was seen yet"
    flat = ["--confidence-temperatures", *["8"] * 5]
    calibrated = scheduler("--scheduler", "threshold", "--confidence-threshold", "0.5", *flat)
    assert calibrated.lengths(confidence / 100, [5]) == [3]
    for name, kind in (("early-stop", EarlyStop), ("lookahead", Lookahead)):
        assert isinstance(scheduler("--scheduler", name, "--profile-costs"), kind)
    # tau * SPS: 1 / 1.1, 1.88 / 1.2, 2.53 / 1.3, 2.85 / 1.4, 2.93 / 1.5.
    assert scheduler("--scheduler", "early-stop", "--profile-costs").lengths(confidence, [5]) == [3]

    def unwanted() -> CostTable:
        raise AssertionError("nothing weighs costs")

    for flags in ([], ["--scheduler", "threshold", "--confidence-threshold", "0.6"]):
        options(*flags).verification.scheduler_maker(BLOCK)(unwanted)


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        ("--profile-costs", ["--profile-costs measures what .* weigh, the scheduler is full"]),
        ("--profile-costs --scheduler threshold --confidence-threshold 0.5", ["the scheduler is threshold; choose"]),
        ("--scheduler early-stop", ["--scheduler early-stop weighs costs; have them measured with --profile-costs"]),
        ("--scheduler lookahead", ["--scheduler lookahead weighs costs"]),
        ("--scheduler threshold", ["--confidence-threshold belongs to --scheduler threshold.*threshold None"]),
        ("--confidence-threshold 0.5", ["the scheduler is full and the threshold 0.5; pass both or neither"]),
        ("--acceptance head", ["--scheduler full needs neither"]),
        ("--confidence-temperatures 1 1 1 1 1", ["--scheduler full needs neither"]),
        (
            "--acceptance online --confidence-temperatures 1 1 --scheduler early-stop --profile-costs",
            ["which --acceptance online does without", "has 2 values, expected 5"],
        ),
        ("--num-draft-tokens 6", ["--num-draft-tokens is 6, the draft's block has 5"]),
        ("--compare-target-only --temperature 0.1", ["--compare-target-only wants the same tokens"]),
        ("--no-speculative --plot x.png", ["--no-speculative makes no drafts, which --plot asks for"]),
        (
            "--no-speculative --num-draft-tokens 3 --rejection-sample-method block --scheduler early-stop",
            ["which --num-draft-tokens, --rejection-sample-method, --scheduler asks for"],
        ),
        ("--no-speculative --profile-costs", ["which --profile-costs asks for"]),
    ],
)
def test_flags_that_contradict_each_other(flags: str, messages: list[str]) -> None:
    """Every contradiction is told, each by what to do, and nothing else is."""
    problems = options(*flags.split()).contradictions(BLOCK)
    assert len(problems) == len(messages)
    for problem, message in zip(problems, messages, strict=True):
        with pytest.raises(ValueError, match=message):
            raise ValueError(problem)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--no-speculative --temperature 1 --top-k 5",
        "--compare-target-only --frequency-penalty 0.5 --num-draft-tokens 0",
        "--temperature 0.8 --rejection-sample-method block --num-draft-tokens 5",
        "--scheduler threshold --confidence-threshold 0 --acceptance online",
        "--scheduler lookahead --profile-costs --acceptance head --confidence-temperatures 1 1 1 1 2",
    ],
)
def test_flags_that_go_together(flags: str) -> None:
    assert options(*flags.split()).contradictions(BLOCK) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--scheduler threshold --confidence-threshold 1.5", r"confidence threshold of 1\.5, expected a probability"),
        ("--scheduler threshold --confidence-threshold nan", "confidence threshold of nan"),
        ("--confidence-temperatures 1 0 1 -2 inf", r"temperatures \[0\.0, -2\.0, inf\], expected numbers above 0"),
    ],
)
def test_values_out_of_range(flags: str, message: str) -> None:
    """Before anything is loaded or measured."""
    with pytest.raises(ScheduleError, match=message):
        options(*flags.split()).verification.scheduler_maker(BLOCK)


def test_cost_table() -> None:
    """Sizes of both kinds in one column, in order; milliseconds."""
    table = run.cost_table(CostTable({1: 0.001, 2: 0.0025}, {2: 0.004, 12: 0.012}))
    cells = [list(column.cells) for column in table.columns]
    assert cells == [["1", "2", "12"], ["1.00", "2.50", ""], ["", "4.00", "12.00"]]
