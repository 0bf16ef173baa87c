"""The boundary's MXFP8 output on one GPU: bytes from the formats' definitions, on the normed rows that it wrote."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dspark_trt.plugins.kernels import launch
from dspark_trt.plugins.mhc_all_reduce import MHC_ALL_REDUCE, Attributes
from torch import Tensor

from tests.gpu.kernel_call import KernelCall, bits, call
from tests.gpu.test_mhc_kernels import DTYPES, Draw, boundary_inputs, over_dtypes
from tests.mxfp8 import mxfp8_bytes, swizzled_bytes, unsigned
from tests.op_examples import UNQUANTIZED

pytestmark = pytest.mark.gpu

PLAIN = {"tp_size": 1, "norm_eps": 1e-6, **UNQUANTIZED}


def tiles(rows: int, hidden: int) -> int:
    return -(-rows // 128) * -(-hidden // 128)


def assert_quantized(outputs: list[Tensor], tables: int) -> None:
    codes, scales = mxfp8_bytes(outputs[2])
    assert np.array_equal(unsigned(outputs[3]), codes)
    assert np.array_equal(unsigned(outputs[4]), scales)
    if tables:
        assert np.array_equal(unsigned(outputs[5]), swizzled_bytes(scales, tables))


@over_dtypes
@pytest.mark.parametrize("hidden", [32, 96, 160, 4096, 5120, 7168])
@pytest.mark.parametrize("rows", [1, 5, 129])
def test_bytes(rows: int, hidden: int, dtype: torch.dtype, seed: int) -> None:
    """HC-3: rows of less than a tile, of several; widths that fill no word or no block; the other outputs keep
    their bits, with and without the tables."""
    draw = Draw(seed)
    inputs = boundary_inputs(draw, rows, hidden, dtype)
    # Scales of many sizes, the floor among them.
    inputs[5] = (inputs[5].double() * 2.0 ** torch.linspace(-24, 6, hidden, device=inputs[5].device)).to(dtype)
    plain = call(MHC_ALL_REDUCE, inputs, **PLAIN)
    for tables in (0, tiles(rows, hidden), 2 * tiles(rows, hidden)):
        found = call(MHC_ALL_REDUCE, inputs, **{**PLAIN, "quant_width": hidden, "swizzled_tiles": tables})
        assert len(found) == (6 if tables else 5)
        for got, want in zip(found, plain, strict=False):
            assert torch.equal(bits(got), bits(want))
        assert_quantized(found, tables)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype: torch.dtype, seed: int) -> None:
    """TP-2: infinities and NaN make NaN of their own group, zeros keep their sign."""
    inputs = boundary_inputs(Draw(seed), 6, 256, dtype)
    weight = inputs[5]
    weight[3], weight[40], weight[70:96] = float("nan"), float("inf"), 0.0
    weight[96:128] = -0.0
    inputs[0][4, 5] = float("nan")  # the whole row
    found = call(MHC_ALL_REDUCE, inputs, **{**PLAIN, "quant_width": 256, "swizzled_tiles": 2})
    assert_quantized(found, 2)
    scales = unsigned(found[4])
    assert (scales[:, :2] == 0xFF).all() and (scales[4] == 0xFF).all() and (scales[0, 2:] < 0xFF).all()


@over_dtypes
def test_several_ranks_quantise_alike(dtype: torch.dtype, seed: int) -> None:
    """The same bytes after the mailbox: two ranks, played by streams."""
    from tests.gpu.test_mhc_mailbox import Ranks

    job = Ranks(2, 512, dtype)
    calls = []
    for rank, case in enumerate(job.cases("normal", seed, 7, residual=False)):
        attributes = {**PLAIN, "tp_size": 2, "quant_width": 512, "swizzled_tiles": 4}
        calls.append(KernelCall(MHC_ALL_REDUCE, case.fused.inputs, **attributes))
        assert calls[rank].inputs[-1] is job.tables[rank]
    torch.cuda.synchronize()
    for stream, one in zip(job.streams, calls, strict=True):
        with torch.cuda.stream(stream):
            one.launch()
    torch.cuda.synchronize()
    job.assert_at_rest(1)
    for one in calls:
        assert_quantized(one.outputs, 4)
        for got, want in zip(one.outputs, calls[0].outputs, strict=True):
            assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"quant_width": 128}, "shape or attribute"),
        ({"quant_width": -256}, "shape or attribute"),
        ({"quant_width": 0}, "shape or attribute"),  # tables of no scales
        ({"swizzled_tiles": 3}, "shape or attribute"),
        ({"swizzled_tiles": -2}, "shape or attribute"),
    ],
)
def test_refusals(changed: dict[str, int], reason: str, seed: int) -> None:
    """ENG-4, TP-6: nothing is launched, nothing is written."""
    one = KernelCall(
        MHC_ALL_REDUCE,
        boundary_inputs(Draw(seed), 3, 256, torch.bfloat16),
        **{**PLAIN, "quant_width": 256, "swizzled_tiles": 2},
    )
    attributes = Attributes(**{**PLAIN, "quant_width": 256, "swizzled_tiles": 2, **changed})
    with pytest.raises(RuntimeError, match=reason):
        launch(one.op, attributes, one.activation, one.sizes, one.pointers, 256, 0)
    for sizes in ({"rows": 129}, {"H": 248}):
        with pytest.raises(RuntimeError, match="shape or attribute"):
            launch(one.op, one.attributes, one.activation, {**one.sizes, **sizes}, one.pointers, 256, 0)
    for name in ("codes", "scales", "swizzled_scales"):
        with pytest.raises(RuntimeError, match="null or not aligned"):
            launch(one.op, one.attributes, one.activation, one.sizes, {**one.pointers, name: 0}, 256, 0)
    torch.cuda.synchronize()
    assert all((bits(t) == -1).all() for t in one.outputs)
