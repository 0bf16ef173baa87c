"""The sequential part of a draft pass in the forms that the MarkovSampling operation does not have.

Released drafts have a plain bias W2 . W1[previous token] over the target's vocabulary, and that is what
engines compute. Here the same loop takes, in torch and for the torch session only:

* heads whose bias also depends on the slot's hidden row (gated) or on all slots before (rnn), spec 5.1;
* a reduced draft vocabulary: logits of some of the target's tokens. The loop continues in the target's
  vocabulary, with -inf for the others, so that noise, ties and draft logits are those of target ids;
* the top-k approximation: each slot's candidates are the k largest base logits, picked before the bias is
  known, and with ``bigrams`` the tokens that the static table W1 W2^T favours behind the previous one.
  Everything else is -inf. Without bigrams a token that only the bias would lift is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ...plugins.markov_sampling import DRAFT_SALT, Sampler, noisy_scores
from ...plugins.numerics import first_argmax, matmul, pointwise
from ..config import ConfigError, DraftConfig
from .context import BuildContext
from .layers import Table, frozen

HeadKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True, kw_only=True)
class MarkovOptions:
    """What differs from the released drafts; anything that does keeps a draft out of engines."""

    head: HeadKind = "vanilla"
    logit_scale: float = 1.0
    """Factor of the bias."""
    top_k: int = 0
    """Candidates a slot; 0 is all of them."""
    bigrams: int = 0
    """Further candidates behind each token."""
    draft_ids: Sequence[int] | None = None
    """The target ids of a reduced draft vocabulary, in its order; None is the target's."""

    def checked(self, vocab_size: int) -> MarkovOptions:
        """Raise :class:`ConfigError` unless the options fit together and a target of ``vocab_size`` tokens."""
        size, problems = vocab_size, []
        if self.draft_ids is not None:
            ids, size = list(self.draft_ids), len(self.draft_ids)
            outside = [i for i in ids if not 0 <= i < vocab_size]
            if outside or len(set(ids)) < size or not ids:
                problems.append(
                    f"the draft vocabulary has {size} ids, {size - len(set(ids))} of them twice, outside: "
                    f"{outside[:5]}; expected distinct ids of 0..{vocab_size - 1}"
                )
        if not 0 <= self.top_k <= size:
            problems.append(f"top_k is {self.top_k}, expected 0..{size}, the draft's vocabulary")
        if not 0 <= self.bigrams <= size or (self.bigrams and not self.top_k):
            problems.append(f"bigrams is {self.bigrams}, expected 0..{size} beside a top_k")
        if self.bigrams and self.head != "vanilla":
            problems.append(f"bigrams need a bias of the previous token alone, the head is {self.head}")
        if problems:
            raise ConfigError("; ".join(problems))
        return self

    @property
    def released(self) -> bool:
        """Whether the MarkovSampling operation computes this."""
        return self == MarkovOptions()


def draft_offsets_to_ids(offsets: Tensor) -> list[int]:
    """Target ids of draft ids 0, 1, .. from the offsets (target id - draft id) that checkpoints store."""
    return [draft + offset for draft, offset in enumerate(offsets.tolist())]


class MarkovHead(nn.Module):
    """The tables of the bias behind a token, and what gated and rnn heads have beside them."""

    def __init__(self, config: DraftConfig, context: BuildContext, kind: HeadKind = "vanilla"):
        super().__init__()
        self.kind, rank = kind, config.markov_rank
        self.embed = Table(config.vocab_size, rank, dtype=context.dtype)
        self.head = Table(config.vocab_size, rank, dtype=context.dtype)
        if kind != "vanilla":
            inputs, outputs = (2 * rank, 3 * rank) if kind == "rnn" else (rank, rank)
            self.mix = Table(outputs, inputs + config.hidden_size, dtype=context.dtype)
            self.mix_bias = frozen(outputs, dtype=torch.float32)

    def step(self, feature: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What W2 is applied to at one slot, and the state for the next.

        Args:
            feature: [n, rank] W1 of the previous token; hidden: [n, H] the slot's row; state: [n, rank] float32.
        """
        if self.kind == "vanilla":
            return feature, None
        if self.kind == "gated":
            gate = matmul(torch.cat((hidden, feature), -1), self.mix.weight) + self.mix_bias
            return pointwise(torch.sigmoid, gate) * feature.float(), None
        memory = torch.zeros_like(feature, dtype=torch.float32) if state is None else state
        joined = torch.cat((memory, feature.float(), hidden.float()), -1)
        gate, content, output = (matmul(joined, self.mix.weight.float()) + self.mix_bias).chunk(3, -1)
        gate = pointwise(torch.sigmoid, gate)
        return pointwise(torch.tanh, output), gate * memory + (1 - gate) * pointwise(torch.tanh, content)


def sample_tokens(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, salt: int) -> Tensor:
    """The sampler of the MarkovSampling operation."""
    return first_argmax(noisy_scores(logits, temperature, seeds, positions, salt=salt))


def draft_block(
    head: MarkovHead,
    options: MarkovOptions,
    base_logits: Tensor,
    hidden: Tensor,
    anchor_ids: Tensor,
    keys: tuple[Tensor, Tensor, Tensor] | None = None,
    *,
    sampler: Sampler = sample_tokens,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the MarkovSampling operation: tokens [R, B], features [R, B, rank], corrected logits [R, B, V].

    Args:
        base_logits: [R, B, Vd] float32 of the draft's vocabulary; hidden: [R, B, H] normed rows, for gated and rnn.
        keys: positions, temperature and seeds of a sampling draft; without, tokens are the argmax.
        sampler: chooses the tokens; it gets the draw's key and may change the logits that are returned.
    """
    vocab = head.embed.weight.shape[0]
    ids = None if options.draft_ids is None else torch.tensor(options.draft_ids, device=base_logits.device)
    table = head.head.weight if ids is None else head.head.weight[ids]
    kept = largest(base_logits, options.top_k) if options.top_k else None
    static = largest(matmul(head.embed.weight, table), options.bigrams) if options.bigrams else None
    previous, state = anchor_ids, None
    tokens: list[Tensor] = []
    features: list[Tensor] = []
    corrected: list[Tensor] = []
    for i, base in enumerate(base_logits.unbind(1)):
        feature = head.embed.weight[previous.long()]
        mixed, state = head.step(feature, hidden[:, i], state)
        bias = matmul(mixed, table)
        logits = base + (bias if options.logit_scale == 1 else options.logit_scale * bias)
        if kept is not None:
            allowed = kept[:, i] if static is None else kept[:, i] | static[previous.long()]
            logits = torch.where(allowed, logits, -torch.inf)
        if ids is not None:
            logits = torch.full((len(logits), vocab), -torch.inf, device=logits.device).index_copy(1, ids, logits)
        if keys is None:
            previous = first_argmax(logits)
        else:
            positions, temperature, seeds = keys
            previous = sampler(logits, temperature, seeds, positions + i, salt=DRAFT_SALT)
        tokens.append(previous)
        features.append(feature)
        corrected.append(logits)
    return torch.stack(tokens, 1), torch.stack(features, 1), torch.stack(corrected, 1)


def largest(scores: Tensor, count: int) -> Tensor:
    """Which [..., V] of ``scores`` are the ``count`` largest; of equals the lowest ids, NaN counting as -inf."""
    order = torch.where(scores.isnan(), -torch.inf, scores).sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., :count], True)
