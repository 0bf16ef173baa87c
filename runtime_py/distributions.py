"""The distributions that tokens are drawn from, as float64 probabilities.

The target's distribution p is what a request asked for: its logits after penalties, temperature, min-p, top-k and
top-p, in that order. The draft's distribution q is the one that the draft really sampled from, and no other. Both use
the request's temperature, because more drafts are accepted then; the draft applies none of the other parameters.
That costs acceptance, never correctness: verification emits p for any q, provided that q is exact.

A row without a finite maximum has the argmax's distribution: all mass on the lowest id of the largest value, where
NaN counts as -inf, or on id 0 if there is no number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..plugins.markov_sampling import TEMPERATURE_FLOOR
from ..plugins.numerics import first_argmax
from .requests import Request, SamplingParams


def probabilities(scores: Tensor, greedy: Tensor) -> Tensor:
    """Softmax of ``scores`` [..., V], one-hot at the argmax where ``greedy`` [...] is set."""
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    certain = greedy | ~scores.amax(-1).isfinite()
    return torch.where(certain.unsqueeze(-1), _one_hot(first_argmax(scores), scores), scores.double().softmax(-1))


def draft_probabilities(logits: Tensor, temperature: Tensor, tokens: Tensor, sampled: Tensor) -> Tensor:
    """The distribution q [R, N, V] of drafted ``tokens`` [R, N]: the softmax at the request's temperature where
    ``sampled`` [R] is set, one-hot elsewhere.

    Args:
        logits: [R, N, V] float32, Markov bias included, before the temperature; rows of requests that were
            not sampled are not read.
        temperature: [R] float32, as the draft was given it.
    """
    # In float32 like the draft's own division: q belongs to exactly the numbers that were sampled.
    scores = logits / temperature.clamp_min(TEMPERATURE_FLOOR).view(-1, 1, 1)
    chosen = _one_hot(tokens, scores)
    tempered = probabilities(scores, torch.zeros_like(tokens, dtype=torch.bool))
    return torch.where(sampled.view(-1, 1, 1), tempered, chosen)


def target_probabilities(requests: Sequence[Request], logits: Tensor) -> Tensor:
    """The distribution p [R, N + 1, V] of the token after each row of the requests' anchors and drafts.

    Args:
        logits: [R, N + 1, V] float32; rows after a request's last draft are ignored.
    """
    temperature = torch.tensor([r.params.temperature for r in requests], dtype=torch.float64, device=logits.device)
    scores = torch.where(logits.isnan(), -torch.inf, logits).double()
    for i, request in enumerate(requests):
        if request.params.penalizes:
            _penalize(scores[i], request)
    scores = scores / divisor(temperature)
    for i, request in enumerate(requests):
        if request.params.restricts:
            scores[i] = _restrict(scores[i], request.params)
    return probabilities(scores, greedy_rows(temperature, scores))


def plain_target_probabilities(logits: Tensor, temperature: Tensor) -> Tensor:
    """:func:`target_probabilities` of requests whose only parameter is a ``temperature`` [R] float64; reads no host
    data."""
    scores = torch.where(logits.isnan(), -torch.inf, logits).double() / divisor(temperature)
    return probabilities(scores, greedy_rows(temperature, scores))


def divisor(temperature: Tensor) -> Tensor:
    """What the scores [R, N + 1, V] of requests at ``temperature`` [R] are divided by; 1 at temperature 0."""
    return torch.where(temperature > 0, temperature, 1.0).view(-1, 1, 1)


def greedy_rows(temperature: Tensor, scores: Tensor) -> Tensor:
    """Which rows [R, N + 1] of ``scores`` belong to greedy requests."""
    return (temperature == 0).unsqueeze(1).expand(scores.shape[:-1])


def _penalize(scores: Tensor, request: Request) -> None:
    """Subtract the penalties of what precedes each row: repetition of prompt and output, the others of output."""
    params, vocab = request.params, scores.shape[-1]
    counts = torch.bincount(torch.tensor(request.output, dtype=torch.long), minlength=vocab)
    prompt = torch.bincount(torch.tensor(request.tokens[: request.prompt_length]), minlength=vocab)
    for row, draft in zip(scores, [*request.drafts, None], strict=False):
        seen, factor = (counts + prompt) > 0, params.repetition_penalty
        row.copy_(torch.where(seen, torch.where(row > 0, row / factor, row * factor), row))
        row -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        if draft is not None:  # the next row exists only if this draft is kept
            counts[draft] += 1


def _restrict(scores: Tensor, params: SamplingParams) -> Tensor:
    """``scores`` [rows, V] with -inf where min-p, top-k and top-p leave nothing; of equals the lowest ids stay."""
    if params.min_p > 0:
        limit = scores.amax(-1, keepdim=True) + torch.tensor(params.min_p).log()
        scores = scores.masked_fill(scores < limit, -torch.inf)
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    keep = rank < (params.top_k if params.top_k > 0 else scores.shape[-1])
    mass = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
    # The smallest set that reaches top_p: whatever starts below it. The first stays, also in rows without a number.
    keep = keep & ((mass.cumsum(-1) - mass < params.top_p) | (rank == 0))
    return scores.masked_fill(
        ~torch.zeros_like(keep.expand_as(scores)).scatter(-1, ids, keep.expand_as(ids)), -torch.inf
    )


def _one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=torch.float64, device=like.device).scatter_(-1, tokens.long().unsqueeze(-1), 1)
