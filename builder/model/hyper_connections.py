"""Manifold-constrained hyper-connections: how sublayers read and write the four residual streams.

A network is a chain of sublayers (attention, experts, attention, ...). Each has coefficients computed
from the streams that enter it: ``pre`` collapses streams into one vector, ``post`` and ``comb`` write
the sublayer's output back (spec 3.3). The two variants differ in whose ``pre`` collapses (spec 3.4):

* V4 uses the sublayer's own: the boundary is reduce + mix, then coefficients, collapse and norm;
* V4.1 uses the *previous* sublayer's, known before the reduction ends, so reduce, mix, collapse and
  norm are one operation. The first sublayer collapses with one-hot e_0, and the network's output
  collapses with the last ``pre``; V4 has a learned head there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...plugins.hc_collapse import HC_COLLAPSE
from ...plugins.mhc_all_reduce import MHC_ALL_REDUCE, MHC_ALL_REDUCE_RESIDUAL_ONLY
from ...plugins.mhc_coefficients import MHC_COEFFICIENTS, project_streams, sum_over_streams
from ...plugins.numerics import matmul, pointwise
from ..config import HC_MULT, ModelConfig, Variant
from .context import BuildContext
from .layers import RmsNorm, frozen


@dataclass(frozen=True)
class Sublayer:
    """Coefficient parameters and input norm of one sublayer, and its name for probes."""

    name: str
    fn: Tensor
    """[24, 4H], or summed over equal streams [24, H]."""
    scale: Tensor
    base: Tensor
    norm: RmsNorm


@dataclass(frozen=True)
class Streams:
    """The chain between two boundaries: the streams [rows, 4, H] that entered the current sublayer and
    its coefficients, float32 [rows, 4], [rows, 4] and [rows, 4 (source), 4 (target)]."""

    values: Tensor
    pre: Tensor
    post: Tensor
    comb: Tensor


class StreamChain:
    """Carries the streams through the sublayers of one forward pass; holds no parameters."""

    def __init__(self, config: ModelConfig, context: BuildContext, mailbox: tuple[Tensor, ...]):
        self.config, self.context, self.mailbox = config, context, mailbox

    def enter(self, hidden: Tensor, sublayer: Sublayer) -> tuple[Streams, Tensor]:
        """Copy embedded rows [rows, H] to all streams; return them and the first sublayer's input."""
        values = hidden.unsqueeze(1).expand(-1, HC_MULT, -1).contiguous()
        state = self._coefficients(values, sublayer)
        if self.config.variant is Variant.V4:
            hidden = HC_COLLAPSE(values, state.pre)
        return state, self._normalise(hidden, sublayer)

    def cross(self, state: Streams, partial: Tensor, sublayer: Sublayer) -> tuple[Streams, Tensor]:
        """Write a sublayer's partial output back and return the next sublayer's state and input."""
        tp = self.context.tp_size
        if self.config.variant is Variant.V4:
            after = self._coefficients(self._mix(state, partial), sublayer)
            return after, self._normalise(HC_COLLAPSE(after.values, after.pre), sublayer)
        values, hidden, normed = MHC_ALL_REDUCE(
            partial,
            state.values,
            state.post,
            state.comb,
            state.pre,
            sublayer.norm.weight,
            *self.mailbox,
            tp_size=tp,
            norm_eps=self.config.rms_norm_eps,
            quant_width=0,
            swizzled_tiles=0,
        )
        self.context.probe(f"{sublayer.name}_in", hidden)
        return self._coefficients(values, sublayer), normed

    def leave(self, state: Streams, partial: Tensor) -> Streams:
        """Write the last sublayer's output back; the coefficients stay, V4.1 collapses with them."""
        return Streams(self._mix(state, partial), state.pre, state.post, state.comb)

    def _mix(self, state: Streams, partial: Tensor) -> Tensor:
        return MHC_ALL_REDUCE_RESIDUAL_ONLY(
            partial, state.values, state.post, state.comb, *self.mailbox, tp_size=self.context.tp_size
        )

    def _normalise(self, hidden: Tensor, sublayer: Sublayer) -> Tensor:
        self.context.probe(f"{sublayer.name}_in", hidden)
        return sublayer.norm(hidden)

    def _coefficients(self, values: Tensor, sublayer: Sublayer) -> Streams:
        config = self.config
        pre, post, comb = MHC_COEFFICIENTS(
            values,
            sublayer.fn,
            sublayer.scale,
            sublayer.base,
            rms_eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
            sinkhorn_iters=config.hc_sinkhorn_iters,
        )
        for name, value in (("pre", pre), ("post", post), ("comb", comb)):
            self.context.probe(f"{sublayer.name}_{name}", value)
        return Streams(values, pre, post, comb)


