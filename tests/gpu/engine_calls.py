"""A short life of three requests, run through any session of the trained tiny models, and how near two runs are.

Prefill of two requests, a step of both, a step of one beside padding, and a request that starts with a single
step: every profile, padding rows, shuffled slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from dspark_trt.builder.build_config import BuildConfig
from dspark_trt.builder.config import Numerics
from dspark_trt.builder.engine_dir import EngineDir
from dspark_trt.plugins.tensorrt_api import EngineOptions
from dspark_trt.runtime_py.session import Session, make_caches, make_outputs
from torch import Tensor

BATCH = 3
DTYPES = ("float32", "float16")
Open = Callable[[str, int], EngineDir]
"""Activation type and ranks -> engines."""
Outputs = dict[str, Tensor]


def build_config(dtype: str, **changed: Any) -> BuildConfig:
    """Drafts with logits, so that a token that differs can be told from a tie."""
    options: dict[str, Any] = {"numerics": Numerics.DEQUANTIZED, "dtype": dtype, "sampling": True}
    sizes = {"max_batch_size": 8, "max_input_len": 64, "max_seq_len": 256}
    # What is tested is what engines compute; level 1 builds them in a fraction of the time.
    return BuildConfig(**{**options, **sizes, "options": EngineOptions(builder_optimization_level=1), **changed})


def calls(block: int) -> list[dict[int, int]]:
    """Slot -> rows of each call; slot -1 is padding."""
    step = block + 1
    return [{1: 24, 0: 9}, {1: step, 0: step}, {0: step, -1: step}, {2: step}, {2: step, 0: step, 1: step}]


def _rows(block: int) -> Iterator[tuple[dict[int, int], list[int], list[int]]]:
    """Of each call: its slots and rows, the rows' slots and positions."""
    reached: dict[int, int] = {}
    for call in calls(block):
        slots, positions = [], []
        for slot, count in call.items():
            first = reached.get(slot, 0)
            slots += [slot] * count
            positions += range(first, first + count) if slot >= 0 else [0] * count
            reached[slot] = first + count
        yield call, slots, positions


def target_inputs(block: int, seed: int = 0) -> list[Outputs]:
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for _, slots, positions in _rows(block):
        ids = torch.randint(0, 256, (len(slots),), generator=generator)
        rows = {"input_ids": ids, "slots": torch.tensor(slots), "positions": torch.tensor(positions)}
        inputs.append({name: value.to(torch.int32) for name, value in rows.items()})
    return inputs


def draft_inputs(block: int, features: Sequence[Tensor], seed: int = 1) -> list[Outputs]:
    """The draft's calls on what a target captured (without padding); of every step the last row was rejected."""
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for (call, slots, positions), rows in zip(_rows(block), features, strict=True):
        anchors, starts, kept, at = [], [], list(slots), 0
        for count in call.values():
            accepted = count - 1 if count == block + 1 else count
            kept[at + accepted : at + count] = [-1] * (count - accepted)
            anchors.append(int(torch.randint(0, 256, (), generator=generator)))
            starts.append(positions[at + accepted - 1] + 1)
            at += count
        values = {"anchor_ids": anchors, "positions": starts, "slots": list(call)}
        values |= {"feature_positions": positions, "feature_slots": kept}
        call_inputs = {name: torch.tensor(value, dtype=torch.int32) for name, value in values.items()}
        call_inputs["target_features"] = rows.new_zeros(len(slots), rows.shape[1])
        call_inputs["target_features"][torch.tensor(slots) >= 0] = rows
        call_inputs["temperature"] = torch.zeros(len(call))
        call_inputs["seeds"] = torch.zeros(len(call), 2, dtype=torch.int32)
        inputs.append(call_inputs)
    return inputs


def run_calls(session: Session, inputs: Sequence[Mapping[str, Tensor]], device: torch.device | str) -> list[Outputs]:
    """Outputs of each call, on the CPU, without those of padding; with the last one's the caches after it."""
    caches = make_caches(session, device)
    results = []
    for given in inputs:
        tensors = {**{name: value.to(device) for name, value in given.items()}, **caches}
        outputs = make_outputs(session, tensors, caches)
        session.run(tensors, outputs)
        real = given["slots"].cpu() >= 0
        results.append({name: value.cpu()[real] for name, value in outputs.items() if name not in session.io.aliases})
    results[-1] |= {name: value.cpu() for name, value in caches.items()}
    return results


def row_errors(found: Tensor, wanted: Tensor) -> Tensor:
    """Relative distance of each row; rows that are zero must be zero in both."""
    f, w = found.double().flatten(0, -2), wanted.double().flatten(0, -2)
    norm = w.norm(dim=-1)
    assert bool((f[norm == 0] == 0).all()), "a row that must stay zero does not"
    return ((f - w).norm(dim=-1) / norm)[norm > 0]


def distances(found: Sequence[Outputs], wanted: Sequence[Outputs]) -> dict[str, tuple[float, float]]:
    """Output -> (three quarters of its rows are nearer than this, the farthest row); draft tokens by their logits.

    What a draft computes after the first token that differs is left out.
    """
    errors: dict[str, list[Tensor]] = {}
    for f, w in zip(found, wanted, strict=True):
        assert f.keys() == w.keys()
        same = None
        if "draft_tokens" in w:
            equal = (f["draft_tokens"] == w["draft_tokens"]).int().cumprod(1)
            same = torch.cat((torch.ones_like(equal[:, :1]), equal[:, :-1]), 1).bool()
        for name, value in w.items():
            if name == "draft_tokens" or not value.is_floating_point():
                continue
            assert bool(torch.isfinite(f[name]).all()), name
            one, other = f[name], value
            if same is not None and not name.startswith("kv_ring"):
                mask = same
                one, other = one[mask], other[mask]
                one, other = (one, other) if one.dim() > 1 else (one.unsqueeze(0), other.unsqueeze(0))
            errors.setdefault(name, []).append(row_errors(one, other))
    result = {}
    for name, parts in errors.items():
        every = torch.cat(parts)
        result[name] = (float(every.quantile(0.75)), float(every.max()))
    return result


def check_tokens(found: Sequence[Outputs], wanted: Sequence[Outputs]) -> tuple[int, int]:
    """(tokens that differ, all tokens); asserts that each first difference of a block is a near tie of the logits."""
    different = total = 0
    for f, w in zip(found, wanted, strict=True):
        for row in range(len(w["draft_tokens"])):
            total += w["draft_tokens"].shape[1]
            for slot in range(w["draft_tokens"].shape[1]):
                mine, theirs = int(f["draft_tokens"][row, slot]), int(w["draft_tokens"][row, slot])
                if mine != theirs:
                    logits, others = w["draft_logits"][row, slot], f["draft_logits"][row, slot]
                    margin = float(logits[theirs] - logits[mine])
                    assert margin <= 2 * float((logits - others).abs().max()), (row, slot, mine, theirs)
                    different += 1
                    break
    return different, total


def convert_tiny(root: Path, tp_size: int) -> Path:
    """Shards of the trained tiny models."""
    from dspark_trt.builder.checkpoint import convert_checkpoint

    checkpoint = Path(__file__).resolve().parents[2] / "examples" / "tiny" / "checkpoint"
    if not (shards := root / f"shards{tp_size}").exists():
        convert_checkpoint(checkpoint, shards, tp_size=tp_size)
    return shards
