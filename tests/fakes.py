"""Sessions of table models: a whole decode loop over a handful of symbols, thousands of requests at once.

The target's next-token logits depend on the token before and on its position; the draft is the real Markov
operation over base logits that depend on position and slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from dspark_trt.builder.build_config import BuildConfig
from dspark_trt.builder.config import parse_configs
from dspark_trt.builder.network import NetworkIO, TensorInfo
from dspark_trt.plugins.markov_sampling import MARKOV_SAMPLING
from dspark_trt.runtime_py.communicator import SingleProcess
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.requests import Request, SamplingParams
from dspark_trt.runtime_py.session import infer_shapes
from torch import Tensor

from tests.released import tiny_config

I32, F32 = torch.int32, torch.float32


@dataclasses.dataclass(frozen=True)
class Tables:
    """A random target and draft of ``vocab`` symbols; what they say repeats every ``period`` positions."""

    target: Tensor  # [period, V (token before), V]
    base: Tensor  # [period, N, V]
    embed: Tensor  # [V, rank]
    head: Tensor  # [V, rank]
    confidence: Tensor  # [N, V (token before)]

    @classmethod
    def random(cls, vocab: int, block: int, *, seed: int = 0, period: int = 5, spread: float = 1.5) -> Tables:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return spread * torch.randn(shape, generator=generator)

        target = normal(period, vocab, vocab)
        return cls(target, normal(period, block, vocab), normal(vocab, 2), normal(vocab, 2), normal(block, vocab))

    @property
    def vocab(self) -> int:
        return self.target.shape[-1]

    @property
    def block(self) -> int:
        return self.base.shape[1]

    def target_logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.target[positions.long() % len(self.target), ids.long()]

    def draft_logits(self, ids: Tensor, position: int) -> Tensor:
        """Corrected logits [n, N, V] of slots whose tokens before are ``ids`` [n, N], anchor at ``position``."""
        return self.base[position % len(self.base)] + self.embed[ids.long()] @ self.head.T

    def confidences(self, ids: Tensor) -> Tensor:
        return self.confidence[torch.arange(ids.shape[1]), ids.long()]


class Table:
    """What both sessions share."""

    def __init__(self, tables: Tables, io: NetworkIO):
        self.tables, self.io = tables, io

    def infer_shapes(self, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
        return infer_shapes(self.io, inputs)

    def check(self, inputs: Mapping[str, Tensor]) -> None:
        """As a real session would."""
        wrong = [i.name for i in self.io.inputs if inputs[i.name].dtype != i.dtype]
        assert not wrong, f"dtypes of {wrong}"


class TableTarget(Table):
    def __init__(self, tables: Tables):
        inputs = tuple(TensorInfo(n, I32, ("T",)) for n in ("input_ids", "positions", "slots"))
        logits = TensorInfo("logits", F32, ("T", tables.vocab))
        super().__init__(tables, NetworkIO(inputs, (logits, TensorInfo("target_features", F32, ("T", 1))), {}))

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        self.check(inputs)
        outputs["logits"].copy_(self.tables.target_logits(inputs["input_ids"], inputs["positions"]))
        outputs["target_features"].zero_()


class TableDraft(Table):
    def __init__(self, tables: Tables, *, sampling: bool):
        self.sampling = sampling
        inputs = [TensorInfo(n, I32, ("R",)) for n in ("anchor_ids", "positions", "slots")]
        inputs += [TensorInfo("target_features", F32, ("T", 1))]
        inputs += [TensorInfo(n, I32, ("T",)) for n in ("feature_positions", "feature_slots")]
        outputs = [TensorInfo(n, t, ("R", tables.block)) for n, t in (("draft_tokens", I32), ("confidence", F32))]
        if sampling:
            inputs += [TensorInfo("temperature", F32, ("R",)), TensorInfo("seeds", I32, ("R", 2))]
            outputs += [TensorInfo("draft_logits", F32, ("R", tables.block, tables.vocab))]
        super().__init__(tables, NetworkIO(tuple(inputs), tuple(outputs), {}))

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        self.check(inputs)
        tables = self.tables
        base = tables.base[inputs["positions"].long() % len(tables.base)]
        keys = [inputs[n] for n in ("positions", "temperature", "seeds")] if self.sampling else []
        anchors = inputs["anchor_ids"]
        options = {"block_size": tables.block, "sampling": self.sampling, "float64_noise": False, "write_logits": True}
        tokens, _, corrected = MARKOV_SAMPLING(base, anchors, tables.embed, tables.head, *keys, **options)
        outputs["draft_tokens"].copy_(tokens)
        before = torch.cat((anchors.unsqueeze(1), tokens[:, :-1]), 1)
        outputs["confidence"].copy_(tables.confidences(before))
        if self.sampling:
            outputs["draft_logits"].copy_(corrected)


def table_decoder(
    tables: Tables, *, slots: int = 8, sampling: bool = True, speculative: bool = True, **options: Any
) -> Decoder:
    """A decoder over the sessions of ``tables``."""
    target, draft = parse_configs(tiny_config("v4.1"))
    target = dataclasses.replace(target, vocab_size=tables.vocab, eos_token_ids=())
    draft = dataclasses.replace(draft, vocab_size=tables.vocab, block_size=tables.block)
    sizes = {"max_batch_size": slots, "max_input_len": max(1024, 2 * slots), "max_seq_len": 4096}
    build = BuildConfig(**sizes, num_draft_tokens=tables.block)
    return Decoder(
        options.pop("target", None) or TableTarget(tables),
        options.pop("draft", None) or TableDraft(tables, sampling=sampling) if speculative else None,
        target_config=target,
        draft_config=draft,
        build=build,
        **{"communicator": SingleProcess(), **options},
    )


def request(tokens: list[int], drafts: list[int], params: SamplingParams, *, prompt: int = 1) -> Request:
    """A request in flight whose last token is the anchor."""
    return Request(0, 0, prompt, tokens, params, frozenset(), drafts=drafts)
