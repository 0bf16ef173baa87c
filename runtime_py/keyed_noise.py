"""Random numbers that are pure functions of their keys: no generator, no state, the same on every rank.

A step of a request - drafting a block after its anchor and verifying it - draws from a seed of its own,
made of the request's seed and the anchor's position. Within the step a draw is named by its purpose (a
salt), by the position before the token that it decides, and by token id.

The step has to be part of the key. The next step drafts the positions after a rejection again, and their first draws
may already have had an effect: block verification and a schedule made ahead depend on them. Drawing the same numbers
again would correlate the second draft with the outcome of the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..plugins.markov_sampling import TEMPERATURE_FLOOR, noise_bits, noise_key
from ..plugins.numerics import first_argmax

# Salts are further apart than positions go, so no two purposes share a key; drafting has DRAFT_SALT.
ACCEPT_SALT = 0x6C078965
"""Whether a draft is kept."""
RECOVERY_SALT = 0xB5297A4D
"""The token after the kept drafts."""
STEP_SALT = 0xE7037ED1
"""Makes a step's seed out of a request's; not used with a step's seed."""
LOWER_WORD = 0x9E3779B9


def seed_words(seeds: Sequence[int]) -> Tensor:
    """64-bit seeds as [n, 2] int32 halves, low first."""
    words = np.array([seed % 2**64 for seed in seeds], dtype="<u8").view("<i4")
    return torch.from_numpy(words.reshape(-1, 2).astype(np.int32))


def step_seeds(seeds: Tensor, anchors: Tensor) -> Tensor:
    """The seeds [n, 2] of the steps whose anchors are at ``anchors`` [n], of requests seeded by ``seeds``."""
    low = noise_key(seeds, anchors, STEP_SALT)
    # For a given request the key's hash is a bijection of the position: its steps never share a seed.
    words = torch.stack((low, low ^ (seeds[:, 1].long() & 0xFFFFFFFF)), 1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def uniform(seeds: Tensor, positions: Tensor, count: int = 1, *, salt: int) -> Tensor:
    """Uniform numbers [n, count] float64 inside (0, 1), with 52 bits."""
    keys = noise_key(seeds, positions, salt)
    ids = torch.arange(count, device=seeds.device)
    upper, lower = noise_bits(keys, ids), noise_bits(keys ^ LOWER_WORD, ids)
    return (((upper << 20) | (lower >> 12)).double() + 0.5) * 2.0**-52


def gumbel_sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, salt: int) -> Tensor:
    """The sampler that verification uses: the argmax of tempered logits and Gumbel noise in float64."""
    noise = -torch.log(-torch.log(uniform(seeds, positions, logits.shape[-1], salt=salt)))
    scores = logits.double() / temperature.double().clamp_min(TEMPERATURE_FLOOR).unsqueeze(-1) + noise
    return first_argmax(torch.where(temperature.unsqueeze(-1) > 0, scores, logits.double()))
