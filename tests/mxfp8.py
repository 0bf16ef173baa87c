"""MXFP8 bytes written out from the formats' definitions, for tests of the quantised boundary on CPU and GPU."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tests.oracle import numpy_ops as ops
from tests.oracle.numpy_ops import Array

_MAGNITUDES = ops.decode_e4m3(np.arange(127, dtype=np.uint8))


def mxfp8_bytes(normed: Tensor) -> tuple[Array, Array]:
    """e4m3 codes [rows, H] and E8M0 scales [rows, H / 32] of rows, uint8 (spec 7.2 step 5).

    A group with an infinity or a NaN has the NaN of both formats.
    """
    x = normed.detach().cpu().double().numpy()
    groups = x.reshape(len(x), -1, 32)
    bad = ~np.isfinite(groups).all(-1)
    values, scales = ops.act_quant(np.where(bad[..., None], 0.0, groups).reshape(x.shape), 32)
    codes = np.searchsorted(_MAGNITUDES, np.abs(values)).astype(np.uint8) | (np.signbit(x) * np.uint8(128))
    assert (np.abs(values) == _MAGNITUDES[codes % 128]).all()
    exponents = np.frexp(scales)[1] - 1 + 127
    return np.where(np.repeat(bad, 32, 1), 0x7F, codes), np.where(bad, 0xFF, exponents).astype(np.uint8)


def swizzled_bytes(scales: Array, tiles: int) -> Array:
    """Linear scales [rows, groups] at the offsets of spec 7.2, zeros elsewhere, [tiles, 512] uint8."""
    table = np.zeros(tiles * 512, np.uint8)
    rows, groups = scales.shape
    across = -(-groups // 4)
    for r in range(rows):
        for g in range(groups):
            offset = ((r >> 7) * across + (g >> 2)) * 512 + (r & 31) * 16 + ((r >> 5) & 3) * 4 + (g & 3)
            table[offset] = scales[r, g]
    return table.reshape(tiles, 512)


def unsigned(tensor: Tensor) -> Array:
    """int8 bytes of a tensor as numpy's uint8."""
    return tensor.cpu().contiguous().numpy().view(np.uint8)
