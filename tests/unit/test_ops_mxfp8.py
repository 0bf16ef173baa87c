"""The boundary's MXFP8 output: bytes from the formats' definitions, scale layouts, special values, refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dspark_trt.builder.engine import build_engine
from dspark_trt.plugins.mhc_all_reduce import MHC_ALL_REDUCE, Attributes, quantized_outputs
from dspark_trt.plugins.numerics import act_quant_dequant, decode_e4m3, decode_e8m0, quantized_matmul
from dspark_trt.plugins.op import OpError
from dspark_trt.plugins.quantized_linear import QUANTIZED_LINEAR
from dspark_trt.plugins.tensorrt_api import TensorRT
from torch import Tensor

from tests.mxfp8 import mxfp8_bytes, swizzled_bytes, unsigned
from tests.one_op_models import one_op_model, profile_of, save
from tests.op_examples import Example, run_onnx

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
activations = pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda d: str(d).removeprefix("torch."))


def quantize(normed: Tensor, tiles: int = 0) -> tuple[Tensor, ...]:
    attributes = Attributes(tp_size=1, norm_eps=1e-6, quant_width=normed.shape[1], swizzled_tiles=tiles)
    return quantized_outputs(normed, attributes)


def boundary(rows: int, hidden: int, activation: torch.dtype, *, tiles: int = 0, seed: int = 0) -> Example:
    """A boundary whose norm weights spread the scales over 40 binades, beyond the floor of the amax."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weight = normal(hidden) * torch.exp2(torch.linspace(-24, 12, hidden))
    tensors = (normal(rows, hidden), normal(rows, 4, hidden), *(normal(rows, *n).abs() for n in ((4,), (4, 4), (4,))))
    acts = [t.to(activation) if i < 2 else t for i, t in enumerate(tensors)]
    attributes = {"tp_size": 1, "norm_eps": 1e-20, "quant_width": hidden, "swizzled_tiles": tiles}
    return Example("", MHC_ALL_REDUCE, attributes, (*acts, weight.to(activation)))


@pytest.mark.parametrize(
    ("amax", "byte"), [(448.0, 127), (449.0, 128), (224.0, 126), (300.0, 127), (1e-4, 105), (3.0, 120), (0.0, 105)]
)
def test_scale_byte_is_the_exponent_of_the_next_power_of_two(amax: float, byte: int) -> None:
    """Spec 8.1: 1, 2, .5, 1, 2^-22, 2^-7; nothing is smaller than the floor's."""
    _, scales = quantize(torch.tensor([[amax] + [0.0] * 31]))
    assert unsigned(scales).tolist() == [[byte]]


def test_golden_group() -> None:
    """Spec 8.1: codes 384, 1.25, -128, 40 at scale 2^-7; zeros keep their sign, what underflows too."""
    values = [3.0, 0.01, -1.0, 0.3, 0.0, -0.0, 1e-9, -1e-9]
    codes, scales = quantize(torch.tensor([values + [0.0] * 24]))
    assert unsigned(codes)[0, :8].tolist() == [0x7C, 0x3A, 0xF0, 0x62, 0x00, 0x80, 0x00, 0x80]
    assert not unsigned(codes)[0, 8:].any() and unsigned(scales).tolist() == [[120]]


@activations
@pytest.mark.parametrize("hidden", [32, 160, 256])
def test_bytes_equal_the_formats(hidden: int, activation: torch.dtype) -> None:
    """All bytes, over forty binades of scales; the other outputs are those of the boundary without."""
    one = boundary(40, hidden, activation)
    found = one.run()
    codes, scales = mxfp8_bytes(found[2])
    assert np.array_equal(unsigned(found[3]), codes) and np.array_equal(unsigned(found[4]), scales)
    assert len(np.unique(scales)) > 3
    plain = dataclasses.replace(one, attributes={**one.attributes, "quant_width": 0}).run()
    assert len(plain) == 3
    for part, whole in zip(plain, found, strict=False):
        assert torch.equal(part, whole)


