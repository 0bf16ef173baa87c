"""Markov heads with random weights, inputs of their loop, and the operation on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from dspark_trt.builder.config import HeadKind, Numerics, parse_configs
from dspark_trt.builder.model.context import BuildContext
from dspark_trt.builder.model.markov import MarkovHead
from dspark_trt.plugins import markov_sampling
from dspark_trt.plugins.markov_sampling import MARKOV_SAMPLING
from torch import Tensor

from tests.released import tiny_config

V, B, RANK, H, R = 23, 5, 4, 6, 7
RELEASED = dataclasses.replace(
    parse_configs(tiny_config("v4.1"))[1], vocab_size=V, markov_rank=RANK, hidden_size=H, noise_token_id=0
)


def head_of(kind: HeadKind = "vanilla", seed: int = 0, **changed: Any) -> MarkovHead:
    """bfloat16 tables, whose products do not depend on the columns beside them."""
    config = dataclasses.replace(RELEASED, markov_head=kind, **changed)
    head = MarkovHead(config, BuildContext(Numerics.DEQUANTIZED, torch.bfloat16))
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head


def inputs(seed: int = 0, vocab: int = V) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Base logits, hidden rows, anchors, and keys with a greedy, a cold and warm requests."""
    generator = torch.Generator().manual_seed(seed)
    base, hidden = torch.randn(R, B, vocab, generator=generator), torch.randn(R, B, H, generator=generator)
    anchors = torch.randint(0, V, (R,), generator=generator).int()
    temperature = torch.tensor([0, 0.3, 1, 1, 1.7, 0, 1], dtype=torch.float32)
    seeds = torch.randint(-(2**31), 2**31, (R, 2), generator=generator).int()
    return base, hidden, anchors, (torch.arange(R).int() * 50, temperature, seeds)


def operation(
    head: MarkovHead, base: Tensor, anchors: Tensor, keys: tuple[Tensor, ...] | None, *, float64: bool = False
) -> Any:
    tables = (head.embed.weight, head.head.weight)
    kind = {"sampling": keys is not None, "float64_noise": float64 and keys is not None}
    return MARKOV_SAMPLING(base, anchors, *tables, *(keys or ()), block_size=B, write_logits=True, **kind)


@contextmanager
def drawn_kinds() -> Iterator[set[bool]]:
    """Whether noise that is drawn inside the block is float64: all that was. Tokens seldom tell."""
    kinds: set[bool] = set()
    original = markov_sampling.gumbel_noise

    def watched(*tensors: Any, float64: bool = False, **options: Any) -> Tensor:
        kinds.add(float64)
        return original(*tensors, float64=float64, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(markov_sampling, "gumbel_noise", watched)
        yield kinds


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
