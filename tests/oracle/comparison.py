"""Stage by stage comparison of a network with its numpy oracle, and the passes that both run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from dspark_trt.builder.model.draft import DraftModel
from dspark_trt.builder.model.target import TargetModel
from torch import Tensor

from tests.configs import TinyCheckpoint, draft_rings, ids, target_rings
from tests.oracle.numpy_model import NumpyDraft, NumpyTarget
from tests.oracle.numpy_ops import Array

Stages = dict[str, Array]

FLOAT32 = 3e-5
"""Share of a stage's rms. Rounding errors of 2^-24 through sums of up to 768 products and twelve sublayers
reach 8e-6 here; the smallest fault of test_mutations moves a stage by 5e-4."""


def to_numpy(tensor: Tensor) -> Array:
    return tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()


class Recorder(Stages):
    """A probe that keeps what it sees as float64."""

    def probe(self, name: str, tensor: Tensor) -> None:
        self[name] = to_numpy(tensor.detach())


def distances(found: Array, wanted: Array) -> Array:
    """Per row (first dimension): the largest difference over the rms of the whole stage."""
    found = found.reshape(wanted.shape)
    scale = np.sqrt(np.mean(np.square(wanted, dtype=np.float64))) or 1.0
    difference = np.abs(found.astype(np.float64) - wanted).reshape(len(wanted), -1).max(-1)
    return np.where(np.isfinite(difference), difference, np.inf) / scale


@dataclass(frozen=True)
class Difference:
    stage: str
    distance: float

    def __str__(self) -> str:
        return f"{self.stage} differs by {self.distance:.1e} of its rms"


def differences(
    found: Mapping[str, Array],
    wanted: Mapping[str, Array],
    tolerance: float,
    statistic: Callable[[Array], float] = np.max,
) -> list[Difference]:
    """The stages of ``wanted`` that ``found`` has and that differ, in the order of the dataflow.

    A float tolerance is a share of the stage's rms, for ``statistic`` of the rows; integers must agree.
    """
    out = []
    for name, value in wanted.items():
        if name in found:
            exact = not np.issubdtype(found[name].dtype, np.floating)
            distance = float(statistic(distances(found[name], value)))
            if distance > (0 if exact else tolerance):
                out.append(Difference(name, distance))
    return out


@dataclass(frozen=True)
class DraftPass:
    """The inputs of one draft call."""

    anchors: Tensor
    positions: Tensor
    slots: Tensor
    features: Tensor
    feature_positions: Tensor
    feature_slots: Tensor

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (
            self.anchors,
            self.positions,
            self.slots,
            self.features.to(dtype),
            self.feature_positions,
            self.feature_slots,
        )

    def arrays(self) -> tuple[Array, ...]:
        return tuple(to_numpy(t) for t in self.tensors(torch.float64))


def draft_pass(
    checkpoint: TinyCheckpoint,
    contexts: Mapping[int, range],
    *,
    rejected: int = 0,
    seed: int = 0,
) -> DraftPass:
    """A call that inserts ``contexts`` (slot -> positions) and drafts right after each of them.

    Args:
        rejected: rows with slot -1 after each context, at the positions that the block will take.
    """
    generator = torch.Generator().manual_seed(seed)
    keys = checkpoint.keys
    width = len(keys["dspark_target_layer_ids"]) * keys["hidden_size"]
    positions, slots = [], []
    for slot, context in contexts.items():
        positions += [*context, *range(context.stop, context.stop + rejected)]
        slots += [slot] * len(context) + [-1] * rejected
    # bf16 values, so that a released network reads the same numbers.
    features = torch.randn(len(positions), width, generator=generator).bfloat16().float()
    return DraftPass(
        torch.randint(0, keys["vocab_size"], (len(contexts),), generator=generator, dtype=torch.int32),
        ids(*(context.stop for context in contexts.values())),
        ids(*contexts),
        features,
        ids(*positions),
        ids(*slots),
    )


def two_steps(checkpoint: TinyCheckpoint) -> list[DraftPass]:
    """A context call and a decode step: one, 20 and 35 context rows, then rejected rows among the new ones."""
    first = draft_pass(checkpoint, {2: range(1), 0: range(20), 1: range(30, 65)}, seed=1)
    return [first, draft_pass(checkpoint, {2: range(1, 3), 0: range(20, 26), 1: range(65, 66)}, rejected=2, seed=2)]


def run_draft(
    checkpoint: TinyCheckpoint,
    passes: list[DraftPass],
    dtype: torch.dtype | None = torch.float32,
    *,
    prepare: Callable[[torch.nn.Module], None] | None = None,
) -> Stages:
    """The stages of the last of ``passes``, computed by the package; rings under ``ring{s}``."""
    stages = Recorder()
    model = checkpoint.draft(dtype, probe=stages.probe)
    if prepare:
        prepare(model)
    rings = draft_rings(model, slots=4)
    for one in passes:
        stages.clear()
        with torch.no_grad():
            tokens, confidence, logits, rings = model(*one.tensors(model.context.dtype), rings)
    for stage, ring in enumerate(rings):
        stages[f"ring{stage}"] = to_numpy(ring)
    for name, value in (("corrected_logits", logits), ("draft_tokens", tokens), ("confidence", confidence)):
        stages[name] = to_numpy(value)
    return stages


def numpy_draft(checkpoint: TinyCheckpoint, *, released: bool = False) -> NumpyDraft:
    block = checkpoint.draft_config.weight_block_size
    return NumpyDraft(checkpoint.keys, checkpoint.variant, block, checkpoint.tensors, released=released)


def numpy_target(checkpoint: TinyCheckpoint, *, released: bool = False) -> NumpyTarget:
    block = checkpoint.draft_config.weight_block_size
    return NumpyTarget(checkpoint.keys, checkpoint.variant, block, checkpoint.tensors, released=released)


def run_target(
    checkpoint: TinyCheckpoint,
    tokens: Tensor,
    dtype: torch.dtype | None = torch.float32,
    *,
    prepare: Callable[[torch.nn.Module], None] | None = None,
) -> Stages:
    """The stages of one prefill of ``tokens``, computed by the package."""
    stages = Recorder()
    model = checkpoint.target(dtype, probe=stages.probe)
    if prepare:
        prepare(model)
    for index, layer in enumerate(model.layers):
        # The target's probes leave the sublayers' outputs out.
        layer.attn.register_forward_hook(lambda _, __, out, i=index: stages.probe(f"layer{i}_attn_out", out[0]))
        layer.ffn.register_forward_hook(lambda _, __, out, i=index: stages.probe(f"layer{i}_ffn_out", out))
    count = len(tokens)
    rows = torch.arange(count, dtype=torch.int32)
    with torch.no_grad():
        logits, features, _ = model(tokens, rows, torch.zeros_like(rows), target_rings(model, 1, rows=count + 32))
    stages["target_features"], stages["logits"] = to_numpy(features), to_numpy(logits)
    return stages


# Bit comparisons ---------------------------------------------------------------------------------------


def agree(found: Sequence[Tensor], wanted: Sequence[Tensor], dtype: torch.dtype | None) -> None:
    """Bit for bit, or in float32 within its tolerance; NaN (never written) must be NaN on both sides."""
    for one, other in zip(found, wanted, strict=True):
        if dtype is torch.float32 and one.is_floating_point():
            assert torch.equal(one.isnan(), other.isnan())
            one, other = one.nan_to_num(7.0), other.nan_to_num(7.0)
            assert distances(to_numpy(one), to_numpy(other)).max() < FLOAT32
        else:
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def share_moved(found: Tensor, wanted: Tensor) -> float:
    """Rms of the difference over the rms of ``wanted``."""
    return float((found - wanted).double().square().mean().sqrt() / wanted.double().square().mean().sqrt())


def run_passes(
    model: DraftModel, passes: list[DraftPass], slots: int = 4, mailbox: Tensor | None = None
) -> list[Tensor]:
    """Tokens, confidence and logits of the last pass, then the rings."""
    rings = draft_rings(model, slots)
    with torch.no_grad():
        for one in passes:
            tokens, confidence, logits, rings = model(*one.tensors(model.context.dtype), rings, mailbox)
    return [tokens, confidence, logits, *rings]


def sequence(length: int, seed: int) -> Tensor:
    return torch.randint(0, 319, (length,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


def feed(
    model: TargetModel, tokens: Tensor, start: int, slot: int, rings: list[Tensor], mailbox: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Run consecutive rows of one request from position ``start``."""
    rows = torch.arange(start, start + len(tokens), dtype=torch.int32)
    with torch.no_grad():
        return model(tokens, rows, torch.full_like(rows, slot), rings, mailbox)
