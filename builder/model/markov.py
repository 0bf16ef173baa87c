"""The sequential part of a draft pass in the forms that the MarkovSampling operation does not have.

Released drafts have a plain bias W2 . W1[previous token] over the target's vocabulary, and that is what
engines compute. Here the same loop takes, in torch and for the torch session only:

* heads whose bias also depends on the slot's hidden row (gated) or on all slots before (rnn), spec 5.1;
* a scale and a cap of the logits, which the bias goes through as well or not;
* a reduced draft vocabulary: logits of some of the target's tokens. The loop continues in the target's
  vocabulary, with -inf for the others, so that noise, ties and draft logits are those of target ids;
* the top-k approximation: each slot's candidates are the k largest base logits, picked before the bias is
  known, and with ``bigrams`` the tokens that the static table W1 W2^T favours after the previous one.
  Everything else is -inf. Without bigrams a token that only the bias would lift is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ...plugins.markov_sampling import DRAFT_SALT, Sampler, draw
from ...plugins.numerics import first_argmax, matmul, pointwise
from ..config import ConfigError, DraftConfig
from .context import BuildContext
from .layers import Table, frozen


@dataclass(frozen=True, kw_only=True)
class MarkovOptions:
    """How a draft chooses its tokens; what the MarkovSampling operation does not have keeps it out of engines."""

    float64_noise: bool = False
    """Of a sampling draft, as the operation has it."""
    top_k: int = 0
    """Candidates per slot; 0 is all of them."""
    bigrams: int = 0
    """Further candidates after each token."""
    draft_ids: Sequence[int] | None = None
    """The target ids of a reduced draft vocabulary, in its order; None is the target's."""

    def checked(self, draft: DraftConfig) -> MarkovOptions:
        """Raise :class:`ConfigError` unless the options fit together and ``draft``."""
        vocab_size = size = draft.vocab_size
        problems = []
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
        if self.bigrams and draft.markov_head != "vanilla":
            problems.append(f"bigrams need a bias of the previous token alone, the head is {draft.markov_head}")
        if problems:
            raise ConfigError("; ".join(problems))
        return self

    @property
    def plain(self) -> bool:
        """Whether the MarkovSampling operation has all of this."""
        return self == MarkovOptions(float64_noise=self.float64_noise)


def draft_offsets_to_ids(offsets: Tensor) -> list[int]:
    """Target ids of draft ids 0, 1, .. from the offsets (target id - draft id) that checkpoints store."""
    return [draft + offset for draft, offset in enumerate(offsets.tolist())]


def transform_logits(config: DraftConfig, logits: Tensor) -> Tensor:
    """A draft's logits after its scale and its cap, in this order."""
    if config.logit_scale != 1:
        logits = config.logit_scale * logits
    if config.logit_softcap is not None:
        logits = config.logit_softcap * pointwise(torch.tanh, logits / config.logit_softcap)
    return logits


class Projection(Table):
    """A linear layer with a bias, float32 out."""

    def __init__(self, outputs: int, inputs: int, context: BuildContext):
        super().__init__(outputs, inputs, dtype=context.dtype)
        self.bias = frozen(outputs, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return matmul(x, self.weight.to(x.dtype)) + self.bias


class MarkovHead(nn.Module):
    """The tables of the bias after a token, and what gated and rnn heads have beside them."""

    def __init__(self, config: DraftConfig, context: BuildContext):
        super().__init__()
        self.config, rank, hidden = config, config.markov_rank, config.hidden_size
        self.embed = Table(config.vocab_size, rank, dtype=context.dtype)
        self.head = Table(config.vocab_size, rank, dtype=context.dtype)
        if config.markov_head == "gated":
            self.gate_proj = Projection(rank, hidden + rank, context)
        elif config.markov_head == "rnn":
            self.joint_proj = Projection(3 * rank, 2 * rank + hidden, context)

    def step(self, feature: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What W2 is applied to at one slot, and the state for the next.

        Args:
            feature: [n, rank] W1 of the previous token; hidden: [n, H] the slot's row; state: [n, rank] float32.
        """
        if self.config.markov_head == "vanilla":
            return feature, None
        if self.config.markov_head == "gated":
            gate = self.gate_proj(torch.cat((hidden, feature), -1))
            return pointwise(torch.sigmoid, gate) * feature.float(), None
        memory = torch.zeros_like(feature, dtype=torch.float32) if state is None else state
        joined = torch.cat((memory, feature.float(), hidden.float()), -1)
        gate, content, output = self.joint_proj(joined).chunk(3, -1)
        gate = pointwise(torch.sigmoid, gate)
        return pointwise(torch.tanh, output), gate * memory + (1 - gate) * pointwise(torch.tanh, content)

    def bias(self, mixed: Tensor, table: Tensor) -> Tensor:
        """[n, Vd] float32 of what :meth:`step` gave and the rows [Vd, rank] of W2."""
        bias = matmul(mixed, table)
        return transform_logits(self.config, bias) if self.config.apply_output_logit_transform else bias


def draft_block(
    head: MarkovHead,
    options: MarkovOptions,
    base_logits: Tensor,
    hidden: Tensor,
    anchor_ids: Tensor,
    keys: tuple[Tensor, Tensor, Tensor] | None = None,
    *,
    sampler: Sampler | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the MarkovSampling operation: tokens [R, B], features [R, B, rank], corrected logits [R, B, V].

    Args:
        base_logits: [R, B, Vd] float32 of the draft's vocabulary, after the transform that the draft may have.
        hidden: [R, B, H] normed rows, for gated and rnn heads.
        keys: positions, temperature and seeds of a sampling draft; without, tokens are the argmax.
        sampler: chooses the tokens in place of the operation's; it gets the draw's key and may change the logits
            that are returned.
    """
    vocab = head.embed.weight.shape[0]
    ids = None if options.draft_ids is None else torch.tensor(options.draft_ids, device=base_logits.device)
    table = head.head.weight if ids is None else head.head.weight[ids]
    kept = largest(base_logits, options.top_k) if options.top_k else None
    static = largest(matmul(head.embed.weight, table), options.bigrams) if options.bigrams else None
    choose: Sampler = sampler or partial(draw, float64=options.float64_noise)
    previous, state = anchor_ids, None
    tokens: list[Tensor] = []
    features: list[Tensor] = []
    corrected: list[Tensor] = []
    for i, base in enumerate(base_logits.unbind(1)):
        feature = head.embed.weight[previous.long()]
        mixed, state = head.step(feature, hidden[:, i], state)
        logits = base + head.bias(mixed, table)
        if kept is not None:
            allowed = kept[:, i] if static is None else kept[:, i] | static[previous.long()]
            logits = torch.where(allowed, logits, -torch.inf)
        if ids is not None:
            logits = torch.full((len(logits), vocab), -torch.inf, device=logits.device).index_copy(1, ids, logits)
        if keys is None:
            previous = first_argmax(logits)
        else:
            positions, temperature, seeds = keys
            previous = choose(logits, temperature, seeds, positions + i, salt=DRAFT_SALT)
        tokens.append(previous)
        features.append(feature)
        corrected.append(logits)
    return torch.stack(tokens, 1), torch.stack(features, 1), torch.stack(corrected, 1)


def largest(scores: Tensor, count: int) -> Tensor:
    """Which [..., V] of ``scores`` are the ``count`` largest; of equals the lowest ids, NaN counting as -inf."""
    order = torch.where(scores.isnan(), -torch.inf, scores).sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., :count], True)
