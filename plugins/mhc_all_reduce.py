"""MhcAllReduce: the boundary between two sublayers (spec 7.2).

1. y: the sublayer's output, summed over the ranks in rank order in float32 and rounded once, so that
   every rank holds the same bits;
2. streams'_k = post_k * y + sum_j comb[j, k] * streams_j, j in order, rounded once (the first index of
   comb is the source stream);
3. hidden = sum_k pre_k * streams'_k, from the rounded streams, rounded;
4. normed = norm_weight * hidden / rms(hidden), from the rounded hidden, rounded.

With ``quant_width`` there is a step 5, which returns the normed row as MXFP8 as well: e4m3 codes and one E8M0 scale
byte per 32 channels. They have the bits of :func:`~.numerics.act_quant` of the rounded normed row, so a product of
these codes is the product that QuantizedLinear makes of ``normed``. A group with an infinity or a NaN has the scale
byte 255 (NaN) and all codes 0x7F (NaN). Scales are linear [rows, H / 32]; ``swizzled_tiles`` adds the layout that
block-scaled matrix instructions read: tiles of 128 rows x 4 groups, byte (r % 32) * 16 + r // 32 * 4 + g of a tile for
its row r and group g, zero where there is no such row or group.

V4.1 knows ``pre`` before the reduction (it is the previous sublayer's), so all four steps are one
operation. V4 needs a projection of streams' first: it uses :class:`MhcAllReduceResidualOnly`, steps 1
and 2, as does the last boundary of both.

With ``tp_size`` > 1 a mailbox input [tp_size, 2] carries addresses as pairs of 32-bit halves (low, high): the
region of this rank, then those of the ranks after it, cyclically, as mapped in this process; a plan holds no
address. The kernel exchanges rows through these regions (``cpp_plugins/kernels/mailbox.cuh``), turning -0.0
into +0.0 in every partial; the constants below are its layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .attention import onnx_act_quant_dequant
from .collective import gather_ranks
from .hc_collapse import collapse
from .numerics import act_quant, rms_norm
from .op import Op, TensorSpec

MAILBOX_ROWS = 256
"""Most rows of a call of several ranks; decides the size of a mailbox."""
MAILBOX_GENERATIONS = 3
MAILBOX_HEADER_BYTES = 128
MAILBOX_WORDS = MappingProxyType(
    {
        "rank": 0,
        "ranks": 1,
        "hidden": 2,
        "channel_bytes": 3,
        "timeout_ms": 4,
        "generation": 8,
        "fault": 9,
        "arrived": 10,
        "sampling_generation": 11,
    }
)
"""Index of each int32 of a region's header; the first five are constants, the others start at 0."""
MAILBOX_SILENT_RANK = 1
"""Fault ``MAILBOX_SILENT_RANK + r``: rank r did not publish within the timeout."""
MAILBOX_MISFIT = 255
"""Fault: a call had other ranks, channels or activation types than the mailbox was made for."""
MXFP8_GROUP = 32
"""Channels that share an E8M0 scale."""
TILE_ROWS, TILE_GROUPS = 128, 4
"""Size of a tile of swizzled scales."""
_NAN_SCALE, _NAN_CODE = 0xFF, 0x7F


@dataclass(frozen=True, kw_only=True)
class Attributes:
    tp_size: int
    norm_eps: float
    quant_width: int
    """Channels of the normed row that are also written as MXFP8: H, or 0 for no such outputs."""
    swizzled_tiles: int
    """Tiles of the swizzled copy of the scales: ceil(H / 128) for each 128 rows that a call may have; 0 for no copy."""


@dataclass(frozen=True, kw_only=True)
class ResidualAttributes:
    tp_size: int


_MAILBOX = TensorSpec("mailbox", "int32", ("P", 2), when=("tp_size", 1), addresses=True)


class MhcAllReduceResidualOnly(Op):
    name = "MhcAllReduceResidualOnly"
    attributes_type = ResidualAttributes
    all_inputs = (
        TensorSpec("partial", "T", ("rows", "H")),
        TensorSpec("streams", "T", ("rows", 4, "H")),
        TensorSpec("post", "float32", ("rows", 4)),
        TensorSpec("comb", "float32", ("rows", 4, 4)),
        _MAILBOX,
    )
    all_outputs = (TensorSpec("streams_out", "T", ("rows", 4, "H")),)

    def reference(
        self, attributes: ResidualAttributes, partial: Tensor, streams: Tensor, post: Tensor, comb: Tensor, *_: Tensor
    ) -> Tensor:
        return mix(reduce_ranks(gather_ranks(partial, attributes.tp_size)), streams, post, comb)

    def onnx_body(self, attributes: ResidualAttributes, cast: str) -> str:
        return _onnx_residual(attributes.tp_size, cast)