def test_codes_are_what_a_quantised_product_multiplies() -> None:
    """The released FP8 linear gives the same bits from the codes as from the rows that it would quantise itself."""
    one = boundary(9, 128, torch.bfloat16)
    normed, codes, scales = one.run()[2:]
    values = decode_e4m3(codes).unflatten(-1, (-1, 32)) * decode_e8m0(scales).unsqueeze(-1)
    assert torch.equal(values.flatten(-2), act_quant_dequant(normed.float(), 32))
    weight = torch.arange(64 * 128).reshape(64, 128).remainder(120).to(torch.int8)
    scale = torch.full((2, 4), 120, dtype=torch.int8)
    wanted = QUANTIZED_LINEAR(normed, weight, scale, block=32)
    row_scale = decode_e8m0(scale).repeat_interleave(32, 0)
    found = quantized_matmul(values.flatten(-2), decode_e4m3(weight), row_scale, group=32, block=32)
    assert torch.equal(found.to(torch.bfloat16), wanted)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@activations
def test_what_is_not_finite_is_nan_in_its_group_alone(activation: torch.dtype, poison: float) -> None:
    """TP-2, CK-6: scale byte 255 and codes 0x7F, whatever else the group holds; every other byte stays."""
    normed = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).to(activation)
    clean_codes, clean_scales = map(unsigned, quantize(normed))
    normed[1, 40] = poison
    codes, scales = quantize(normed)
    wanted_codes, wanted_scales = clean_codes.copy(), clean_scales.copy()
    wanted_codes[1, 32:64], wanted_scales[1, 1] = 0x7F, 0xFF
    assert np.array_equal(unsigned(codes), wanted_codes) and np.array_equal(unsigned(scales), wanted_scales)
    values = decode_e4m3(codes).unflatten(-1, (-1, 32)) * decode_e8m0(scales).unsqueeze(-1)
    assert values[1, 1].isnan().all() and int(values.isnan().sum()) == 32


def test_nan_of_every_sign_and_payload() -> None:
    """TP-2: no NaN gets past as a finite code."""
    bits = torch.tensor([0x7FC0, 0xFFC0 - 65536, 0x7F81, 0xFFFF - 65536], dtype=torch.int16)
    normed = torch.ones(4, 32, dtype=torch.bfloat16)
    normed[:, 31] = bits.view(torch.bfloat16)
    codes, scales = quantize(normed)
    assert (unsigned(codes) == 0x7F).all() and (unsigned(scales) == 0xFF).all()


def test_largest_finite_values_stay_finite() -> None:
    for activation in ACTIVATIONS:
        normed = torch.full((1, 32), torch.finfo(activation).max, dtype=activation)
        codes, scales = mxfp8_bytes(normed)
        found = quantize(normed)
        assert np.array_equal(unsigned(found[0]), codes) and np.array_equal(unsigned(found[1]), scales)
        assert codes.max() < 0x7F and scales.max() < 0xFF


