"""Values of the block-quantised tensors of a checkpoint (spec sections 2 and 3.0).

A dense weight is FP8 e4m3 with one E8M0 scale for each square block, an expert weight is packed FP4
e2m1 with one E8M0 scale for 32 channels along K. A scale multiplies. Bytes are held as ``torch.int8``.
"""

from __future__ import annotations

from torch import Tensor

from ...plugins.numerics import FP4_BLOCK, decode_e4m3, decode_e8m0, decode_fp4, expand_block_scale
from .tensor_file import CheckpointError

_E8M0_NAN = -1
"""Byte 255 of a scale, as int8. All other bytes are powers of two: 0 is 2^-127, 254 is 2^127."""


def check_scale(name: str, scale: Tensor) -> None:
    """Raise :class:`CheckpointError` when a scale of ``name`` is not a number."""
    if bad := int((scale == _E8M0_NAN).sum()):
        raise CheckpointError(
            f"{name}: {bad} of {scale.numel()} scales are E8M0 byte 255 (not a number); download the checkpoint again"
        )


def scale_shape(weight: tuple[int, ...], block: int) -> tuple[int, ...]:
    """Shape of the E8M0 scales of an FP8 weight [out, in]: blocks at the edges may be partial."""
    return tuple(-(-size // block) for size in weight)


def dequantize_fp8(weight: Tensor, scale: Tensor, block: int) -> Tensor:
    """Float32 values [N, K] of FP8 bytes [N, K] and scales [ceil(N / block), ceil(K / block)]."""
    rows, columns = weight.shape
    return decode_e4m3(weight).mul_(expand_block_scale(decode_e8m0(scale), (block, block), (rows, columns)))


def dequantize_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Float32 values [N, K] of packed FP4 bytes [N, K / 2] and scales [N, K / 32]."""
    return decode_fp4(packed).mul_(decode_e8m0(scale).repeat_interleave(FP4_BLOCK, -1))