class MhcAllReduce(Op):
    name = "MhcAllReduce"
    attributes_type = Attributes
    all_inputs = (
        TensorSpec("partial", "T", ("rows", "H")),
        TensorSpec("streams", "T", ("rows", 4, "H")),
        TensorSpec("post", "float32", ("rows", 4)),
        TensorSpec("comb", "float32", ("rows", 4, 4)),
        TensorSpec("pre", "float32", ("rows", 4)),
        TensorSpec("norm_weight", "T", ("H",)),
        _MAILBOX,
    )
    all_outputs = (
        TensorSpec("streams_out", "T", ("rows", 4, "H")),
        TensorSpec("hidden", "T", ("rows", "H")),
        TensorSpec("normed", "T", ("rows", "H")),
        TensorSpec("codes", "int8", ("rows", "H"), when=("quant_width", 0)),
        TensorSpec("scales", "int8", ("rows", f"quant_width/{MXFP8_GROUP}"), when=("quant_width", 0)),
        TensorSpec("swizzled_scales", "int8", ("swizzled_tiles", TILE_ROWS * TILE_GROUPS), when=("swizzled_tiles", 0)),
    )

    def size_problem(self, attributes: Attributes, sizes: Mapping[str, Any]) -> str:
        width, tiles, rows = attributes.quant_width, attributes.swizzled_tiles, sizes["rows"]
        if width not in (0, sizes["H"]):
            return f"quant_width is {width}, expected 0 or the {sizes['H']} channels of a row"
        if width % MXFP8_GROUP:
            return f"rows have {width} channels, MXFP8 needs a multiple of {MXFP8_GROUP}, which share a scale"
        across = -(-width // (MXFP8_GROUP * TILE_GROUPS))
        if tiles and not width:
            return f"swizzled_tiles is {tiles} and quant_width 0, expected no tiles where there are no scales"
        if tiles < 0 or (tiles and tiles % across):
            return f"swizzled_tiles is {tiles}, expected 0 or a multiple of the {across} that {width} channels take"
        # A traced row count is not known yet.
        if tiles and isinstance(rows, int) and rows > tiles // across * TILE_ROWS:
            return f"{rows} rows, swizzled_tiles = {tiles} holds the scales of {tiles // across * TILE_ROWS}"
        return ""

    def reference(
        self,
        attributes: Attributes,
        partial: Tensor,
        streams: Tensor,
        post: Tensor,
        comb: Tensor,
        pre: Tensor,
        norm_weight: Tensor,
        *_: Tensor,
    ) -> tuple[Tensor, ...]:
        mixed = mix(reduce_ranks(gather_ranks(partial, attributes.tp_size)), streams, post, comb)
        hidden = collapse(mixed, pre)
        normed = rms_norm(hidden, norm_weight, attributes.norm_eps)
        return mixed, hidden, normed, *quantized_outputs(normed, attributes)

    def onnx_body(self, attributes: Attributes, cast: str) -> str:
        return (
            _onnx_residual(attributes.tp_size, cast)
            + f"""
            pre_column = Unsqueeze(pre, last)
            float_mixed = Cast<to=1>(streams_out)
            weighted = Mul(float_mixed, pre_column)
            stream_axis = Constant<value = int64[1] {{1}}>()
            collapsed = ReduceSum<keepdims=0>(weighted, stream_axis)
            hidden = {cast}(collapsed)
            float_hidden = Cast<to=1>(hidden)
            square = Mul(float_hidden, float_hidden)
            mean = ReduceMean<keepdims=1>(square, stream_axis)
            eps = Constant<value = float {{{attributes.norm_eps!r}}}>()
            shifted = Add(mean, eps)
            rms = Sqrt(shifted)
            scaled = Div(float_hidden, rms)
            float_weight = Cast<to=1>(norm_weight)
            weighted_norm = Mul(scaled, float_weight)
            normed = {cast}(weighted_norm)
        """
            + (_ONNX_MXFP8 if attributes.quant_width else "")
            + (_onnx_swizzle(attributes) if attributes.swizzled_tiles else "")
        )


def reduce_ranks(partials: Tensor) -> Tensor:
    """Sum [tp, rows, H] over the ranks in rank order in float32, rounded once."""
    total = partials[0].float()
    for rank in range(1, partials.shape[0]):
        total = total + partials[rank].float()
    return total.to(partials.dtype)


def mix(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """``post_k * y + sum_j comb[j, k] * streams_j``: one product, then four fused multiply-adds."""
    # float64 makes the products exact, so that rounding after each sum is what an FMA does.
    wide = torch.float32 if streams.dtype == torch.float32 else torch.float64
    total = post.unsqueeze(-1) * y.float().unsqueeze(1)
    for j in range(4):
        product = comb[:, j].unsqueeze(-1).to(wide) * streams[:, j].unsqueeze(1).to(wide)
        total = (total.to(wide) + product).float()
    return total.to(streams.dtype)


def quantized_outputs(normed: Tensor, attributes: Attributes) -> tuple[Tensor, ...]:
    """``codes``, ``scales`` and ``swizzled_scales`` of normed rows [rows, H], as far as the attributes want them."""
    if not attributes.quant_width:
        return ()
    values, factors = act_quant(normed, MXFP8_GROUP)
    finite = normed.float().unflatten(-1, (-1, MXFP8_GROUP)).abs().amax(-1).isfinite()
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8).unflatten(-1, (-1, MXFP8_GROUP))
    codes = codes.masked_fill(~finite.unsqueeze(-1), _NAN_CODE).flatten(-2)
    scales = (factors.view(torch.int32) >> 23).masked_fill(~finite, _NAN_SCALE).to(torch.uint8)
    outputs = (codes.view(torch.int8), scales.view(torch.int8))
    return (*outputs, swizzle(outputs[1], attributes.swizzled_tiles)) if attributes.swizzled_tiles else outputs


def swizzle(scales: Tensor, tiles: int) -> Tensor:
    """Linear scales [rows, groups] in ``tiles`` tiles, zero where there is no scale; [tiles, 512]."""
    rows, groups = scales.shape
    across = -(-groups // TILE_GROUPS)
    table = scales.new_zeros(tiles // across * TILE_ROWS, across * TILE_GROUPS)
    table[:rows, :groups] = scales
    return table.view(-1, 4, TILE_ROWS // 4, across, TILE_GROUPS).permute(0, 3, 2, 1, 4).reshape(tiles, -1)


# Takes fp8_values, fp8_scale and fp8_ln2 from the text in its middle. An e4m3 code, read as an integer, is a concave
# piecewise linear function of the magnitude: the least of its pieces.
_ONNX_MXFP8 = f"""
            mx_shape = Constant<value = int64[3] {{0, -1, {MXFP8_GROUP}}}>()
            row_shape = Constant<value = int64[2] {{0, -1}}>()
            mx_float = Cast<to=1>(normed)
            mx_groups = Reshape(mx_float, mx_shape)
            mx_zero = Constant<value = float {{0.0}}>()
            mx_zeros = Mul(mx_groups, mx_zero)
            mx_sum = ReduceSum<keepdims=1>(mx_zeros, last)
            mx_bad = IsNaN(mx_sum)
            mx_clean = Where(mx_bad, mx_zero, mx_groups)
            mx_rows = Reshape(mx_clean, row_shape)
            {onnx_act_quant_dequant("mx_rows", "fp8", MXFP8_GROUP, "Cast<to=1>")}
            mx_magnitudes = Abs(fp8_values)
            mx_piece_axis = Constant<value = int64[1] {{3}}>()
            mx_columns = Unsqueeze(mx_magnitudes, mx_piece_axis)
            mx_slopes = Constant<value = float[15] {{{", ".join(repr(2.0 ** (3 - k)) for k in range(-6, 9))}}}>()
            mx_offsets = Constant<value = float[15] {{{", ".join(repr(8.0 * (k + 6)) for k in range(-6, 9))}}}>()
            mx_sloped = Mul(mx_columns, mx_slopes)
            mx_pieces = Add(mx_sloped, mx_offsets)
            mx_unsigned = ReduceMin<keepdims=0>(mx_pieces, mx_piece_axis)
            mx_inverse = Reciprocal(mx_clean)
            mx_negative = Less(mx_inverse, mx_zero)
            mx_sign = Cast<to=1>(mx_negative)
            mx_sign_bit = Constant<value = float {{128.0}}>()
            mx_sign_value = Mul(mx_sign, mx_sign_bit)
            mx_signed = Sub(mx_unsigned, mx_sign_value)
            mx_nan_code = Constant<value = float {{{float(_NAN_CODE)}}}>()
            mx_all_codes = Where(mx_bad, mx_nan_code, mx_signed)
            mx_code_bytes = Cast<to=3>(mx_all_codes)
            codes = Reshape(mx_code_bytes, row_shape)
            mx_scale_log = Log(fp8_scale)
            mx_scale_log2 = Div(mx_scale_log, fp8_ln2)
            mx_exponents = Round(mx_scale_log2)
            mx_exponent_bias = Constant<value = float {{127.0}}>()
            mx_bytes = Add(mx_exponents, mx_exponent_bias)
            mx_wraps = Greater(mx_bytes, mx_exponent_bias)
            mx_byte_range = Constant<value = float {{256.0}}>()
            mx_wrapped = Sub(mx_bytes, mx_byte_range)
            mx_signed_bytes = Where(mx_wraps, mx_wrapped, mx_bytes)
            mx_nan_scale = Constant<value = float {{{float(_NAN_SCALE - 256)}}}>()
            mx_all_bytes = Where(mx_bad, mx_nan_scale, mx_signed_bytes)
            mx_scale_bytes = Cast<to=3>(mx_all_bytes)
            scales = Reshape(mx_scale_bytes, row_shape)
"""


def _onnx_swizzle(attributes: Attributes) -> str:
    tiles, groups = attributes.swizzled_tiles, attributes.quant_width // MXFP8_GROUP
    across = -(-groups // TILE_GROUPS)
    down = tiles // across
    return f"""
            table_rows = Constant<value = int64[1] {{{down * TILE_ROWS}}}>()
            scales_shape = Shape(scales)
            first_place = Constant<value = int64[1] {{0}}>()
            scale_rows = Gather(scales_shape, first_place)
            rows_missing = Sub(table_rows, scale_rows)
            groups_missing = Constant<value = int64[1] {{{across * TILE_GROUPS - groups}}}>()
            missing = Concat<axis=0>(first_place, first_place, rows_missing, groups_missing)
            table = Pad(scales, missing)
            cut_shape = Constant<value = int64[5] {{{down}, 4, {TILE_ROWS // 4}, {across}, {TILE_GROUPS}}}>()
            cut = Reshape(table, cut_shape)
            turned = Transpose<perm=[0, 3, 2, 1, 4]>(cut)
            tile_shape = Constant<value = int64[2] {{{tiles}, {TILE_ROWS * TILE_GROUPS}}}>()
            swizzled_scales = Reshape(turned, tile_shape)
    """


def _onnx_residual(tp_size: int, cast: str) -> str:
    if tp_size == 1:
        reduced = "y = Cast<to=1>(partial)"
    else:
        # TensorRT's collective; other runtimes can't run a body that spans ranks.
        split = ", ".join(f"partial{r}" for r in range(tp_size))
        gather = f'collective_operation="all_gather", nb_rank={tp_size}, reduce_op="none", root=-1, group_size=0'
        lines = [f"gathered = trt.DistCollective<{gather}>(partial)"]
        lines.append(f"{split} = Split<axis=0, num_outputs={tp_size}>(gathered)")
        lines += [f"float{r} = Cast<to=1>(partial{r})" for r in range(tp_size)]
        lines.append("sum1 = Add(float0, float1)")
        lines += [f"sum{r} = Add(sum{r - 1}, float{r})" for r in range(2, tp_size)]
        lines += [f"rounded = {cast}(sum{tp_size - 1})", "y = Cast<to=1>(rounded)"]
        reduced = "\n".join(lines)
    return f"""
            {reduced}
            last = Constant<value = int64[1] {{2}}>()
            stream_dim = Constant<value = int64[1] {{1}}>()
            post_column = Unsqueeze(post, last)
            y_row = Unsqueeze(y, stream_dim)
            spread = Mul(post_column, y_row)
            comb_t = Transpose<perm=[0, 2, 1]>(comb)
            float_streams = Cast<to=1>(streams)
            carried = MatMul(comb_t, float_streams)
            mixed = Add(spread, carried)
            streams_out = {cast}(mixed)
    """


MHC_ALL_REDUCE = MhcAllReduce()
MHC_ALL_REDUCE_RESIDUAL_ONLY = MhcAllReduceResidualOnly()
