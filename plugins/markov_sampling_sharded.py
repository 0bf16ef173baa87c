"""MarkovSamplingSharded: the loop of MarkovSampling, each rank on its part of the vocabulary (spec 5.6, 7.6).

Rank r has the L rows of W2 from r * ceil(V / tp) on and those columns of the base logits; L is ceil(V / tp) or less
at the end of the vocabulary, and rows beyond it are padding and never chosen. W1 is whole on every rank. A slot's
winners travel as (value, id) pairs, in one exchange per slot; the largest value wins, and of equal values the lowest
id. So every rank has the tokens and features that MarkovSampling gives on the whole tables, to the bit if a column of a
product does not depend on those beside it (16-bit tables, see ``numerics``). No rank has the whole corrected logits, so
there is no such output.

The kernel exchanges the pairs, packed in one word, through the regions of the mailbox that MhcAllReduce uses too
(``cpp_plugins/kernels/markov_exchange.cuh``); the constants below are the layout of its part. It is an operation of
networks in torch: exported networks keep the whole loop, and only one rank has a body in ONNX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .collective import gather_ranks
from .markov_sampling import CHOICES, DRAFT_SALT, KEYS, MARKOV_SAMPLING, LoopAttributes, noise_problem, noisy_scores
from .numerics import first_argmax, matmul
from .op import Op, OpError, TensorSpec

MAX_STEPS, MAX_REQUESTS, MAX_RANKS = 8, 64, 8
"""Slots of a block, requests and ranks of a call of the kernel."""
GENERATIONS = 2
"""Sets of candidates that calls use in turn: while one is read, the other is cleared."""


def exchange_bytes(ranks: int) -> int:
    """Bytes of a region that hold candidates [generation][slot][request][source rank]; zeros at the start."""
    return GENERATIONS * MAX_STEPS * MAX_REQUESTS * ranks * 8


@dataclass(frozen=True, kw_only=True)
class Attributes(LoopAttributes):
    tp_size: int
    rank: int
    """Whose rows ``head`` holds."""


class MarkovSamplingSharded(Op):
    name = "MarkovSamplingSharded"
    attributes_type = Attributes
    all_inputs = (
        TensorSpec("base_logits", "float32", ("requests", "block_size", "L")),
        TensorSpec("anchor_ids", "int32", ("requests",)),
        TensorSpec("embed", "T", ("V", "R")),
        TensorSpec("head", "T", ("L", "R")),
        *KEYS,
        TensorSpec("mailbox", "int32", ("P", 2), when=("tp_size", 1), addresses=True),
    )
    all_outputs = CHOICES

    def size_problem(self, attributes: Attributes, sizes: Mapping[str, Any]) -> str:
        vocab, rows, rank, ranks = sizes["V"], sizes["L"], attributes.rank, attributes.tp_size
        if ranks < 1 or not 0 <= rank < ranks:
            return f"rank is {rank} of {ranks}, expected 0..{max(ranks, 1) - 1}"
        if isinstance(vocab, int) and isinstance(rows, int):
            width = -(-vocab // ranks)
            least = min(max(vocab - rank * width, 1), width)
            if not least <= rows <= width:
                return f"head has {rows} rows, expected {least}..{width} of {vocab} on rank {rank} of {ranks}"
        return noise_problem(attributes, vocab)

    def reference(
        self,
        attributes: Attributes,
        base_logits: Tensor,
        anchor_ids: Tensor,
        embed: Tensor,
        head: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, Tensor]:
        vocab = len(embed)
        first = attributes.rank * -(-vocab // attributes.tp_size)
        ids = first + torch.arange(len(head), device=base_logits.device)
        previous, tokens, features = anchor_ids, [], []
        for i, base in enumerate(base_logits.unbind(1)):
            feature = embed[previous.long()]
            scores = base + matmul(feature, head)
            if attributes.sampling:
                positions, temperature, seeds = rest[:3]
                own, float64 = positions + i, attributes.float64_noise
                scores = noisy_scores(scores, temperature, seeds, own, salt=DRAFT_SALT, ids=ids, float64=float64)
            scores = torch.where(scores.isnan() | (ids >= vocab), -torch.inf, scores)
            local = first_argmax(scores)
            value = scores.gather(1, local.long().unsqueeze(1))
            # The id is a word of its own beside the value: as a float it would be exact below 2^24 only.
            pair = torch.cat((value.view(torch.int32), (local + first).unsqueeze(1)), 1)
            gathered = gather_ranks(pair, attributes.tp_size)
            words, winners = gathered[..., :-1].clone(memory_format=torch.contiguous_format), gathered[..., -1]
            values = words.view(scores.dtype)[..., 0]
            # Ranks are in order of ids, so the first of equal values has the lowest.
            owner = first_argmax(values.T)
            previous = winners.T.gather(1, owner.long().unsqueeze(1)).squeeze(1)
            tokens.append(previous)
            features.append(feature)
        return torch.stack(tokens, 1), torch.stack(features, 1)

    def onnx_body(self, attributes: Attributes, cast: str) -> str:
        if attributes.tp_size > 1:
            raise OpError(
                f"{self.name} of {attributes.tp_size} ranks has no body in ONNX; export MarkovSampling, the whole loop"
            )
        whole = MARKOV_SAMPLING.attributes_type(
            block_size=attributes.block_size,
            sampling=attributes.sampling,
            float64_noise=attributes.float64_noise,
            write_logits=False,
        )
        return MARKOV_SAMPLING.onnx_body(whole, cast)


MARKOV_SAMPLING_SHARDED = MarkovSamplingSharded()
