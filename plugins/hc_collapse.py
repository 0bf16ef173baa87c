"""HcCollapse: four streams and their weights -> one hidden vector (spec 3.3, collapse)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .op import Op, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Attributes:
    pass


class HcCollapse(Op):
    name = "HcCollapse"
    attributes_type = Attributes
    all_inputs = (
        TensorSpec("streams", "T", ("rows", 4, "H")),
        TensorSpec("pre", "float32", ("rows", 4)),
    )
    all_outputs = (TensorSpec("hidden", "T", ("rows", "H")),)

    def reference(self, attributes: Attributes, streams: Tensor, pre: Tensor) -> Tensor:
        return collapse(streams, pre)

    def onnx_body(self, attributes: Attributes, cast: str) -> str:
        return f"""
            float_streams = Cast<to=1>(streams)
            last = Constant<value = int64[1] {{2}}>()
            weights = Unsqueeze(pre, last)
            weighted = Mul(float_streams, weights)
            stream_axis = Constant<value = int64[1] {{1}}>()
            total = ReduceSum<keepdims=0>(weighted, stream_axis)
            hidden = {cast}(total)
        """


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """``sum_i pre_i * streams_i`` in float32, streams in order, rounded once; [rows, H]."""
    weighted = pre.unsqueeze(-1) * streams.float()
    total = weighted[:, 0]
    for i in range(1, 4):
        total = total + weighted[:, i]
    return total.to(streams.dtype)


HC_COLLAPSE = HcCollapse()
