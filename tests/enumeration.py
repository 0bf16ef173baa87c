"""The exact distribution of what one step emits, by enumeration of everything that is random in it.

Drafts are enumerated with the draft's probabilities, uniform numbers by which drafts pass, the token after
the kept drafts by its distribution, through the runtime's own functions. Emitted prefixes are completed with the
target's distribution, so that the result compares with the target's distribution of the next N + 1 tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from dspark_trt.runtime_py.distributions import target_probabilities
from dspark_trt.runtime_py.requests import SamplingParams
from dspark_trt.runtime_py.verification import Method, Verifier, recovery_distribution
from torch import Tensor

from tests.fakes import Tables, request

HISTORY = [0, 1]
"""Prompt of one token, and the anchor."""
ANCHOR = len(HISTORY) - 1
Lengths = Callable[[Tensor], Sequence[int]]
"""Confidence [n, N] of n drafts -> how many of each are verified."""
Alter = Callable[[Tensor], Tensor]


def all_drafts(tables: Tables) -> Tensor:
    ids = torch.arange(tables.vocab)
    return torch.cartesian_prod(*[ids] * tables.block).view(-1, tables.block)


def before(drafts: Tensor) -> Tensor:
    """The token in front of each slot."""
    return torch.cat((torch.full_like(drafts[:, :1], HISTORY[-1]), drafts[:, :-1]), 1)


def draft_probability(tables: Tables, params: SamplingParams, sampled: bool, alter: Alter) -> tuple[Tensor, Tensor]:
    """Probability of each of :func:`all_drafts`, and the logits that the draft returns with it."""
    drafts = all_drafts(tables)
    logits = alter(tables.draft_logits(before(drafts), ANCHOR))
    # What the draft samples from, spelled out here: verification's q has to be this.
    if sampled and not params.greedy:
        probabilities = (logits / torch.tensor(params.temperature)).double().softmax(-1)
    else:
        probabilities = torch.nn.functional.one_hot(logits.argmax(-1), tables.vocab).double()
    return probabilities.gather(2, drafts.unsqueeze(2)).squeeze(2).prod(1), logits


def target_joint(tables: Tables, params: SamplingParams) -> Tensor:
    """The target's own distribution of the next N + 1 tokens, [V] * (N + 1), without any draft."""
    joint = torch.ones(1, dtype=torch.float64)
    prefixes: list[tuple[int, ...]] = [()]
    for _ in range(tables.block + 1):
        states = [request([*HISTORY, *prefix], [], params) for prefix in prefixes]
        ids = torch.tensor([s.tokens[-1] for s in states])
        positions = torch.tensor([s.anchor_position for s in states])
        probabilities = target_probabilities(states, tables.target_logits(ids, positions).unsqueeze(1)).squeeze(1)
        joint = (joint.unsqueeze(1) * probabilities).flatten()
        prefixes = [(*prefix, token) for prefix in prefixes for token in range(tables.vocab)]
    return joint.view([tables.vocab] * (tables.block + 1))


def emitted_joint(
    tables: Tables,
    params: SamplingParams,
    method: Method,
    *,
    sampled: bool = True,
    lengths: Lengths | None = None,
    weights: Tensor | None = None,
    alter: Alter = lambda logits: logits,
) -> tuple[Tensor, float]:
    """What a step emits, completed by the target, [V] * (N + 1); and the drafts kept on average.

    Args:
        lengths: how many drafts are verified; all of them by default.
        weights: further probability of each draft, for choices of length that are random themselves.
        alter: what the draft does to its logits before it samples.
    """
    drafts, vocab, block = all_drafts(tables), tables.vocab, tables.block
    probability, logits = draft_probability(tables, params, sampled, alter)
    probability = probability if weights is None else probability * weights
    count = torch.tensor(lengths(tables.confidences(before(drafts))) if lengths else [block] * len(drafts))
    tokens = torch.where(torch.arange(block) < count.unsqueeze(1), drafts, -1)
    requests = [request(list(HISTORY), d[:n], params) for d, n in zip(drafts.tolist(), count.tolist(), strict=True)]
    rows = torch.cat((torch.full_like(drafts[:, :1], HISTORY[-1]), drafts), 1)
    target_logits = tables.target_logits(rows, ANCHOR + torch.arange(block + 1))
    distributions = Verifier(method).distributions(requests, tokens.int(), target_logits, logits if sampled else None)
    emitted = [torch.zeros([vocab] * (m + 1), dtype=torch.float64) for m in range(block + 1)]
    average = 0.0
    for pattern in itertools.product((False, True), repeat=block):
        passed = torch.tensor(pattern).expand_as(distributions.passes)
        chance = torch.where(passed, distributions.passes, 1 - distributions.passes).prod(1) * probability
        kept = method.kept(passed & distributions.drafted)
        probabilities = recovery_distribution(distributions, kept)
        mass = chance.unsqueeze(1) * probabilities / probabilities.sum(1, keepdim=True)
        average += float((chance * kept).sum())
        for m in range(block + 1):
            own = kept == m
            emitted[m].view(-1, vocab).index_add_(0, _index(drafts[own, :m], vocab), mass[own])
    joint = target_joint(tables, params)
    total = torch.zeros_like(joint)
    for m, mass in enumerate(emitted):
        marginal = joint.flatten(m + 1).sum(-1) if m < block else joint
        impossible = float(mass[marginal == 0].sum())
        assert impossible < 1e-12, f"tokens that the target excludes come out with probability {impossible}"
        scale = torch.where(marginal > 0, mass / marginal, 0.0)
        total += joint * scale.view(*scale.shape, *[1] * (block - m))
    return total, average


def _index(prefixes: Tensor, vocab: int) -> Tensor:
    index = torch.zeros(len(prefixes), dtype=torch.long)
    for column in prefixes.unbind(1):
        index = index * vocab + column
    return index


def bias(tables: Tables, params: SamplingParams, method: Method, **choices: Any) -> float:
    """Total variation between what is emitted and the target's distribution."""
    emitted, _ = emitted_joint(tables, params, method, **choices)
    return float((emitted - target_joint(tables, params)).abs().sum()) / 2
