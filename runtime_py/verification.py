"""Decides which drafted tokens are kept (spec section 6.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..plugins.numerics import first_argmax


@dataclass(frozen=True)
class Verdict:
    """Per request: how many drafts were accepted, and the target's own token behind them."""

    accepted: list[int]
    bonus: list[int]


def verify_greedy(draft_tokens: Tensor, target_logits: Tensor) -> Verdict:
    """Keep the longest prefix of drafts that the target would have chosen itself.

    Row 0 of a request is its anchor; the target's row r predicts what follows draft r.

    Args:
        draft_tokens: [R, N] int32, N >= 0.
        target_logits: [R, N + 1, V] float32.
    """
    choice = first_argmax(target_logits)
    agrees = (choice[:, :-1] == draft_tokens).to(torch.int32)
    accepted = agrees.cumprod(1).sum(1)
    bonus = choice.gather(1, accepted.unsqueeze(1)).squeeze(1)
    return Verdict(accepted.tolist(), bonus.tolist())