@pytest.mark.parametrize("hidden", [32, 96, 128, 160, 5120])
@pytest.mark.parametrize("rows", [1, 5, 31, 33, 127, 128, 129, 200])
def test_swizzled_layout(rows: int, hidden: int) -> None:
    """Spec 7.2's offsets; rows and groups that are missing are zero, so are tiles that no row reaches."""
    normed = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(rows)) * 100
    normed *= torch.exp2(torch.arange(rows) % 30 - 20.0).unsqueeze(1)
    least = -(-rows // 128) * -(-hidden // 128)
    for tiles in (least, 3 * least):
        _, scales, swizzled = quantize(normed, tiles)
        assert np.array_equal(unsigned(swizzled), swizzled_bytes(unsigned(scales), tiles))


def test_outputs_follow_the_attributes() -> None:
    outputs = {}
    for width, tiles in ((0, 0), (128, 0), (128, 2)):
        attributes = Attributes(tp_size=1, norm_eps=1e-6, quant_width=width, swizzled_tiles=tiles)
        outputs[width, tiles] = {s.name: s.dims for s in MHC_ALL_REDUCE.outputs(attributes)}
    assert list(outputs[0, 0]) == ["streams_out", "hidden", "normed"]
    assert list(outputs[128, 0]) == [*outputs[0, 0], "codes", "scales"] and outputs[128, 0]["scales"] == ("rows", 4)
    assert list(outputs[128, 2]) == [*outputs[128, 0], "swizzled_scales"]
    assert outputs[128, 2]["swizzled_scales"] == (2, 512)


@pytest.mark.parametrize(
    ("hidden", "changed", "message"),
    [
        (256, {"quant_width": 128}, "quant_width is 128, expected 0 or the 256 channels"),
        (256, {"quant_width": -1}, "quant_width is -1, expected 0 or the 256 channels"),
        (48, {}, "rows have 48 channels, MXFP8 needs a multiple of 32"),
        (256, {"swizzled_tiles": 3}, "swizzled_tiles is 3, expected 0 or a multiple of the 2 that"),
        (256, {"swizzled_tiles": -2}, "swizzled_tiles is -2, expected 0 or"),
        (256, {"quant_width": 0, "swizzled_tiles": 2}, "swizzled_tiles is 2 and quant_width 0, expected no tiles"),
    ],
)
def test_refusals(hidden: int, changed: dict[str, int], message: str) -> None:
    """ENG-4: both numbers in the message."""
    one = boundary(3, hidden, torch.bfloat16)
    with pytest.raises(OpError, match=f"^MhcAllReduce: {message}"):
        one.op(*one.tensors, **{**one.attributes, **changed})


def test_more_rows_than_the_tiles_hold_are_refused() -> None:
    """TP-6: no clamping."""
    one = boundary(129, 32, torch.bfloat16, tiles=1)
    assert one.rows(slice(0, 128)).run()[5].shape == (1, 512)
    with pytest.raises(OpError, match="129 rows, swizzled_tiles = 1 holds the scales of 128"):
        one.run()


@pytest.mark.parametrize(("rows", "hidden"), [(1, 32), (5, 160), (130, 96)])
@pytest.mark.parametrize("activation", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_body_writes_the_bytes_of_its_own_normed_rows(activation: torch.dtype, rows: int, hidden: int) -> None:
    """In ONNX Runtime, both layouts, with NaN and infinite groups: bit-equal to the formats."""
    one = boundary(rows, hidden, activation, tiles=2 * -(-hidden // 128), seed=3)
    weight = one.tensors[5].clone()
    weight[-1] = torch.inf
    one = one.replaced(5, weight)
    if rows > 1:
        partial = one.tensors[0].clone()
        partial[1, 0] = torch.nan
        one = one.replaced(0, partial)
    found = run_onnx(one, activation)
    codes, scales = mxfp8_bytes(found[2])
    assert np.array_equal(unsigned(found[3]), codes) and np.array_equal(unsigned(found[4]), scales)
    assert (scales[:, -1] == 0xFF).all() and (hidden == 32 or (scales[0, :-1] != 0xFF).all())
    assert np.array_equal(unsigned(found[5]), swizzled_bytes(scales, one.attributes["swizzled_tiles"]))


def test_body_codes_every_e4m3_value() -> None:
    """All 254 finite codes, through the arithmetic that stands for the missing bit cast."""
    generator, rows = torch.Generator().manual_seed(5), 4000
    sizes = torch.exp2(-20 * torch.rand(rows, 32, generator=generator))
    partial = torch.where(torch.rand(rows, 32, generator=generator) < 0.5, sizes, -sizes)
    ones = torch.ones(rows, 4)
    tensors = (partial, torch.zeros(rows, 4, 32), ones, torch.zeros(rows, 4, 4), ones / 4, torch.ones(32))
    attributes: dict[str, Any] = {"tp_size": 1, "norm_eps": 1e-20, "quant_width": 32, "swizzled_tiles": 0}
    found = run_onnx(Example("", MHC_ALL_REDUCE, attributes, tensors), torch.float32)
    codes, _ = mxfp8_bytes(found[2])
    assert np.array_equal(unsigned(found[3]), codes)
    assert len(np.unique(codes)) == 254


def test_a_plan_with_the_outputs_builds(api: TensorRT, tmp_path: Path) -> None:
    """Six outputs behind one plugin node, their types and shapes by inference."""
    model = one_op_model("MhcAllReduce", "bfloat16", quant_width=128, swizzled_tiles=1)
    built = build_engine(
        save(model, tmp_path / "boundary.onnx"),
        api=api,
        lowering="plugin",
        profiles=[profile_of(model)],
        expected_plugin_layers={"MhcAllReduce": 1},
    )
    assert built
