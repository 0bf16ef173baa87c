"""RoutedExperts: the chosen FP4 experts of each row, weighted and summed in float32 (spec 3.6).

Expert e: g = w1 x and u = w3 x (FP4 GEMM, rounded to the activation type), u clamped to +-limit, g to at
most limit, a = silu(g) * u * routing weight, rounded; then w2 a, which quantises a again. The weights are
the released bytes, two FP4 codes per byte with one E8M0 scale per 32 channels. An id outside 0..E-1 stands for
no expert and adds nothing. Rank-local: with a sharded intermediate dimension the result is this rank's partial
sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import onnx_act_quant_dequant
from .numerics import FP4_BLOCK, decode_e8m0, decode_fp4, pointwise, quantized_matmul
from .op import Op, TensorSpec
from .quantized_linear import onnx_decode


@dataclass(frozen=True, kw_only=True)
class Attributes:
    group: int
    """Channels of an activation row that share a scale, 32 or 128 for the kernel; the same as in the dense layers."""
    hidden_size: int
    intermediate_size: int
    """Of this rank."""
    swiglu_limit: float


class RoutedExperts(Op):
    name = "RoutedExperts"
    attributes_type = Attributes
    all_inputs = (
        TensorSpec("x", "T", ("rows", "hidden_size")),
        TensorSpec("indices", "int32", ("rows", "K")),
        TensorSpec("weights", "float32", ("rows", "K")),
        TensorSpec("w1", "int8", ("E", "intermediate_size", "hidden_size/2")),
        TensorSpec("w1_scale", "int8", ("E", "intermediate_size", f"hidden_size/{FP4_BLOCK}")),
        TensorSpec("w2", "int8", ("E", "hidden_size", "intermediate_size/2")),
        TensorSpec("w2_scale", "int8", ("E", "hidden_size", f"intermediate_size/{FP4_BLOCK}")),
        TensorSpec("w3", "int8", ("E", "intermediate_size", "hidden_size/2")),
        TensorSpec("w3_scale", "int8", ("E", "intermediate_size", f"hidden_size/{FP4_BLOCK}")),
    )
    all_outputs = (TensorSpec("y", "float32", ("rows", "hidden_size")),)

    def reference(
        self, attributes: Attributes, x: Tensor, indices: Tensor, weights: Tensor, *experts: Tensor
    ) -> Tensor:
        w1, w1_scale, w2, w2_scale, w3, w3_scale = experts

        def product(a: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
            y = quantized_matmul(a, decode_fp4(packed), decode_e8m0(scale), group=attributes.group, block=FP4_BLOCK)
            return y.to(x.dtype)

        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        # Experts in ascending order, so that a row's sum does not depend on the other rows.
        chosen = indices.unique()
        for expert in chosen[(chosen >= 0) & (chosen < len(w1))].tolist():
            rows, choice = torch.where(indices == expert)
            gate = product(x[rows], w1[expert], w1_scale[expert])
            up = product(x[rows], w3[expert], w3_scale[expert])
            inner = swiglu(gate, up, attributes.swiglu_limit) * weights[rows, choice].unsqueeze(-1)
            total[rows] += product(inner.to(x.dtype), w2[expert], w2_scale[expert]).float()
        return total

    def onnx_body(self, attributes: Attributes, cast: str) -> str:
        hidden, inner, limit = attributes.hidden_size, attributes.intermediate_size, attributes.swiglu_limit
        return f"""
            zero = Constant<value = int64[1] {{0}}>()
            one = Constant<value = int64[1] {{1}}>()
            two = Constant<value = int64[1] {{2}}>()
            zero_scalar = Constant<value = int64 {{0}}>()
            one_scalar = Constant<value = int64 {{1}}>()
            {_onnx_dequantize("w1", inner, hidden)}
            {_onnx_dequantize("w2", hidden, inner)}
            {_onnx_dequantize("w3", inner, hidden)}
            {onnx_act_quant_dequant("x", "x_rounded", attributes.group, "Cast<to=1>")}
            x_batch = Unsqueeze(x_rounded, zero)
            gate_product = MatMul(x_batch, w1_t)
            gate_rounded = {cast}(gate_product)
            gate_float = Cast<to=1>(gate_rounded)
            up_product = MatMul(x_batch, w3_t)
            up_rounded = {cast}(up_product)
            up_float = Cast<to=1>(up_rounded)
            limit = Constant<value = float {{{limit!r}}}>()
            minus_limit = Constant<value = float {{{-limit!r}}}>()
            gate = Min(gate_float, limit)
            up = Clip(up_float, minus_limit, limit)
            gate_sigmoid = Sigmoid(gate)
            silu = Mul(gate, gate_sigmoid)
            activated = Mul(silu, up)
            w1_shape = Shape(w1)
            experts = Gather(w1_shape, zero_scalar)
            ids = Range(zero_scalar, experts, one_scalar)
            indices64 = Cast<to=7>(indices)
            index_column = Unsqueeze(indices64, two)
            chosen = Equal(index_column, ids)
            chosen_float = Cast<to=1>(chosen)
            weight_column = Unsqueeze(weights, two)
            spread = Mul(chosen_float, weight_column)
            routing = ReduceSum<keepdims=0>(spread, one)
            routing_t = Transpose<perm=[1, 0]>(routing)
            routing_column = Unsqueeze(routing_t, two)
            scaled = Mul(activated, routing_column)
            scaled_cast = {cast}(scaled)
            flat_shape = Constant<value = int64[2] {{-1, {inner}}}>()
            scaled_flat = Reshape(scaled_cast, flat_shape)
            {onnx_act_quant_dequant("scaled_flat", "inner_rounded", attributes.group, "Cast<to=1>")}
            scaled_shape = Shape(scaled)
            inner_batch = Reshape(inner_rounded, scaled_shape)
            down = MatMul(inner_batch, w2_t)
            down_rounded = {cast}(down)
            down_float = Cast<to=1>(down_rounded)
            y = ReduceSum<keepdims=0>(down_float, zero)
        """


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)`` in float32."""
    return pointwise(F.silu, gate.float().clamp_max(limit)) * up.float().clamp(-limit, limit)


