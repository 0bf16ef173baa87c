"""Decides which drafted tokens are kept, and draws the token after them (spec sections 6.1 and 10.8).

Both methods emit tokens with exactly the target's distribution, for any distribution q of the draft, as long as it is
the one that the drafts were drawn from. For drafts x_1 .. x_n with target distributions p_1 .. p_(n+1):

* standard: x_i passes if u_i <= p_i(x_i) / q_i(x_i); kept are the drafts before the first that fails.
  After them comes a token of max(p - q, 0), normalised, or of p_(n+1) if all were kept;
* block: with w_0 = 1, w_i = min(1, w_(i-1) p_i(x_i) / q_i(x_i)) and R_i the mass of max(w_i p_(i+1) - q_(i+1), 0),
  x_i passes if u_i <= R_i / (R_i + 1 - w_i); kept is everything up to the *last* that passes. After a
  kept drafts comes a token of max(w_a p_(a+1) - q_(a+1), 0). It keeps at least as many drafts.

Here q_(n+1) is zero, which makes R_n = w_n and the token after all drafts one of p_(n+1) without a case of
its own. The distributions of a greedy request are one-hot; both methods then keep the target's own choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..plugins.markov_sampling import Sampler
from ..plugins.numerics import first_argmax
from .distributions import draft_probabilities, target_probabilities
from .keyed_noise import ACCEPT_SALT, RECOVERY_SALT, gumbel_sample, seed_words, step_seeds, uniform
from .requests import Request


@dataclass(frozen=True)
class Verdict:
    """Per request: how many drafts were accepted, and the target's own token after them."""

    accepted: list[int]
    bonus: list[int]


