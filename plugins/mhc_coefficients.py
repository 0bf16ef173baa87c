"""MhcCoefficients: pre, post and comb of a sublayer, from the streams that enter it (spec 3.3).

The four streams of a row are flattened, their RMS statistic and 24 projections are taken, and the
projections become ``pre`` (sigmoid + eps, collapses the streams), ``post`` (2 * sigmoid, spreads the
sublayer's output) and ``comb`` (source x target, made nearly doubly stochastic by Sinkhorn rounds that
end on the columns).

The first sublayer of a network allows a shortcut (spec 3.4): embedded rows enter it as four equal streams, so
projecting all four with fn equals projecting one with the sum of fn's four parts, and the mean square of one equals
that of all. A call that passes this sum (:func:`sum_over_streams`, [24, H]) in place of fn [24, 4H] states that the
streams are equal: only the first is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .numerics import pointwise
from .op import Op, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Attributes:
    rms_eps: float
    """Added to the mean square of the 4H stream values."""
    hc_eps: float
    """Added to ``pre`` and used by every Sinkhorn step."""
    sinkhorn_iters: int


class MhcCoefficients(Op):
    name = "MhcCoefficients"
    attributes_type = Attributes
    all_inputs = (
        TensorSpec("streams", "T", ("rows", 4, "H")),
        TensorSpec("fn", "float32", (24, "K")),
        TensorSpec("scale", "float32", (3,)),
        TensorSpec("base", "float32", (24,)),
    )
    all_outputs = (
        TensorSpec("pre", "float32", ("rows", 4)),
        TensorSpec("post", "float32", ("rows", 4)),
        TensorSpec("comb", "float32", ("rows", 4, 4)),
    )

    def size_problem(self, attributes: Attributes, sizes: Mapping[str, Any]) -> str:
        columns, one = sizes["K"], sizes["H"]
        if columns in (4 * one, one):
            return ""
        return f"fn has {columns} columns, expected {4 * one}, or {one} where the four streams are equal"

    def reference(
        self, attributes: Attributes, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor
    ) -> tuple[Tensor, ...]:
        eps = attributes.hc_eps
        mixes = project_streams(streams, fn, attributes.rms_eps)
        pre = pointwise(torch.sigmoid, mixes[:, :4] * scale[0] + base[:4]) + eps
        post = 2 * pointwise(torch.sigmoid, mixes[:, 4:8] * scale[1] + base[4:8])
        comb = (mixes[:, 8:] * scale[2] + base[8:]).unflatten(-1, (4, 4))
        comb = torch.softmax(comb, -1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(attributes.sinkhorn_iters - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return pre, post, comb

    def onnx_body(self, attributes: Attributes, cast: str) -> str:
        # Sinkhorn sums are products with ones: TensorRT-RTX takes exponential time on k / ReduceSum(k).
        text = f"""
            last = Constant<value = int64[1] {{1}}>()
            flat_shape = Constant<value = int64[2] {{0, -1}}>()
            float_streams = Cast<to=1>(streams)
            all_flat = Reshape(float_streams, flat_shape)
            zero = Constant<value = int64[1] {{0}}>()
            fn_shape = Shape(fn)
            columns = Gather(fn_shape, last)
            flat = Slice(all_flat, zero, columns, last)
            square = Mul(flat, flat)
            mean = ReduceMean<keepdims=1>(square, last)
            rms_eps = Constant<value = float {{{attributes.rms_eps!r}}}>()
            shifted = Add(mean, rms_eps)
            rms = Sqrt(shifted)
            fn_t = Transpose<perm=[1, 0]>(fn)
            projected = MatMul(flat, fn_t)
            mixes = Div(projected, rms)
            parts = Constant<value = int64[3] {{4, 4, 16}}>()
            ones3 = Constant<value = int64[3] {{1, 1, 1}}>()
            pre_mix, post_mix, comb_mix = Split<axis=1>(mixes, parts)
            pre_base, post_base, comb_base = Split<axis=0>(base, parts)
            pre_scale, post_scale, comb_scale = Split<axis=0>(scale, ones3)
            hc_eps = Constant<value = float {{{attributes.hc_eps!r}}}>()
            pre_scaled = Mul(pre_mix, pre_scale)
            pre_logit = Add(pre_scaled, pre_base)
            pre_sigmoid = Sigmoid(pre_logit)
            pre = Add(pre_sigmoid, hc_eps)
            post_scaled = Mul(post_mix, post_scale)
            post_logit = Add(post_scaled, post_base)
            post_sigmoid = Sigmoid(post_logit)
            two = Constant<value = float {{2.0}}>()
            post = Mul(post_sigmoid, two)
            comb_scaled = Mul(comb_mix, comb_scale)
            comb_logit = Add(comb_scaled, comb_base)
            square_shape = Constant<value = int64[3] {{-1, 4, 4}}>()
            comb_square = Reshape(comb_logit, square_shape)
            comb_softmax = Softmax<axis=2>(comb_square)
            k0 = Add(comb_softmax, hc_eps)
            row_ones = Constant<value = float[4, 1] {{1, 1, 1, 1}}>()
            column_ones = Constant<value = float[1, 4] {{1, 1, 1, 1}}>()
        """
        steps = ["column"] + ["row", "column"] * (attributes.sinkhorn_iters - 1)
        for i, step in enumerate(steps):
            product = f"MatMul(k{i}, row_ones)" if step == "row" else f"MatMul(column_ones, k{i})"
            result = "comb" if i + 1 == len(steps) else f"k{i + 1}"
            text += f"""
            sum{i} = {product}
            divisor{i} = Add(sum{i}, hc_eps)
            {result} = Div(k{i}, divisor{i})
            """
        return text


def project_streams(streams: Tensor, fn: Tensor, rms_eps: float) -> Tensor:
    """``(fn . u) * rsqrt(mean(u^2) + eps)``, [rows, fn rows] float32; u are the flattened streams, or the first of
    them if fn [.., H] is summed over equal ones."""
    if fn.shape[1] == streams.shape[2]:
        streams = streams[:, :1]
    flat = streams.float().flatten(1)
    inverse_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    if streams.dtype == torch.float32 or streams.device.type != "cpu":
        return torch.matmul(flat, fn.t()) * inverse_rms
    return torch.matmul(flat.double(), fn.double().t()).float() * inverse_rms


def sum_over_streams(fn: Tensor) -> Tensor:
    """The sum of fn's parts [.., 4H] for the four streams, [.., H] float32, rounded once."""
    return fn.double().unflatten(-1, (4, -1)).sum(-2).float()


MHC_COEFFICIENTS = MhcCoefficients()
