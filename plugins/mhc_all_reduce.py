"""MhcAllReduce: the boundary between two sublayers (spec 7.2).

1. y: the sublayer's output, summed over the ranks in rank order in float32 and rounded once, so that
   every rank holds the same bits;
2. streams'_k = post_k * y + sum_j comb[j, k] * streams_j, j in order, rounded once (the first index of
   comb is the source stream);
3. hidden = sum_k pre_k * streams'_k, from the rounded streams, rounded;
4. normed = norm_weight * hidden / rms(hidden), from the rounded hidden, rounded.

V4.1 knows ``pre`` before the reduction (it is the previous sublayer's), so all four steps are one
operation. V4 needs a projection of streams' first: it uses :class:`MhcAllReduceResidualOnly`, steps 1
and 2, as does the last boundary of both.

With ``tp_size`` > 1 a mailbox input [tp_size, 2] carries addresses as pairs of 32-bit halves (low, high): the
region of this rank, then those of the ranks after it, cyclically, as mapped in this process; a plan holds no
address. The kernel exchanges rows through these regions (``cpp_plugins/kernels/mailbox.cuh``), turning -0.0
into +0.0 in every partial; the constants below are its layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from .collective import gather_ranks
from .hc_collapse import collapse
from .numerics import rms_norm
from .op import Op, TensorSpec

MAILBOX_ROWS = 256
"""Rows a call may have with several ranks; decides how large a mailbox is."""
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
    }
)
"""Index of each int32 of a region's header; the first five are constants, the others start at 0."""
MAILBOX_SILENT_RANK = 1
"""Fault ``MAILBOX_SILENT_RANK + r``: rank r did not publish within the timeout."""
MAILBOX_MISFIT = 255
"""Fault: a call had other ranks, channels or activation types than the mailbox was made for."""


@dataclass(frozen=True, kw_only=True)
class Attributes:
    tp_size: int
    norm_eps: float


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
    )

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
        return mixed, hidden, rms_norm(hidden, norm_weight, attributes.norm_eps)

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
