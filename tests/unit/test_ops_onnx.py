"""The standard-ONNX body of every operation, in ONNX Runtime, against its reference."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

from tests.op_examples import CACHES, LABELS, UNQUANTIZED, VOCAB, Example, example, run_onnx

EXACT = ("MarkovSampling:0", "MarkovSampling:1", "HcCollapse:0")
"""Tokens and features are looked up, the collapse adds in the same order: equal to the last bit."""

FLOAT32 = 4e-6
"""Share of the largest value: the same float32 operations in another order."""
FLOAT16 = 2.0**-9
"""Share of the largest value: two float16 roundings. The bodies keep attention's probabilities in float32,
the reference rounds them; both are legitimate (spec 10.7)."""


FLIPPED_ROWS, FLIP = 0.05, 2.0**-8
"""RoutedExperts rounds what is inside the experts to e4m3 codes. A value that lies within float32's rounding of the
middle between two codes may be rounded either way, by another order of sums: that happens in few rows (one of 33 in
this data), and one code of one channel moves a row by 4.5e-4 of the largest value here."""


def assert_close(found: Tensor, wanted: Tensor, tolerance: float, *, flips: bool = False) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert torch.equal(found.isnan(), wanted.isnan())
    found, wanted = found.double().nan_to_num(0.0), wanted.double().nan_to_num(0.0)
    if wanted.numel():
        error = (found - wanted).abs() / wanted.abs().max()
        if flips:
            flipped = error.amax(-1) > tolerance
            assert flipped.sum() <= FLIPPED_ROWS * len(error)
            assert error[flipped].lt(FLIP).all()
            error = error[~flipped]
        assert error.max() <= tolerance


def compare(one: Example, activation: torch.dtype) -> None:
    tolerance = FLOAT32 if activation is torch.float32 else FLOAT16
    for i, (found, wanted) in enumerate(zip(run_onnx(one, activation), one.run(), strict=True)):
        exact = f"{one.op.name}:{i}" in EXACT or not wanted.is_floating_point()
        flips = one.op.name == "RoutedExperts" and activation is torch.float32
        assert_close(found, wanted, 0.0 if exact else tolerance, flips=flips)


activations = pytest.mark.parametrize("activation", [torch.float32, torch.float16], ids=["float32", "float16"])


@activations
@pytest.mark.parametrize("label", LABELS)
def test_body_equals_the_reference(label: str, activation: torch.dtype) -> None:
    """33 rows or requests, both variants' attributes, quantised caches and weights included."""
    compare(example(label, activation, rows=33, seed=1), activation)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("label", LABELS)
def test_body_with_few_rows(label: str, rows: int) -> None:
    """HC-3: no reshape or reduction of the bodies depends on having several rows."""
    compare(example(label, torch.float32, rows=rows, seed=2), torch.float32)


@activations
@pytest.mark.parametrize("label", [n for n in LABELS if "Attention" in n or "Insert" in n])
def test_body_with_slots_out_of_range_and_poisoned_rows(label: str, activation: torch.dtype) -> None:
    """KV-2, KV-5: no write, zero rows, and NaN in rows that no window reaches stays there."""
    one = example(label, activation, rows=8, seed=3)
    specs = [s.name for s in one.op.inputs(one.values)]
    ring = one.tensors[specs.index("ring")].clone()
    ring[:, 20:] = torch.nan
    slots = torch.tensor([-1, 0, -(2**31), 1, 3, 2, 4, 2**31 - 1], dtype=torch.int32)
    positions = torch.tensor([3, 0, 7, 15, 9, 19, 2, 1], dtype=torch.int32)
    if "Draft" in label:  # row p of the ring belongs to the block of an anchor at p
        positions[5] = 20
    for name, value in (("ring", ring), ("slots", slots), ("positions", positions)):
        one = one.replaced(specs.index(name), value)
    compare(one, activation)
    (found,) = run_onnx(one, activation)
    if "Insert" in label:
        changed = (found.nan_to_num(7.0) != ring.nan_to_num(7.0)).any(-1)
        assert changed.nonzero().tolist() == [[0, 0], [1, 15], [2, 19]]
    else:
        assert found.isfinite().all()
        inside = (slots >= 0) & (slots < 3)
        assert not found[~inside].any() and found[inside].flatten(1).any(1).all()