class Method(Protocol):
    """A rule that keeps a prefix of the drafts. Distributions are [R, N + 1, V] float64; the draft's are zero after
    the last draft."""

    def rates(self, ratio: Tensor, target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
        """Probability [R, N] that each draft passes, and the weight [R, N + 1] of the target's distribution in the
        token after 0 .. N kept drafts; ``ratio`` [R, N] is p / q of the drafts."""
        ...

    def kept(self, passed: Tensor) -> Tensor:
        """How many drafts are kept [R], from which of them pass [R, N] bool."""
        ...


class StandardRejection:
    def rates(self, ratio: Tensor, target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
        return ratio.clamp_max(1), ratio.new_ones(target.shape[:2])

    def kept(self, passed: Tensor) -> Tensor:
        return passed.long().cumprod(1).sum(1)


class BlockVerification:
    def rates(self, ratio: Tensor, target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
        weights = [ratio.new_ones(len(ratio))]
        for column in ratio.unbind(1):
            weights.append((weights[-1] * column).clamp_max(1))
        weight = torch.stack(weights, 1)
        mass = (weight.unsqueeze(-1) * target - draft).clamp_min(0).sum(-1)
        # A weight of one passes for sure, also where p = q leaves no mass to divide.
        passes = torch.where(weight < 1, mass / (mass + 1 - weight), 1.0)
        return passes[:, 1:], weight

    def kept(self, passed: Tensor) -> Tensor:
        counts = torch.arange(1, passed.shape[1] + 1, device=passed.device)
        return torch.cat((counts.new_zeros(len(passed), 1), passed * counts), 1).amax(1)


def acceptance_ratio(target: Tensor, draft: Tensor, tokens: Tensor) -> Tensor:
    """p / q [R, N] of drafted ``tokens`` [R, N], from distributions [R, N + 1, V]; 0 for a token that q excludes."""
    p, q = (x[:, :-1].gather(2, tokens.long().unsqueeze(2)).squeeze(2) for x in (target, draft))
    return torch.where(q > 0, p / q, 0.0)


@dataclass(frozen=True)
class StepDistributions:
    """What a step's outcome is drawn from; the drafts of a request come first, ``drafted`` [R, N] says which are."""

    drafted: Tensor
    target: Tensor
    draft: Tensor
    passes: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Verifier:
    """Verifies a step of all requests by one method; the same on every rank and in any order of requests."""

    method: Method = field(default_factory=StandardRejection)
    sampler: Sampler = gumbel_sample
    """Draws the token after the kept drafts, from logits that are the logarithm of its distribution."""

    def __call__(self, requests: Sequence[Request], logits: Tensor, draft_logits: Tensor | None) -> Verdict:
        """Verify ``request.drafts`` of each request.

        Args:
            logits: [rows, V] float32; the rows of a request's anchor and drafts, request by request.
            draft_logits: [R, N, V] float32 of the sampled requests; without it drafts are taken as greedy.
        """
        lengths = [len(r.drafts) for r in requests]
        logits = pad_sequence(list(logits.split([n + 1 for n in lengths])), batch_first=True)
        width = logits.shape[1] - 1
        padded = [r.drafts + [-1] * (width - n) for r, n in zip(requests, lengths, strict=True)]
        tokens = torch.tensor(padded, dtype=torch.int32).view(len(requests), width)
        if all(r.params.greedy and not r.params.penalizes for r in requests):
            return verify_greedy(tokens, logits)
        step = self.distributions(requests, tokens, logits, draft_logits)
        anchors = torch.tensor([r.anchor_position for r in requests], dtype=torch.int32)
        seeds = step_seeds(seed_words([r.seed for r in requests]), anchors)
        kept, bonus = outcome(step, self.method, self.sampler, seeds, anchors)
        return Verdict(kept.tolist(), bonus.tolist())

    def distributions(
        self, requests: Sequence[Request], tokens: Tensor, logits: Tensor, draft_logits: Tensor | None
    ) -> StepDistributions:
        """The distributions of a step, from ``logits`` [R, N + 1, V] and ``tokens`` [R, N], -1 after a request's last
        draft."""
        temperature = torch.tensor([r.params.temperature for r in requests], dtype=torch.float64)
        cached = None if draft_logits is None else draft_logits[:, : tokens.shape[1]]
        return step_distributions(self.method, target_probabilities(requests, logits), tokens, cached, temperature)


def step_distributions(
    method: Method, target: Tensor, tokens: Tensor, draft_logits: Tensor | None, temperature: Tensor
) -> StepDistributions:
    """The distributions of a step.

    Args:
        target: [R, N + 1, V] float64 distributions of the target; tokens: [R, N], -1 where there is no draft.
        draft_logits: [R, N, V] float32 that sampled drafts come from; None if all drafts are greedy.
        temperature: [R] float64.
    """
    drafted, ids = tokens >= 0, tokens.clamp_min(0)
    if draft_logits is None:
        draft_logits, sampled = target[:, :-1].float(), torch.zeros_like(temperature, dtype=torch.bool)
    else:
        sampled = temperature > 0
    draft = draft_probabilities(draft_logits, temperature.float(), ids, sampled) * drafted.unsqueeze(2)
    draft = torch.cat((draft, torch.zeros_like(target[:, :1])), 1)
    passes, weight = method.rates(acceptance_ratio(target, draft, ids), target, draft)
    return StepDistributions(drafted, target, draft, passes, weight)


def outcome(
    step: StepDistributions, method: Method, sampler: Sampler, seeds: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor]:
    """How many drafts [R] are kept, and the token [R] after them.

    Args:
        seeds: [R, 2] int32, the step's; anchors: [R] int32, the anchors' positions.
    """
    width = step.drafted.shape[1]
    offsets = torch.arange(width, dtype=torch.int32, device=anchors.device)
    positions = (anchors.unsqueeze(1) + offsets).flatten()
    drawn = uniform(seeds.repeat_interleave(width, 0), positions, salt=ACCEPT_SALT).view(step.drafted.shape)
    kept = method.kept((drawn <= step.passes) & step.drafted)
    ones = torch.ones(len(anchors), device=anchors.device)
    return kept, sampler(recovery_distribution(step, kept).log(), ones, seeds, anchors + kept.int(), salt=RECOVERY_SALT)


def recovery_distribution(step: StepDistributions, kept: Tensor) -> Tensor:
    """The unnormalised distribution [R, V] of the token after ``kept`` [R] drafts."""
    row = kept.view(-1, 1, 1).expand(-1, 1, step.target.shape[-1])
    p, q = step.target.gather(1, row).squeeze(1), step.draft.gather(1, row).squeeze(1)
    residual = (step.weight.gather(1, kept.unsqueeze(1)) * p - q).clamp_min(0)
    # p = q leaves nothing, and nothing is rejected then, but for rounding.
    return torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)


def verify_greedy(draft_tokens: Tensor, target_logits: Tensor) -> Verdict:
    """:func:`greedy_outcome`, on the host."""
    kept, bonus = greedy_outcome(draft_tokens, target_logits)
    return Verdict(kept.tolist(), bonus.tolist())


def greedy_outcome(draft_tokens: Tensor, target_logits: Tensor) -> tuple[Tensor, Tensor]:
    """The length [R] of the longest prefix of drafts that the target would have chosen itself, and its choice [R]
    after it.

    Row 0 of a request is its anchor; the target's row r predicts what follows draft r.

    Args:
        draft_tokens: [R, N] int32, N >= 0; -1 where a request has fewer drafts than others.
        target_logits: [R, N + 1, V] float32.
    """
    choice = first_argmax(target_logits)
    agrees = (choice[:, :-1] == draft_tokens).to(torch.int32)
    kept = agrees.cumprod(1).sum(1)
    return kept, choice.gather(1, kept.unsqueeze(1)).squeeze(1)
