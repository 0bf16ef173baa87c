"""The mHC kernels on one GPU against float64 arithmetic written here, on fresh random data.

Each rounding step is compared on the kernel's own inputs to it: the collapse on the streams that the kernel
wrote, the norm on the hidden rows that it wrote. So the bounds are those of one rounding.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dspark_trt.plugins.hc_collapse import HC_COLLAPSE
from dspark_trt.plugins.kernels import launch
from dspark_trt.plugins.mhc_all_reduce import MHC_ALL_REDUCE, MHC_ALL_REDUCE_RESIDUAL_ONLY
from dspark_trt.plugins.mhc_coefficients import MHC_COEFFICIENTS, sum_over_streams
from dspark_trt.plugins.op import Op
from torch import Tensor

from tests.gpu.kernel_call import KernelCall, bits, call, capture
from tests.op_examples import UNQUANTIZED

pytestmark = pytest.mark.gpu

ROWS = (*range(1, 17), 31, 33, 40, 64, 127, 129, 256)
MOST = max(ROWS)
HIDDEN = (256, 4096, 5120, 7168)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
"""Largest relative error of one rounding."""
SMALLEST = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float32: 2.0**-150}
"""Half a step of the subnormal numbers."""
COEFFICIENTS = {"rms_eps": 1e-20, "hc_eps": 1e-6, "sinkhorn_iters": 20}
over_sizes = pytest.mark.parametrize("hidden", HIDDEN)
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


class Draw:
    """Random tensors on the GPU."""

    def __init__(self, seed: int):
        self.generator = torch.Generator("cuda").manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> Tensor:
        return (torch.randn(shape, device="cuda", generator=self.generator) * size).to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, device="cuda", generator=self.generator)


def assert_rounded(got: Tensor, exact: Tensor, terms: Tensor, what: str) -> None:
    """``got`` is ``exact`` rounded once, after float32 sums of values as large as ``terms``."""
    assert not got.isnan().any(), f"{what}: not written, or NaN"
    bound = HALF_ULP[got.dtype] * exact.abs() + 2.0**-21 * terms + SMALLEST[got.dtype]
    error = (got.double() - exact).abs()
    worst = (error / bound).max().item()
    assert worst <= 1, f"{what}: {worst:.3g} times the bound of one rounding"


def coefficient_inputs(draw: Draw, rows: int, hidden: int, dtype: torch.dtype, size: float = 1.0) -> list[Tensor]:
    return [
        draw.normal(rows, 4, hidden, dtype=dtype, size=size),
        draw.normal(24, 4 * hidden, size=2 / math.sqrt(4 * hidden)),
        draw.uniform(3) + 0.5,
        draw.normal(24),
    ]


def coefficients64(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rms_eps: float, hc_eps: float, sinkhorn_iters: int
) -> tuple[Tensor, ...]:
    """Spec 3.3 step by step in float64."""
    u = streams.double().flatten(1)
    m = (u @ fn.double().T) / (u.square().mean(1, keepdim=True) + rms_eps).sqrt()
    pre = 1 / (1 + (-(m[:, 0:4] * scale[0].double() + base[0:4].double())).exp()) + hc_eps
    post = 2 / (1 + (-(m[:, 4:8] * scale[1].double() + base[4:8].double())).exp())
    logits = (m[:, 8:24] * scale[2].double() + base[8:24].double()).view(-1, 4, 4)
    k = (logits - logits.amax(2, keepdim=True)).exp()
    k = k / k.sum(2, keepdim=True) + hc_eps
    k = k / (k.sum(1, keepdim=True) + hc_eps)
    for _ in range(sinkhorn_iters - 1):
        k = k / (k.sum(2, keepdim=True) + hc_eps)
        k = k / (k.sum(1, keepdim=True) + hc_eps)
    return pre, post, k


def assert_coefficients(got: list[Tensor], want: tuple[Tensor, ...]) -> None:
    for name, g, w in zip(("pre", "post", "comb"), got, want, strict=True):
        assert not g.isnan().any(), f"{name}: not written, or NaN"
        worst = ((g.double() - w).abs() / (1e-5 + 1e-4 * w.abs())).max().item()
        assert worst <= 1, f"{name}: {worst:.3g} times 1e-5 + 1e-4 |x| (spec 8.2)"


def assert_rows_independent(op: Op, inputs: list[Tensor], by_row: tuple[int, ...], whole: list[Tensor], **attrs: Any):
    """HC-3, HC-7: every row count, and single rows, give the bits of the largest batch; no rows are no call."""
    for first, rows in [*((0, n) for n in ROWS), *((i, 1) for i in (1, 6, 100, MOST - 1)), (3, 5), (0, 0)]:
        part = [t[first : first + rows].contiguous() if i in by_row else t for i, t in enumerate(inputs)]
        for got, want in zip(call(op, part, **attrs), whole, strict=True):
            assert torch.equal(bits(got), bits(want[first : first + rows])), f"rows {first} to {first + rows}"


@over_sizes
@over_dtypes
def test_coefficients(dtype: torch.dtype, hidden: int, seed: int) -> None:
    """HC-3, HC-7, HC-8, GR-6."""
    # Size 30: streams of a real model are far from unit norm, which a wrong normaliser would hide behind.
    inputs = coefficient_inputs(Draw(seed), MOST, hidden, dtype, size=30)
    whole = call(MHC_COEFFICIENTS, inputs, **COEFFICIENTS)
    assert_coefficients(whole, coefficients64(*inputs, **COEFFICIENTS))
    assert_rows_independent(MHC_COEFFICIENTS, inputs, (0,), whole, **COEFFICIENTS)


@pytest.mark.parametrize("hidden", [64, 320, *HIDDEN])
@over_dtypes
def test_coefficients_of_equal_streams(dtype: torch.dtype, hidden: int, seed: int) -> None:
    """HC-3, HC-7, HC-8: the first sublayer's shortcut is the general path on four copies; the last slice of 256
    channels may be a part. The other three streams are not read."""
    streams, fn, scale, base = coefficient_inputs(Draw(seed), MOST, hidden, dtype, size=30)
    streams = streams[:, :1].expand(-1, 4, -1).contiguous()
    inputs = [streams, sum_over_streams(fn), scale, base]
    whole = call(MHC_COEFFICIENTS, inputs, **COEFFICIENTS)
    assert_coefficients(whole, coefficients64(streams, fn, scale, base, **COEFFICIENTS))
    assert_rows_independent(MHC_COEFFICIENTS, inputs, (0,), whole, **COEFFICIENTS)
    streams[:, 1:] = float("nan")
    for got, want in zip(call(MHC_COEFFICIENTS, inputs, **COEFFICIENTS), whole, strict=True):
        assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("hidden", [512, 768, 1280, 2304, 8192, 16384])
def test_coefficients_of_other_widths(hidden: int, seed: int) -> None:
    """Multiples of 256 that no released model has: slices of channels that don't fill the last round of blocks."""
    for dtype in DTYPES:
        inputs = coefficient_inputs(Draw(seed), 9, hidden, dtype, size=30)
        whole = call(MHC_COEFFICIENTS, inputs, **COEFFICIENTS)
        assert_coefficients(whole, coefficients64(*inputs, **COEFFICIENTS))
        alone = call(MHC_COEFFICIENTS, [inputs[0][4:5].contiguous(), *inputs[1:]], **COEFFICIENTS)
        for got, want in zip(alone, whole, strict=True):
            assert torch.equal(bits(got), bits(want[4:5]))


