"""Inputs of the sampling kernels, and calls of the one that is split by vocabulary whose outputs are known exactly.

What every rank must write: the bits of MarkovSampling's kernel on the whole tables.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from dspark_trt.plugins.markov_sampling import MARKOV_SAMPLING
from dspark_trt.plugins.markov_sampling_sharded import MARKOV_SAMPLING_SHARDED
from torch import Tensor

from tests.gpu.kernel_call import KernelCall, bits

DEVICE = torch.device("cuda")
MODES = ("greedy", "sampled", "float64")


def example(
    seed: int, activation: torch.dtype, requests: int, vocab: int, rank: int, *, block: int = 5, sampling: bool = False
) -> list[Tensor]:
    """Random inputs of one call; temperatures include 0 and one below the floor of 1e-5."""
    source = torch.Generator(DEVICE).manual_seed(seed)
    options: dict[str, Any] = {"generator": source, "device": DEVICE}
    inputs = [
        torch.randn(requests, block, vocab, **options) * 2,
        torch.randint(vocab, (requests,), dtype=torch.int32, **options),
        torch.randn(vocab, rank, **options).mul_(0.3).to(activation),
        torch.randn(vocab, rank, **options).to(activation),
    ]
    if sampling:
        temperatures = torch.tensor([0.7, 0.0, 1.3, 1e-7, 1.0], device=DEVICE)
        inputs += [
            torch.randint(2**20, (requests,), dtype=torch.int32, **options),
            temperatures.repeat(requests)[:requests].contiguous(),
            torch.randint(-(2**31), 2**31, (requests, 2), **options).to(torch.int32),
        ]
    return inputs


def attributes(inputs: list[Tensor], *, float64: bool = False, logits: bool = True) -> dict[str, Any]:
    sampling = len(inputs) > 4
    return {
        "block_size": inputs[0].shape[1],
        "sampling": sampling,
        "float64_noise": float64 and sampling,
        "write_logits": logits,
    }


def awkward(inputs: list[Tensor], ranks: int) -> list[Tensor]:
    """The inputs with ties across rank borders, constant rows, a winner at V - 1, NaN and infinities."""
    base, vocab = inputs[0], inputs[0].shape[2]
    border = math.ceil(vocab / ranks)
    changes: list[tuple[slice | int | list[int], float]] = [
        (slice(None), 0.0),
        ([border - 1, min(border, vocab - 1)], 90.0),
        (vocab - 1, 99.0),
        (slice(None), math.nan),
        (slice(None), -math.inf),
        (slice(None), math.inf),
        ([0, min(border, vocab - 1)], math.inf),
    ]
    for i, (tokens, value) in enumerate(changes):
        base[i % len(base), i // len(base) % base.shape[1]][tokens] = value
    return inputs


class Case:
    """One call of the split operation on one rank, and the outputs it must give.

    Args:
        table: the rank's mailbox tensor [ranks, 2].
        inputs: of MarkovSampling, the same on every rank.
        padded: fill the last rank's part up to that of the others with rows that must not be seen.
    """

    def __init__(self, table: Tensor, rank: int, inputs: list[Tensor], *, float64: bool = False, padded: bool = False):
        base, anchors, embed, head, *keys = inputs
        ranks, block, (vocab, _) = len(table), base.shape[1], embed.shape
        width = math.ceil(vocab / ranks)
        rows = slice(rank * width, min(rank * width + width, vocab))
        part, logits = head[rows], base[..., rows]
        if (missing := (width if padded else 1) - len(part)) > 0:
            part = torch.cat((part, torch.full_like(head[:1], 100.0).expand(missing, -1)))
            logits = torch.cat((logits, torch.full_like(base[..., :1], 1e4).expand(-1, -1, missing)), -1)
        whole = {**attributes(inputs, float64=float64, logits=False)}
        self.label = f"rank {rank} of {ranks}, {len(anchors)} requests, {whole}, V = {vocab}"
        self.expected = [t.clone() for t in KernelCall(MARKOV_SAMPLING, inputs, **whole).run()]
        del whole["write_logits"]
        # Copies: a part may begin at an address that is not aligned.
        tensors = [
            logits.clone(memory_format=torch.contiguous_format),
            anchors,
            embed,
            part.clone(),
            *keys,
            *([table] if ranks > 1 else []),
        ]
        assert block == whole["block_size"]
        self.split = KernelCall(MARKOV_SAMPLING_SHARDED, tensors, **whole, tp_size=ranks, rank=rank)

    def differences(self) -> Tensor:
        """How many values differ in their bits, on the GPU."""
        pairs = zip(self.split.outputs, self.expected, strict=True)
        return torch.stack([(bits(a) != bits(b)).sum() for a, b in pairs]).sum()

    def check(self) -> None:
        differing = int(self.differences())
        assert differing == 0, f"{differing} values differ: {self.label}"

    def run(self) -> None:
        self.split.run()
        self.check()

    def launch(self) -> None:
        self.split.launch()
