"""All operations of this package, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .context_kv_insert import CONTEXT_KV_INSERT
from .draft_attention import DRAFT_ATTENTION
from .hc_collapse import HC_COLLAPSE
from .markov_sampling import MARKOV_SAMPLING
from .markov_sampling_sharded import MARKOV_SAMPLING_SHARDED
from .mhc_all_reduce import MHC_ALL_REDUCE, MHC_ALL_REDUCE_RESIDUAL_ONLY
from .mhc_coefficients import MHC_COEFFICIENTS
from .op import Op
from .quantized_linear import QUANTIZED_LINEAR
from .routed_experts import ROUTED_EXPERTS
from .target_attention import TARGET_ATTENTION

ALL_OPS: Mapping[str, Op] = MappingProxyType(
    {
        op.name: op
        for op in (
            MHC_COEFFICIENTS,
            MHC_ALL_REDUCE,
            MHC_ALL_REDUCE_RESIDUAL_ONLY,
            HC_COLLAPSE,
            DRAFT_ATTENTION,
            TARGET_ATTENTION,
            CONTEXT_KV_INSERT,
            QUANTIZED_LINEAR,
            ROUTED_EXPERTS,
            MARKOV_SAMPLING,
            MARKOV_SAMPLING_SHARDED,
        )
    }
)