@pytest.mark.parametrize(("hc_eps", "iterations"), [(1e-6, 1), (1e-2, 20), (1e-6, 3)])
def test_coefficients_eps_and_rounds(hc_eps: float, iterations: int, seed: int) -> None:
    """HC-1: eps is added to each sum, not to each quotient."""
    attributes = {"rms_eps": 1e-6, "hc_eps": hc_eps, "sinkhorn_iters": iterations}
    inputs = coefficient_inputs(Draw(seed), 9, 512, torch.bfloat16)
    inputs[3][8:12] = torch.tensor([-40.0, -40.0, -40.0, 40.0])  # a column that is nearly empty
    assert_coefficients(call(MHC_COEFFICIENTS, inputs, **attributes), coefficients64(*inputs, **attributes))


def test_coefficients_of_extreme_logits(seed: int) -> None:
    """HC-2: large logits stay finite, and NaN stays in its row."""
    inputs = coefficient_inputs(Draw(seed), 7, 256, torch.float32)
    inputs[3][:] = torch.linspace(-1e4, 1e4, 24)
    clean = call(MHC_COEFFICIENTS, inputs, **COEFFICIENTS)
    assert_coefficients(clean, coefficients64(*inputs, **COEFFICIENTS))
    inputs[0][3, 2, 17] = float("nan")
    for got, want in zip(call(MHC_COEFFICIENTS, inputs, **COEFFICIENTS), clean, strict=True):
        assert got[3].isnan().all()
        keep = torch.arange(7, device="cuda") != 3
        assert torch.equal(bits(got[keep]), bits(want[keep]))


