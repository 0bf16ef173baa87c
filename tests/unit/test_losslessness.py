"""What a step emits has exactly the target's distribution, by enumeration (rows SMP-1, SMP-3, SMP-4, SMP-7, SMP-8)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dspark_trt.runtime_py.requests import SamplingParams
from dspark_trt.runtime_py.verification import (
    BlockVerification,
    Method,
    StandardRejection,
    StepDistributions,
    recovery_distribution,
)
from torch import Tensor

from tests.enumeration import Tables, bias, emitted_joint

EXACT = 1e-12
"""Sums of at most a few thousand float64 products of probabilities."""
METHODS = [StandardRejection(), BlockVerification()]
SHAPES = [(2, 4), (3, 3), (5, 2)]
TEMPERATURES = [0.3, 1.0, 1.7]
methods = pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
temperatures = pytest.mark.parametrize("temperature", TEMPERATURES)


def reduced(logits: Tensor) -> Tensor:
    """A draft that has no token 1: its row in the target's vocabulary is -inf."""
    return logits.index_fill(-1, torch.tensor([1]), -torch.inf)


def top_two(logits: Tensor) -> Tensor:
    return logits.masked_fill(logits < logits.topk(2).values[..., -1:], -torch.inf)


DRAFTS: dict[str, dict[str, Any]] = {
    "sampled": {"sampled": True},
    "greedy": {"sampled": False},
    "reduced vocabulary": {"sampled": True, "alter": reduced},
    "top-k": {"sampled": True, "alter": top_two},
}


@methods
@temperatures
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(("vocab", "block"), SHAPES)
def test_emitted_tokens_have_the_targets_distribution(
    vocab: int, block: int, draft: str, temperature: float, method: Method
) -> None:
    """SMP-3, SMP-7, SMP-8: every method with every kind of draft."""
    tables = Tables.random(vocab, block, seed=vocab)
    assert bias(tables, SamplingParams(temperature=temperature), method, **DRAFTS[draft]) < EXACT


PROCESSED = {
    "top-k": SamplingParams(temperature=0.8, top_k=2),
    "top-p": SamplingParams(temperature=1.3, top_p=0.7),
    "min-p": SamplingParams(temperature=1.0, min_p=0.2),
    "penalties": SamplingParams(temperature=0.9, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7),
    "everything": SamplingParams(temperature=1.5, top_k=3, top_p=0.8, min_p=0.05, frequency_penalty=1.0),
    "greedy with penalties": SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0),
    "greedy": SamplingParams(),
}


@methods
@pytest.mark.parametrize("draft", ["sampled", "greedy"])
@pytest.mark.parametrize("processed", PROCESSED)
def test_processors_of_the_target(processed: str, draft: str, method: Method) -> None:
    """The draft knows nothing of them, and penalties count the drafts in front of a row as if they were text."""
    tables = Tables.random(4, 3, seed=9)
    assert bias(tables, PROCESSED[processed], method, **DRAFTS[draft]) < EXACT


class WithoutResidual(StandardRejection):
    """SMP-1's neighbour: after a rejection the target's distribution is drawn from as it is."""

    def rates(self, ratio: Tensor, target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
        passes, weight = super().rates(ratio, target, draft)
        draft.zero_()
        return passes, weight


class LastOfStandard(StandardRejection):
    """Block verification's choice with standard rejection's rates."""

    kept = BlockVerification.kept


class FirstOfBlock(BlockVerification):
    kept = StandardRejection.kept


@pytest.mark.parametrize("method", [WithoutResidual(), LastOfStandard(), FirstOfBlock()])
def test_wrong_rules_are_biased(method: Method) -> None:
    """The enumeration sees what it is meant to see."""
    assert bias(Tables.random(3, 3, seed=3), SamplingParams(temperature=1.0), method) > 1e-3


def test_wrong_draft_distributions_are_biased() -> None:
    """SMP-3, SMP-4: a q without the temperature, and a q of bf16-rounded logits, both from outside the draft."""
    tables, params = Tables.random(3, 3, seed=3), SamplingParams(temperature=0.6)

    class OtherDistribution(StandardRejection):
        def __init__(self, change: object):
            self.change = change

        def rates(self, ratio: Tensor, target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
            other = self.change(draft)  # type: ignore[operator]
            taken = (ratio * other[:, :-1].sum(-1)).clamp_max(1)
            draft.copy_(other)
            return taken, ratio.new_ones(target.shape[:2])

    def untempered(q: Tensor) -> Tensor:
        return torch.nn.functional.normalize(q**0.6, p=1, dim=-1)

    def rounded(q: Tensor) -> Tensor:
        return torch.nn.functional.normalize(q.bfloat16().double(), p=1, dim=-1)

    for change in (untempered, rounded):
        assert bias(tables, params, OtherDistribution(change)) > 1e-6


def test_block_verification_keeps_more() -> None:
    """It is worth having: never fewer drafts than the standard rule, and more here."""
    for seed in range(5):
        tables = Tables.random(3, 3, seed=seed)
        params = SamplingParams(temperature=1.0)
        standard, block = (emitted_joint(tables, params, m)[1] for m in METHODS)
        assert block > standard + 1e-4


@methods
def test_equal_distributions_keep_every_draft(method: Method) -> None:
    """p = q leaves no residual: no division by zero, everything passes, and what rounding rejects yet is drawn of p."""
    probabilities = torch.tensor([[0.25, 0.75]], dtype=torch.float64).expand(2, 3, 2)
    draft = probabilities.clone()
    draft[:, -1] = 0
    ones = torch.ones(2, 2, dtype=torch.float64)
    passes, weight = method.rates(ones, probabilities, draft)
    assert torch.equal(passes, ones) and torch.equal(weight, torch.ones(2, 3, dtype=torch.float64))
    step = StepDistributions(ones.bool(), probabilities, draft, passes, weight)
    for kept in range(3):
        assert torch.equal(recovery_distribution(step, torch.tensor([kept, kept])), probabilities[:, kept])
    assert method.kept(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0, 0]