@activations
@pytest.mark.parametrize("label", [n for n in LABELS if "Experts" in n])
def test_body_with_experts_out_of_range(label: str, activation: torch.dtype) -> None:
    """An id that names no expert adds nothing: -1 is not the last expert, and E is not an error."""
    one = example(label, activation, rows=8, seed=7)
    specs = [s.name for s in one.op.inputs(one.values)]
    at, experts = specs.index("indices"), len(one.tensors[specs.index("w1")])
    indices, weights = one.tensors[at].clone(), one.tensors[specs.index("weights")].clone()
    indices[0] = -1
    indices[1] = experts
    indices[2, 1], indices[3, 0], indices[4, 2], indices[5, 1] = -1, experts, -(2**31), 2**31 - 1
    one = one.replaced(at, indices)
    compare(one, activation)
    outside = (indices < 0) | (indices >= experts)
    weightless = one.replaced(at, indices.masked_fill(outside, 0))
    weightless = weightless.replaced(specs.index("weights"), weights.masked_fill(outside, 0.0))
    (wanted,) = run_onnx(weightless, activation)
    (found,) = run_onnx(one, activation)
    assert torch.equal(found, wanted) and not found[:2].any() and found[2:].any(1).all()


@pytest.mark.parametrize("group", [32, 64])
def test_quantisation_body_has_the_reference_scales(group: int) -> None:
    """Bit-equal where nothing but the quantiser acts (position 0 does not rotate): amax at, just below and
    just above powers of two times 448 over sixty binades, at the floor, and zero."""
    cache = {**CACHES["v4.1"], "quant_group": group}
    op = example("ContextKvInsert v4.1", torch.float32).op
    base = 448.0 * torch.exp2(torch.arange(-30, 29).float())
    amax = torch.cat((base, base * (1 + 2**-23), base * (1 - 2**-24), base * 1.5, torch.tensor([0.0, 1e-4, 1e-9])))
    generator = torch.Generator().manual_seed(4)
    kv = amax.unsqueeze(1) * (2 * torch.rand(len(amax), 64, generator=generator) - 1)
    kv[:, 0] = amax
    kv[:, group % 64] = -amax
    rows = torch.arange(len(amax), dtype=torch.int32)
    one = Example("", op, cache, (kv, torch.zeros_like(rows), rows, torch.zeros(len(amax), 1, 64)))
    (found,), (wanted,) = run_onnx(one, torch.float32), one.run()
    assert torch.equal(found, wanted)
    assert not torch.equal(wanted[:, 0], kv)


def test_sampling_body_has_the_reference_noise() -> None:
    """4096 draws over seeds, positions and temperatures give the same tokens; integer hashing is exact."""
    one = example("MarkovSampling sampled", torch.float32, rows=4096 // 5, seed=5)
    tokens, *_ = run_onnx(one, torch.float32)
    wanted, *_ = one.run()
    # A near tie may fall the other way: logarithms of the two runtimes differ in the last bit.
    assert (tokens == wanted).double().mean() > 0.998
    assert (tokens >= 0).all() and (tokens < VOCAB).all()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_special_logits_give_an_id(kind: str) -> None:
    """SMP-5 in the body: all NaN, one NaN, all -inf, all +inf, winner at V - 1."""
    one = example(f"MarkovSampling {kind}", torch.float32, rows=6, seed=6)
    base = torch.zeros(6, 5, VOCAB)
    base[0] = NAN
    base[1, :, 5], base[1, :, 9] = NAN, 50.0
    base[2] = -INF
    base[3] = INF
    base[4, :, VOCAB - 1] = 50.0
    base[5, :, 0], base[5, :, 3] = NAN, 50.0
    one = one.replaced(0, base).replaced(3, torch.zeros(VOCAB, 16))
    tokens = one.run()[0]
    assert tokens[:, 0].tolist() == [0, 9, 0, 0, VOCAB - 1, 3]
    assert torch.equal(run_onnx(one, torch.float32)[0], tokens)


@pytest.mark.parametrize("label", LABELS)
def test_functions_are_valid_and_complete(label: str) -> None:
    """Names and order of inputs, outputs and attributes are the declaration's; only ONNX's own domain is used
    while one rank computes."""
    one = example(label, torch.float32)
    function = one.op.onnx_function(one.values, torch.float32)
    assert list(function.input) == [s.name for s in one.op.inputs(one.values)]
    assert list(function.output) == [s.name for s in one.op.outputs(one.values)]
    assert set(function.attribute) == set(one.attributes)
    assert {o.domain for o in function.opset_import} == {""}
    assert {node.domain for node in function.node} == {""}


def test_bodies_across_ranks_need_tensorrt() -> None:
    """The gather of the TP bodies is TensorRT's; the sum is in rank order."""
    op = example("MhcAllReduce v4", torch.float32).op
    function = op.onnx_function(op.attributes_type(tp_size=4, norm_eps=1e-6, **UNQUANTIZED), torch.float16)
    assert {o.domain for o in function.opset_import} == {"", "trt"}
    sums = [list(node.input) for node in function.node if node.op_type == "Add" and node.output[0].startswith("sum")]
    assert sums == [["float0", "float1"], ["sum1", "float2"], ["sum2", "float3"]]
    assert "mailbox" in function.input
    assert isinstance(function, onnx.FunctionProto) and np.isfinite(len(function.node))