def test_more_rows_than_the_workspace_holds(seed: int) -> None:
    """Long prefills go through the workspace in turns."""
    inputs = coefficient_inputs(Draw(seed), 2500, 256, torch.bfloat16)
    assert_coefficients(call(MHC_COEFFICIENTS, inputs, **COEFFICIENTS), coefficients64(*inputs, **COEFFICIENTS))


def boundary_inputs(draw: Draw, rows: int, hidden: int, dtype: torch.dtype) -> list[Tensor]:
    """partial, streams, post, comb, pre, norm_weight; comb far from symmetric (HC-4)."""
    return [
        draw.normal(rows, hidden, dtype=dtype),
        draw.normal(rows, 4, hidden, dtype=dtype, size=3),
        2 * draw.uniform(rows, 4),
        draw.uniform(rows, 4, 4),
        draw.uniform(rows, 4),
        draw.normal(hidden, dtype=dtype),
    ]


def assert_mixed(got: Tensor, partial: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> None:
    spread = post.double().unsqueeze(2) * partial.double().unsqueeze(1)
    carried = torch.einsum("njk,njh->nkh", comb.double(), streams.double())
    terms = spread.abs() + torch.einsum("njk,njh->nkh", comb.double(), streams.double().abs())
    assert_rounded(got, spread + carried, terms, "streams_out")


def assert_collapsed(got: Tensor, streams: Tensor, pre: Tensor) -> None:
    weighted = pre.double().unsqueeze(2) * streams.double()
    assert_rounded(got, weighted.sum(1), weighted.abs().sum(1), "hidden")


@over_sizes
@over_dtypes
def test_boundary(dtype: torch.dtype, hidden: int, seed: int) -> None:
    """HC-3, HC-4, HC-7."""
    inputs = boundary_inputs(Draw(seed), MOST, hidden, dtype)
    partial, streams, post, comb, pre, weight = inputs
    attributes = {"tp_size": 1, "norm_eps": 1e-6, **UNQUANTIZED}
    whole = call(MHC_ALL_REDUCE, inputs, **attributes)
    mixed, collapsed, normed = whole
    assert_mixed(mixed, partial, streams, post, comb)
    assert_collapsed(collapsed, mixed, pre)
    z = collapsed.double()
    exact = weight.double() * z / (z.square().mean(1, keepdim=True) + 1e-6).sqrt()
    assert_rounded(normed, exact, 2 * exact.abs(), "normed")
    assert_rows_independent(MHC_ALL_REDUCE, inputs, (0, 1, 2, 3, 4), whole, **attributes)

    (residual,) = call(MHC_ALL_REDUCE_RESIDUAL_ONLY, inputs[:4], tp_size=1)
    assert torch.equal(bits(residual), bits(mixed))
    assert_rows_independent(MHC_ALL_REDUCE_RESIDUAL_ONLY, inputs[:4], (0, 1, 2, 3), [residual], tp_size=1)
    (again,) = call(HC_COLLAPSE, [mixed, pre])
    assert torch.equal(bits(again), bits(collapsed))
    assert_rows_independent(HC_COLLAPSE, [mixed, pre], (0, 1), [again])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_streams_and_hidden_have_the_reference_bits(dtype: torch.dtype, seed: int) -> None:
    """The rounding order is the reference's, not only as good."""
    inputs = boundary_inputs(Draw(seed), 5, 5120, dtype)
    attributes = {"tp_size": 1, "norm_eps": 1e-6, **UNQUANTIZED}
    want = MHC_ALL_REDUCE(*(t.cpu() for t in inputs), **attributes)
    got = call(MHC_ALL_REDUCE, inputs, **attributes)
    for g, w in zip(got[:2], want[:2], strict=True):
        assert torch.equal(bits(g.cpu()), bits(w))


@pytest.mark.parametrize("hidden", [64, 1032, 8192, 8200, 16384, 32768])
def test_boundary_of_other_widths(hidden: int, seed: int) -> None:
    """One block, idle threads in the last block, full clusters, larger blocks."""
    inputs = boundary_inputs(Draw(seed), 3, hidden, torch.bfloat16)
    mixed, collapsed, normed = call(MHC_ALL_REDUCE, inputs, tp_size=1, norm_eps=1e-20, **UNQUANTIZED)
    assert_mixed(mixed, *inputs[:4])
    assert_collapsed(collapsed, mixed, inputs[4])
    z = collapsed.double()
    exact = inputs[5].double() * z / z.square().mean(1, keepdim=True).sqrt()
    assert_rounded(normed, exact, 2 * exact.abs(), "normed")


def test_one_hot_pre_takes_its_stream_as_it_is(seed: int) -> None:
    draw = Draw(seed)
    streams = draw.normal(4, 4, 5120, dtype=torch.bfloat16)
    (hidden,) = call(HC_COLLAPSE, [streams, torch.eye(4, device="cuda")])
    assert torch.equal(hidden, streams[torch.arange(4), torch.arange(4)])


def every_call(draw: Draw, rows: int, hidden: int, dtype: torch.dtype) -> list[KernelCall]:
    inputs = boundary_inputs(draw, rows, hidden, dtype)
    return [
        KernelCall(MHC_COEFFICIENTS, coefficient_inputs(draw, rows, hidden, dtype), **COEFFICIENTS),
        KernelCall(MHC_ALL_REDUCE, inputs, tp_size=1, norm_eps=1e-6, **UNQUANTIZED),
        KernelCall(MHC_ALL_REDUCE_RESIDUAL_ONLY, inputs[:4], tp_size=1),
        KernelCall(HC_COLLAPSE, [inputs[1], inputs[4]]),
    ]


@over_dtypes
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_replays_give_the_eager_bits(rows: int, dtype: torch.dtype, seed: int) -> None:
    """GR-1, GR-2, GR-4: captured under the strictest mode (an allocation or synchronisation would end it),
    replayed on data that the capture never saw."""
    draw = Draw(seed)
    calls = every_call(draw, rows, 5120, dtype)
    for one in calls:
        one.run()
    graph, nodes = capture(*calls)
    assert nodes == 1 + len(calls)  # the coefficients are two kernels
    for _ in range(3):
        for one in calls:
            varying = one.inputs[:1] if one.op is MHC_COEFFICIENTS else one.inputs[:2]
            for tensor in varying:
                tensor.copy_(draw.normal(*tensor.shape, dtype=tensor.dtype))
            one.poison()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        replayed = [[t.clone() for t in one.outputs] for one in calls]
        for one, outputs in zip(calls, replayed, strict=True):
            one.poison()
            for got, want in zip(outputs, one.run(), strict=True):
                assert torch.equal(bits(got), bits(want)), one.op.name


def test_a_chain_reads_what_the_kernel_before_it_wrote(seed: int) -> None:
    """A kernel may start before its predecessor ends: nothing but constants may be read that early."""
    draw = Draw(seed)
    rows, hidden, dtype = 5, 5120, torch.bfloat16
    parameters = coefficient_inputs(draw, rows, hidden, dtype)[1:]
    inputs = boundary_inputs(draw, rows, hidden, dtype)
    calls: list[KernelCall] = []
    for _ in range(40):
        boundary = KernelCall(MHC_ALL_REDUCE, inputs, tp_size=1, norm_eps=1e-6, **UNQUANTIZED)
        coefficients = KernelCall(MHC_COEFFICIENTS, [boundary.outputs[0], *parameters], **COEFFICIENTS)
        pre, post, comb = coefficients.outputs
        collapsed = KernelCall(HC_COLLAPSE, [boundary.outputs[0], pre])
        calls += [boundary, coefficients, collapsed]
        inputs = [boundary.outputs[2], boundary.outputs[0], post, comb, pre, inputs[5]]
    alone = [[t.clone() for t in one.run()] for one in calls]
    graph, _ = capture(*calls)
    for attempt in range(20):
        for one in calls:
            one.poison()
        torch.cuda.synchronize()
        if attempt % 2:
            graph.replay()
        else:
            for one in calls:
                one.launch()
        torch.cuda.synchronize()
        for i, (one, want) in enumerate(zip(calls, alone, strict=True)):
            for got, expected in zip(one.outputs, want, strict=True):
                assert torch.equal(bits(got), bits(expected)), f"{one.op.name}, place {i} of the chain"


def refused(one: KernelCall, reason: str, *, sizes: dict[str, int] | None = None, **changes: Any) -> None:
    """The call with changed sizes, attributes or pointers raises ``reason`` and writes nothing."""
    fields = {f: changes.pop(f) for f in list(changes) if hasattr(one.attributes, f)}
    attributes = type(one.attributes)(**{**vars(one.attributes), **fields})
    pointers = {**one.pointers, **changes}
    stream = torch.cuda.current_stream().cuda_stream
    with pytest.raises(RuntimeError, match=reason):
        launch(one.op, attributes, one.activation, {**one.sizes, **(sizes or {})}, pointers, 256, stream)
    torch.cuda.synchronize()
    assert all((bits(t) == -1).all() for t in one.outputs)


def test_refusals(seed: int) -> None:
    """ENG-4, TP-6, TP-12: what the kernels were not built for is an error on the host, and nothing is written."""
    coefficients, boundary, residual, collapse = every_call(Draw(seed), 3, 256, torch.bfloat16)
    shape, pointer = "shape or attribute", "null or not aligned"
    refused(coefficients, shape, sizes={"K": 1028})
    refused(coefficients, shape, sizes={"K": 512})
    refused(coefficients, shape, sizes={"H": 200, "K": 800})
    refused(coefficients, shape, sinkhorn_iters=0)
    refused(coefficients, pointer, streams=0)
    refused(coefficients, pointer, fn=coefficients.pointers["fn"] + 4)
    for one in (boundary, residual, collapse):
        refused(one, shape, sizes={"H": 252})
        refused(one, shape, sizes={"rows": -1})
        refused(one, pointer, streams=one.pointers["streams"] + 2)
    for one in (boundary, residual):
        refused(one, shape, tp_size=3, sizes={"P": 3})
        refused(one, shape, tp_size=2, sizes={"P": 4})
        refused(one, pointer, tp_size=2, sizes={"P": 2}, mailbox=0)
        refused(one, "more rows than the mailbox holds", tp_size=2, sizes={"P": 2, "rows": 257})
        refused(one, pointer, partial=0)
    refused(boundary, pointer, norm_weight=0)
    refused(boundary, shape, sizes={"H": 32768 + 8})
    refused(residual, shape, tp_size=2, sizes={"P": 2, "H": 32768 + 8}, mailbox=256)