def _onnx_dequantize(name: str, rows: int, columns: int) -> str:
    """ONNX text: FP4 bytes ``name`` [E, rows, columns / 2] and scales -> ``name``_t [E, columns, rows]."""
    low = torch.arange(-128, 128).to(torch.int8).view(torch.uint8).int()
    codes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    pairs = torch.stack((codes[low & 15], codes[low >> 4]), -1).flatten()
    table = ", ".join(repr(float(v)) for v in pairs)
    return f"""
        {name}_pairs = Constant<value = float[256, 2] {{{table}}}>()
        {name}_bytes = Cast<to=7>({name})
        {name}_bias = Constant<value = int64 {{128}}>()
        {name}_index = Add({name}_bytes, {name}_bias)
        {name}_codes = Gather<axis=0>({name}_pairs, {name}_index)
        {onnx_decode(f"{name}_scale", f"{name}_scales", torch.float8_e8m0fnu)}
        {name}_blocked = Constant<value = int64[4] {{-1, {rows}, {columns // FP4_BLOCK}, {FP4_BLOCK}}}>()
        {name}_grouped = Reshape({name}_codes, {name}_blocked)
        {name}_axis = Constant<value = int64[1] {{3}}>()
        {name}_scale_column = Unsqueeze({name}_scales, {name}_axis)
        {name}_scaled = Mul({name}_grouped, {name}_scale_column)
        {name}_dense = Constant<value = int64[3] {{-1, {rows}, {columns}}}>()
        {name}_values = Reshape({name}_scaled, {name}_dense)
        {name}_t = Transpose<perm=[0, 2, 1]>({name}_values)
    """


ROUTED_EXPERTS = RoutedExperts()
