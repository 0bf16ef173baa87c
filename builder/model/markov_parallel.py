"""Two exact ways to split the sequential part of a draft pass over ranks (spec 5.6, 7.6).

Every rank has computed the base logits of its shard of the vocabulary, [R, B, L] from the L rows of the head that
:func:`vocabulary_shard` gives it. Both ways return on every rank what the whole loop on whole logits returns, to the
bit if a column of a product does not depend on those beside it (16-bit tables, see ``numerics``), and their shapes
depend on the number of requests only.

* by requests: request i belongs to rank i mod tp. An all-to-all gives each rank the whole logits of its own
  requests, it runs the loop on them, and an all-gather of packed tokens and confidences gives all to all;
* by vocabulary: every rank runs the loop on its shard, with its rows of W2, and the ranks exchange a slot's
  winners; this is the operation MarkovSamplingSharded.

Neither gives every rank the whole corrected logits. :func:`plan_loops` says which loop a network uses, and from how
many requests on.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...plugins.collective import exchange_ranks, gather_ranks
from ..config import DraftConfig
from .markov import MarkovOptions

OwnBlock = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Whole base logits [n, B, V] and the requests [n] they belong to -> tokens [n, B] int32, confidence [n, B] float32."""


class Loop(enum.Enum):
    WHOLE = "every rank runs the whole loop"
    BY_REQUESTS = "each rank runs the loop of its requests"
    BY_VOCABULARY = "each rank runs the loop on its part of the vocabulary"


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """Which loop a rank runs, by number of requests; for networks in torch, as an engine has the whole loop only."""

    tp_size: int
    rank: int
    vocabulary_from: int = 0
    """Requests from which the loop is split by vocabulary; 0 is never."""
    requests_from: int = 0
    """Requests from which it is split by requests instead; 0 is never."""
    reason: str = ""
    """Why the loop is never split, where it could not be."""

    def loop(self, requests: int) -> Loop:
        if 0 < self.requests_from <= requests:
            return Loop.BY_REQUESTS
        return Loop.BY_VOCABULARY if 0 < self.vocabulary_from <= requests else Loop.WHOLE

    def __str__(self) -> str:
        starts = ((self.vocabulary_from, Loop.BY_VOCABULARY), (self.requests_from, Loop.BY_REQUESTS))
        split = [f"from {start} requests on {loop.value}" for start, loop in starts if start]
        if self.reason:
            return f"{Loop.WHOLE.value}: {self.reason}"
        return "; ".join(split) or f"{Loop.WHOLE.value}: both thresholds are 0"


def plan_loops(
    draft: DraftConfig,
    options: MarkovOptions,
    *,
    tp_size: int,
    rank: int,
    vocabulary_from: int,
    requests_from: int,
    draft_logits: bool = False,
    online_acceptance: bool = False,
) -> LoopPlan:
    """The loops of a draft: split from these numbers of requests on, or never and one line that says why.

    Args:
        draft_logits: every rank needs the corrected logits, for the verification of sampled drafts.
        online_acceptance: acceptance is estimated while decoding, in place of the confidence head.
    """
    reason = ""
    if tp_size == 1:
        reason = "there is one"
    elif draft_logits:
        reason = "every rank keeps the draft logits, a split loop has them in parts"
    elif online_acceptance:
        reason = "the online acceptance estimator is on, which excludes the confidence that a split loop gathers"
    elif options.top_k:
        reason = "top-k Markov picks its candidates from the whole vocabulary"
    elif draft.markov_head != "vanilla":
        reason = f"the {draft.markov_head} head has a loop of its own"
    elif draft.transforms_logits:
        reason = "a draft that transforms its logits has a loop of its own"
    elif options.draft_ids is not None:
        reason = "the head of a reduced draft vocabulary is not sharded"
    if reason:
        return LoopPlan(tp_size=tp_size, rank=rank, reason=reason)
    return LoopPlan(tp_size=tp_size, rank=rank, vocabulary_from=vocabulary_from, requests_from=requests_from)


def vocabulary_shard(table: Tensor, tp_size: int, rank: int) -> Tensor:
    """This rank's rows of a table [V, n]: ceil(V / tp), fewer at its end; a row of zeros for a rank that has none."""
    width = -(-len(table) // tp_size)
    rows = table[rank * width : (rank + 1) * width]
    return rows if len(rows) else torch.zeros_like(table[:1])


def owned_requests(requests: int, tp_size: int, device: torch.device | None = None) -> Tensor:
    """[tp, ceil(R / tp)] requests of each rank, i mod tp, with -1 where a rank has fewer."""
    per_rank = -(-requests // tp_size)
    ranks, places = (torch.arange(n, device=device) for n in (tp_size, per_rank))
    order = ranks.unsqueeze(1) + tp_size * places
    return torch.where(order < requests, order, -1)


def gathered_rows(requests: int, tp_size: int, device: torch.device | None = None) -> Tensor:
    """[R] where each request stands in the gathered [tp * ceil(R / tp)] rows of all owners."""
    index = torch.arange(requests, device=device)
    return (index % tp_size) * -(-requests // tp_size) + index // tp_size


def split_by_requests(
    shard_logits: Tensor, vocab_size: int, own_block: OwnBlock, *, tp_size: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Tokens and confidence [R, B] of all requests, each computed by its owner."""
    requests, block, columns = shard_logits.shape
    width = -(-vocab_size // tp_size)
    if columns < width:
        shard_logits = torch.nn.functional.pad(shard_logits, (0, width - columns))
    owned = owned_requests(requests, tp_size, shard_logits.device)
    # Padding sends request 0.
    received = exchange_ranks(shard_logits[owned.clamp_min(0)], tp_size, rank)
    whole = received.permute(1, 2, 0, 3).flatten(2)[..., :vocab_size].contiguous()
    tokens, confidence = own_block(whole, owned[rank].clamp_min(0))
    # Both as 32-bit words: nothing is converted on the way.
    packed = torch.cat((tokens, confidence.contiguous().view(torch.int32)), 1)
    rows = gather_ranks(packed, tp_size).flatten(0, 1)[gathered_rows(requests, tp_size, packed.device)]
    return rows[:, :block], rows[:, block:].contiguous().view(torch.float32)
