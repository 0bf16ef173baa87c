"""What a conversion and a build will take, said before they start: sizes from headers times what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .build_config import BuildConfig, Kind, Lowering
from .checkpoint import ConversionPlan
from .checkpoint.loading import is_fp4, is_part
from .checkpoint.tensor_file import StoredTensor
from .config import Numerics

CONVERT_BYTES_A_SECOND = 300e6
"""Read, hashed and written on one core and an ordinary disk."""
BUILD_COPIES = 5
"""Copies of a network's weights in memory at the worst moment of an export and build, as measured."""
BASE_BYTES = 1e9
"""Memory of the interpreter, torch and TensorRT."""
ENGINE_SECONDS = {Lowering.PLUGIN: 12, Lowering.NATIVE: 30}
"""Export and build of a network of a few layers with TensorRT-RTX on two cores; weights come on top."""
BUILD_BYTES_A_SECOND = 100e6


@dataclass(frozen=True)
class Estimate:
    """Of a conversion or a build."""

    memory_bytes: float
    """At the worst moment."""
    seconds: float


def estimate_conversion(plan: ConversionPlan) -> Estimate:
    """What a conversion takes."""
    seconds = (plan.source_bytes + plan.output_bytes) / CONVERT_BYTES_A_SECOND
    return Estimate(plan.peak_memory_bytes + BASE_BYTES, seconds)


def estimate_build(weights: Mapping[Kind, int], build: BuildConfig, tp_size: int) -> Estimate:
    """What a build takes that makes one engine after the other.

    Args:
        weights: network -> :func:`weight_bytes` of one of the ``tp_size`` ranks.
    """
    seconds = ENGINE_SECONDS[build.lowering] * len(weights) + sum(weights.values()) / BUILD_BYTES_A_SECOND
    return Estimate(BUILD_COPIES * max(weights.values()) + BASE_BYTES, seconds * tp_size)


def weight_bytes(kind: Kind, tensors: Iterable[StoredTensor], build: BuildConfig) -> int:
    """Bytes of a network's weights in its engine."""
    wide = 4 if build.dtype == "float32" else 2
    total = 0
    for tensor in tensors:
        if not is_part(tensor.name, kind):
            continue
        if build.numerics is Numerics.RELEASED or tensor.dtype != "I8":
            total += tensor.nbytes
        elif tensor.name.endswith(".weight"):  # FP4 codes are two per byte; the scales are gone
            total += tensor.nbytes * wide * (2 if is_fp4(tensor.name) else 1)
    return total
