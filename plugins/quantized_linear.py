"""QuantizedLinear: activations quantised on the fly times FP8 weights (spec 3.0, FP8 GEMM).

The weight is carried as the released bytes: e4m3 codes [N, K] and E8M0 scales of square blocks. Each row
of x gets one power-of-two scale per group of channels; blocks along K are accumulated in order in float32
and the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attention import onnx_act_quant_dequant
from .numerics import decode_e4m3, decode_e8m0, quantized_matmul
from .op import Op, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Attributes:
    block: int
    """Side of a weight block and channels of x that share a scale; the kernel takes 32 and 128."""


class QuantizedLinear(Op):
    name = "QuantizedLinear"
    attributes_type = Attributes
    all_inputs = (
        TensorSpec("x", "T", ("rows", "K")),
        TensorSpec("weight", "int8", ("N", "K")),
        TensorSpec("scale", "int8", ("M", "J")),
    )
    all_outputs = (TensorSpec("y", "T", ("rows", "N")),)

    def size_problem(self, attributes: Attributes, sizes: Mapping[str, Any]) -> str:
        wanted = [-(-sizes[dim] // attributes.block) for dim in "NK"]
        found = [sizes["M"], sizes["J"]]
        return "" if found == wanted else f"scale has shape {found}, expected {wanted}: one per block of the weight"

    def reference(self, attributes: Attributes, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        block = attributes.block
        row_scale = decode_e8m0(scale).repeat_interleave(block, 0)[: weight.shape[0]]
        return quantized_matmul(x, decode_e4m3(weight), row_scale, group=block, block=block).to(x.dtype)

    def onnx_body(self, attributes: Attributes, cast: str) -> str:
        block = attributes.block
        return f"""
            {onnx_act_quant_dequant("x", "rounded", block, "Cast<to=1>")}
            {onnx_decode("weight", "codes", torch.float8_e4m3fn)}
            {onnx_decode("scale", "scales", torch.float8_e8m0fnu)}
            scale_shape = Shape(scales)
            weight_shape = Shape(weight)
            zero = Constant<value = int64[1] {{0}}>()
            one = Constant<value = int64[1] {{1}}>()
            three = Constant<value = int64[1] {{3}}>()
            block = Constant<value = int64[1] {{{block}}}>()
            block_rows = Gather(scale_shape, zero)
            block_columns = Gather(scale_shape, one)
            scale4_shape = Concat<axis=0>(block_rows, one, block_columns, one)
            wide4_shape = Concat<axis=0>(block_rows, block, block_columns, block)
            scale4 = Reshape(scales, scale4_shape)
            wide4 = Expand(scale4, wide4_shape)
            wide_rows = Mul(block_rows, block)
            wide_columns = Mul(block_columns, block)
            wide_shape = Concat<axis=0>(wide_rows, wide_columns)
            wide = Reshape(wide4, wide_shape)
            both_zero = Constant<value = int64[2] {{0, 0}}>()
            fitted = Slice(wide, both_zero, weight_shape)
            dequantized = Mul(codes, fitted)
            transposed = Transpose<perm=[1, 0]>(dequantized)
            product = MatMul(rounded, transposed)
            y = {cast}(product)
        """


def onnx_decode(name: str, out: str, dtype: torch.dtype) -> str:
    """ONNX text that looks the float32 values of bytes ``name`` (int8) up in a table of 256."""
    values = torch.arange(-128, 128).to(torch.int8).view(dtype).float().nan_to_num(0.0)
    table = ", ".join(repr(float(v)) for v in values)
    return f"""
        {out}_table = Constant<value = float[256] {{{table}}}>()
        {out}_bytes = Cast<to=7>({name})
        {out}_bias = Constant<value = int64 {{128}}>()
        {out}_index = Add({out}_bytes, {out}_bias)
        {out} = Gather({out}_table, {out}_index)
    """


QUANTIZED_LINEAR = QuantizedLinear()