class HyperConnectedLayer(nn.Module):
    """A layer's two sublayers: norms and coefficient parameters under their released names.

    The attention of a network's ``first`` layer reads four equal streams. :meth:`eval` takes the sum of its fn over
    them, and with it the shortcut of MhcCoefficients; weights that are loaded later need another :meth:`eval`. A module
    in training takes no shortcut.
    """

    hc_attn_fn_sum: Tensor | None

    def __init__(self, name: str, config: ModelConfig, context: BuildContext, *, first: bool = False):
        super().__init__()
        self.name, self.first = name, first
        self.register_buffer("hc_attn_fn_sum", None, persistent=False)
        rows = (2 + HC_MULT) * HC_MULT
        for kind in ("attn", "ffn"):
            setattr(self, f"hc_{kind}_fn", frozen(rows, HC_MULT * config.hidden_size, dtype=torch.float32))
            setattr(self, f"hc_{kind}_base", frozen(rows, dtype=torch.float32))
            setattr(self, f"hc_{kind}_scale", frozen(3, dtype=torch.float32))
            setattr(self, f"{kind}_norm", RmsNorm(config.hidden_size, config.rms_norm_eps, context.dtype))

    def train(self, mode: bool = True) -> HyperConnectedLayer:
        super().train(mode)
        with torch.no_grad():
            self.hc_attn_fn_sum = None if mode or not self.first else sum_over_streams(self.hc_attn_fn)
        return self

    def sublayer(self, kind: str) -> Sublayer:
        """``kind`` is "attn" or "ffn"."""
        fn, scale, base = (getattr(self, f"hc_{kind}_{part}") for part in ("fn", "scale", "base"))
        if kind == "attn" and self.hc_attn_fn_sum is not None:
            fn = self.hc_attn_fn_sum
        return Sublayer(f"{self.name}_{kind}", fn, scale, base, getattr(self, f"{kind}_norm"))


def register_hc_head(module: nn.Module, config: ModelConfig) -> None:
    """Give ``module`` V4's learned collapse; V4.1 has none."""
    if config.variant is Variant.V4:
        module.hc_head_fn = frozen(HC_MULT, HC_MULT * config.hidden_size, dtype=torch.float32)
        module.hc_head_base = frozen(HC_MULT, dtype=torch.float32)
        module.hc_head_scale = frozen(1, dtype=torch.float32)


def collapse_head(module: nn.Module, state: Streams, config: ModelConfig) -> Tensor:
    """The network's hidden rows [rows, H]: V4 by ``module``'s learned head, V4.1 by the last pre."""
    if config.variant is Variant.V4_1:
        return HC_COLLAPSE(state.values, state.pre)
    mixes = project_streams(state.values, module.hc_head_fn, config.rms_norm_eps)
    pre = pointwise(torch.sigmoid, mixes * module.hc_head_scale + module.hc_head_base) + config.hc_eps
    return HC_COLLAPSE(state.values, pre)


def logits(hidden: Tensor, norm: RmsNorm, head: Tensor) -> Tensor:
    """``norm(hidden) @ head.T`` in float32, [rows, V]."""
    return matmul(norm(hidden), head)
