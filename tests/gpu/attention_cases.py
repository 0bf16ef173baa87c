"""Inputs of the attention operations, and the same operations in float64, written here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dspark_trt.plugins.context_kv_insert import CONTEXT_KV_INSERT
from torch import Tensor

from tests.gpu.kernel_call import KernelCall

DEVICE = torch.device("cuda")
V41 = {"rope_dims": 64, "rope_theta": 1e4, "quant_width": 512, "quant_group": 32, "head_dim": 512}
V4 = V41 | {"quant_width": 448, "quant_group": 64}
PLAIN = V41 | {"quant_width": 0}
TINY = {"rope_dims": 16, "rope_theta": 1e4, "quant_width": 64, "quant_group": 32, "head_dim": 64}

activations = pytest.mark.parametrize(
    "activation", [torch.bfloat16, torch.float16, torch.float32], ids=lambda t: str(t).removeprefix("torch.")
)
formats = pytest.mark.parametrize("cache", [V41, V4, PLAIN], ids=["v4.1", "v4", "plain"])


class Draw:
    """Random inputs from one seed."""

    def __init__(self, seed: int, activation: torch.dtype):
        self.source, self.activation = torch.Generator(DEVICE).manual_seed(seed), activation

    def values(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.source, device=DEVICE).to(self.activation)

    def sinks(self, heads: int) -> Tensor:
        return torch.rand(heads, generator=self.source, device=DEVICE) + 2


def ids(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


# Float64 arithmetic ---------------------------------------------------------------------------------------


def turn(x: Tensor, positions: Tensor, cache: dict[str, Any], *, back: bool = False) -> Tensor:
    """Rotate the last channels of x [..., D] as complex pairs; angles are float32 products (spec 10.6)."""
    dims = cache["rope_dims"]
    exponents = torch.arange(0, dims, 2, dtype=torch.float64) / dims
    frequencies = (1.0 / (cache["rope_theta"] ** exponents).float()).to(x.device)
    angles = (positions.float().unsqueeze(-1) * frequencies).double()
    turns = torch.polar(torch.ones_like(angles), -angles if back else angles)
    pairs = torch.view_as_complex(x[..., -dims:].double().unflatten(-1, (-1, 2)).contiguous()) * turns
    return torch.cat((x[..., :-dims].double(), torch.view_as_real(pairs).flatten(-2)), -1)


def cached(kv: Tensor, positions: Tensor, cache: dict[str, Any]) -> Tensor:
    """Cache entries of kv rows in float64: rotated, rounded to the type, rounded through FP8 (spec 3.5)."""
    rows = turn(kv, positions, cache).to(kv.dtype).double()
    width, group = cache["quant_width"], cache["quant_group"]
    if not width:
        return rows
    grouped = rows[..., :width].unflatten(-1, (-1, group))
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448.0)))
    codes = (grouped / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double()
    return torch.cat(((codes * scale).flatten(-2).to(kv.dtype).double(), rows[..., width:]), -1)


def attend(q: Tensor, keys: Tensor, sink: Tensor) -> Tensor:
    """Softmax attention of q [heads, D] over keys [K, D] with a sink logit per head, exact in float64."""
    scores = q @ keys.T * q.shape[-1] ** -0.5
    weights = torch.softmax(torch.cat((scores, sink.double().unsqueeze(1)), 1), 1)[:, :-1]
    return weights @ keys


def draft_reference(inputs: list[Tensor], cache: dict[str, Any]) -> Tensor:
    q, kv, positions, slots, ring, sink = inputs
    out = torch.zeros_like(q, dtype=torch.float64)
    for r, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        if 0 <= slot < len(ring):
            rows = torch.arange(position, position + q.shape[1], device=DEVICE)
            keys = torch.cat((ring[slot, : max(position, 0)].double(), cached(kv[r], rows, cache)))
            for b in range(q.shape[1]):
                attended = attend(turn(q[r, b], rows[b], cache), keys, sink)
                out[r, b] = turn(attended, rows[b], cache, back=True)
    return out


def target_reference(inputs: list[Tensor], cache: dict[str, Any], window: int) -> Tensor:
    q, positions, slots, ring, sink = inputs
    out = torch.zeros_like(q, dtype=torch.float64)
    for t, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        if 0 <= slot < len(ring):
            seen = [p % ring.shape[1] for p in range(max(0, position - window + 1), position + 1)]
            attended = attend(turn(q[t], positions[t], cache), ring[slot, seen].double(), sink)
            out[t] = turn(attended, positions[t], cache, back=True)
    return out


def bound(activation: torch.dtype, cache: dict[str, Any]) -> float:
    """Largest ||out - reference|| / ||reference||: query, probabilities and result are rounded by up to half a step of
    the type (2^-9, 2^-12, 2^-25) each, rotated ones twice; this is about twice what correct kernels show. In float32
    one FP8 code of an own row that falls the other way outweighs all of that."""
    if activation == torch.float32 and cache["quant_width"]:
        return 5e-4
    return {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}[activation]


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def insert(inputs: list[Tensor], cache: dict[str, Any]) -> KernelCall:
    """A call that updates ``inputs[3]`` in place, as an engine with aliased outputs binds it."""
    one = KernelCall(CONTEXT_KV_INSERT, inputs, **cache)
    one.pointers["ring_out"] = one.pointers["ring"]
    return one


def draft_inputs(
    draw: Draw, positions: Sequence[int], slots: Sequence[int], *, heads: int = 64, block: int = 5, ring: Sequence[int]
) -> list[Tensor]:
    requests, dim = len(positions), ring[2]
    values = draw.values(requests, block, heads, dim), draw.values(requests, block, dim)
    inputs = [*values, ids(positions), ids(slots), draw.values(*ring), draw.sinks(heads)]
    for position, slot in zip(positions, slots, strict=True):
        if 0 <= slot < ring[0]:
            inputs[4][slot, max(position, 0) :] = float("nan")
    return inputs


def target_inputs(
    draw: Draw, positions: Sequence[int], slots: Sequence[int], *, heads: int, ring: Sequence[int]
) -> list[Tensor]:
    q = draw.values(len(positions), heads, ring[2])
    return [q, ids(positions), ids(slots), draw.values(*ring), draw.sinks(heads)]
