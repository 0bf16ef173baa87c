"""Two exact ways to split the sequential part of a draft pass over ranks (spec 5.6), in torch reference form.

Every rank has computed the base logits of its shard of the vocabulary, [R, B, ceil(V / tp)] from the rows
rank * ceil(V / tp) on of the head; the last rank's surplus columns are padding. Both ways return on every rank
what the whole loop on whole logits returns, to the bit if a column of a product does not depend on those beside
it (16-bit tables, see ``numerics``), and their shapes depend on the number of requests only.

* by requests: request i belongs to rank i mod tp. An all-to-all gives each rank the whole logits of its own
  requests, it runs the loop on them, and an all-gather of packed tokens and confidences gives all to all;
* by vocabulary: every rank runs the loop on its shard, with its rows of W2. A slot's winners travel as
  (value, id) pairs, one exchange a slot; the largest value wins, of equals the lowest id.

Neither has the whole corrected logits on every rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...plugins.collective import gather_ranks
from ...plugins.markov_sampling import DRAFT_SALT, noisy_scores
from ...plugins.numerics import first_argmax, matmul
from .markov import MarkovOptions

OwnBlock = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Whole base logits [n, B, V] and the requests [n] they belong to -> tokens [n, B] int32, confidence [n, B] float32."""


def why_not_sharded(
    options: MarkovOptions, *, draft_logits: bool = False, online_acceptance: bool = False, own_sampler: bool = False
) -> str | None:
    """One line on why the loop can't be split over ranks; None if it can."""
    if draft_logits:
        return "the draft logits are wanted on every rank, a split loop has them in parts"
    if online_acceptance:
        return (
            "the online acceptance estimator is on, a split loop gathers the confidence head's values, which exclude it"
        )
    if options.top_k:
        return "top-k Markov picks its candidates from the whole vocabulary"
    if options.head != "vanilla":
        return f"the {options.head} head has a loop of its own"
    if options.draft_ids is not None:
        return "the head of a reduced draft vocabulary is not sharded"
    if own_sampler:
        return "a sampler of the caller's own chooses the tokens"
    return None


def owned_requests(requests: int, tp_size: int) -> Tensor:
    """[tp, ceil(R / tp)] requests of each rank, i mod tp, with -1 where a rank has fewer."""
    per_rank = -(-requests // tp_size)
    order = torch.arange(tp_size).unsqueeze(1) + tp_size * torch.arange(per_rank)
    return torch.where(order < requests, order, -1)


def gathered_rows(requests: int, tp_size: int) -> Tensor:
    """[R] where each request stands in the gathered [tp * ceil(R / tp)] rows of all owners."""
    index = torch.arange(requests)
    return (index % tp_size) * -(-requests // tp_size) + index // tp_size


def split_by_requests(
    shard_logits: Tensor, vocab_size: int, own_block: OwnBlock, *, tp_size: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Tokens and confidence [R, B] of all requests, each computed by its owner."""
    requests, block, _ = shard_logits.shape
    owned = owned_requests(requests, tp_size)
    # The all-to-all, spelled as a gather of what goes to everybody. Padding sends request 0.
    sent = shard_logits[owned.clamp_min(0)]
    received = gather_ranks(sent, tp_size)[:, rank]
    whole = received.permute(1, 2, 0, 3).flatten(2)[..., :vocab_size]
    tokens, confidence = own_block(whole, owned[rank].clamp_min(0))
    # Both as 32-bit words: nothing is converted on the way.
    packed = torch.cat((tokens, confidence.contiguous().view(torch.int32)), 1)
    rows = gather_ranks(packed, tp_size).flatten(0, 1)[gathered_rows(requests, tp_size)]
    return rows[:, :block], rows[:, block:].contiguous().view(torch.float32)


def split_by_vocabulary(
    shard_logits: Tensor,
    vocab_size: int,
    embed: Tensor,
    head_shard: Tensor,
    anchor_ids: Tensor,
    keys: tuple[Tensor, Tensor, Tensor] | None = None,
    *,
    tp_size: int,
    rank: int,
) -> tuple[Tensor, Tensor]:
    """Tokens [R, B] int32 and features [R, B, rank of W1]; ``head_shard`` [V / tp, rank of W2] are this rank's rows.

    Args:
        keys: positions, temperature and seeds of a sampling draft.
    """
    width = shard_logits.shape[-1]
    ids = rank * width + torch.arange(width)
    previous = anchor_ids
    tokens, features = [], []
    for i, base in enumerate(shard_logits.unbind(1)):
        feature = embed[previous.long()]
        scores = base + matmul(feature, head_shard)
        if keys is not None:
            positions, temperature, seeds = keys
            scores = noisy_scores(scores, temperature, seeds, positions + i, salt=DRAFT_SALT, ids=ids)
        scores = torch.where(scores.isnan() | (ids >= vocab_size), -torch.inf, scores)
        local = first_argmax(scores)
        value = scores.gather(1, local.long().unsqueeze(1))
        # The id is a word of its own beside the value: as a float it would be exact below 2^24 only.
        pair = torch.cat((value.view(torch.int32), (local + rank * width).unsqueeze(1)), 1)
        gathered = gather_ranks(pair, tp_size)
        values, winners = gathered[..., :1].contiguous().view(torch.float32)[..., 0], gathered[..., 1]
        # Ranks are in order of ids, so the first of equal values has the lowest.
        owner = first_argmax(values.T)
        previous = winners.T.gather(1, owner.long().unsqueeze(1)).squeeze(1)
        tokens.append(previous)
        features.append(feature)
    return torch.stack(tokens, 1), torch.stack(features, 1)
