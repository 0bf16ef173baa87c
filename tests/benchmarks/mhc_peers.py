"""What a user would run instead of the mHC kernels: torch expressions and short Triton kernels."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

RMS_EPS = 1e-20
HC_EPS = 1e-6
ROUNDS = 20


def torch_coefficients(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, ...]:
    u = streams.flatten(1).float()
    m = u @ fn.t() * torch.rsqrt(u.square().mean(1, keepdim=True) + RMS_EPS)
    pre = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + HC_EPS
    post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    k = torch.softmax((m[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4), 2) + HC_EPS
    k = k / (k.sum(1, keepdim=True) + HC_EPS)
    for _ in range(ROUNDS - 1):
        k = k / (k.sum(2, keepdim=True) + HC_EPS)
        k = k / (k.sum(1, keepdim=True) + HC_EPS)
    return pre, post, k


def torch_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return (pre.unsqueeze(2) * streams.float()).sum(1).to(streams.dtype)


def torch_boundary(
    partial: Tensor, streams: Tensor, post: Tensor, comb: Tensor, pre: Tensor, weight: Tensor
) -> tuple[Tensor, ...]:
    mixed = post.unsqueeze(2) * partial.float().unsqueeze(1)
    wide = streams.float()
    for j in range(4):
        mixed = mixed + comb[:, j].unsqueeze(2) * wide[:, j].unsqueeze(1)
    mixed = mixed.to(streams.dtype)
    hidden = torch_collapse(mixed, pre)
    z = hidden.float()
    normed = weight.float() * z * torch.rsqrt(z.square().mean(1, keepdim=True) + 1e-6)
    return mixed, hidden, normed.to(streams.dtype)


@triton.jit
def _boundary(
    partial, streams, post, comb, pre, weight, mixed, hidden, normed, width: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    y = tl.load(partial + row * width + column, inside, 0.0).to(tl.float32)
    z = tl.zeros((block,), tl.float32)
    for k in tl.static_range(4):
        total = tl.load(post + row * 4 + k) * y
        for j in tl.static_range(4):
            stream = tl.load(streams + (row * 4 + j) * width + column, inside, 0.0).to(tl.float32)
            total += tl.load(comb + row * 16 + j * 4 + k) * stream
        rounded = total.to(mixed.dtype.element_ty)
        tl.store(mixed + (row * 4 + k) * width + column, rounded, inside)
        z += tl.load(pre + row * 4 + k) * rounded.to(tl.float32)
    rounded = z.to(hidden.dtype.element_ty)
    tl.store(hidden + row * width + column, rounded, inside)
    z = rounded.to(tl.float32)
    scaled = z * tl.rsqrt(tl.sum(z * z) / width + 1e-6) * tl.load(weight + column, inside, 0.0).to(tl.float32)
    tl.store(normed + row * width + column, scaled.to(normed.dtype.element_ty), inside)


@triton.jit
def _collapse(streams, pre, hidden, width: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    total = tl.zeros((block,), tl.float32)
    for j in tl.static_range(4):
        stream = tl.load(streams + (row * 4 + j) * width + column, inside, 0.0).to(tl.float32)
        total += tl.load(pre + row * 4 + j) * stream
    tl.store(hidden + row * width + column, total.to(hidden.dtype.element_ty), inside)


@triton.jit
def _project(streams, fn, sums, width: tl.constexpr, splits: tl.constexpr, block: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    output = tl.arange(0, 32)
    total = tl.zeros((32,), tl.float32)
    square = tl.zeros((block,), tl.float32)
    for start in range(split * (width // splits), (split + 1) * (width // splits), block):
        column = start + tl.arange(0, block)
        u = tl.load(streams + row * width + column).to(tl.float32)
        f = tl.load(fn + output[:, None] * width + column[None, :], output[:, None] < 24, 0.0)
        total += tl.sum(f * u[None, :], 1)
        square += u * u
    place = sums + (row * splits + split) * 32
    tl.store(place + output, tl.where(output == 24, tl.sum(square), total))


@triton.jit
def _finish(sums, scale, base, pre, post, comb, width: tl.constexpr, splits: tl.constexpr, rounds: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, splits)
    place = sums + (row * splits + split) * 32
    inverse = tl.rsqrt(tl.sum(tl.load(place + 24)) / width + 1e-20)
    four = tl.arange(0, 4)
    head = tl.sum(tl.load(place[:, None] + four[None, :]), 0) * inverse
    tl.store(pre + row * 4 + four, tl.sigmoid(head * tl.load(scale) + tl.load(base + four)) + 1e-6)
    head = tl.sum(tl.load(place[:, None] + 4 + four[None, :]), 0) * inverse
    tl.store(post + row * 4 + four, 2 * tl.sigmoid(head * tl.load(scale + 1) + tl.load(base + 4 + four)))
    sixteen = four[:, None] * 4 + four[None, :]
    k = tl.sum(tl.load(place[:, None, None] + 8 + sixteen[None, :, :]), 0) * inverse
    k = k * tl.load(scale + 2) + tl.load(base + 8 + sixteen)
    k = tl.exp(k - tl.max(k, 1)[:, None])
    k = k / tl.sum(k, 1)[:, None] + 1e-6
    k = k / (tl.sum(k, 0)[None, :] + 1e-6)
    for _ in range(rounds - 1):
        k = k / (tl.sum(k, 1)[:, None] + 1e-6)
        k = k / (tl.sum(k, 0)[None, :] + 1e-6)
    tl.store(comb + row * 16 + sixteen, k)


SPLITS = 16


def triton_boundary(inputs: list[Tensor], outputs: list[Tensor]) -> Callable[[], Any]:
    """A launch of the boundary in one Triton kernel."""
    rows, hidden = inputs[0].shape
    block = triton.next_power_of_2(hidden)
    return lambda: _boundary[(rows,)](*inputs, *outputs, width=hidden, block=block, num_warps=8)


def triton_collapse(inputs: list[Tensor], outputs: list[Tensor]) -> Callable[[], Any]:
    """A launch of the collapse in one Triton kernel."""
    rows, _, hidden = inputs[0].shape
    return lambda: _collapse[(rows, triton.cdiv(hidden, 1024))](
        *inputs, *outputs, width=hidden, block=1024, num_warps=4
    )


def triton_coefficients(inputs: list[Tensor], outputs: list[Tensor]) -> Callable[[], Any]:
    """A launch of the coefficients in two Triton kernels."""
    streams, fn, scale, base = inputs
    rows, width = streams.shape[0], fn.shape[1]
    sums = torch.empty(rows, SPLITS, 32, device="cuda")

    def launch() -> None:
        _project[(rows, SPLITS)](streams, fn, sums, width=width, splits=SPLITS, block=256, num_warps=4)
        _finish[(rows,)](sums, scale, base, *outputs, width=width, splits=SPLITS, rounds=ROUNDS, num_warps=1)

    return launch


def tile_kernels() -> dict[str, Callable[..., tuple[Tensor, ...]]] | str:
    """Boundary and collapse by the package tile-kernels (TileLang), or why it can't be asked.

    Its boundary is three kernels: mixing, collapse, and torch's RMS norm. Of the coefficients it has all but the
    product, which it leaves to another package.
    """
    try:
        from tile_kernels.mhc import mhc_post_fwd, mhc_pre_apply_mix_fwd
    except Exception as error:  # its imports look for compilers and devices, and fail in ways of their own
        return f"tile-kernels does not load: {type(error).__name__}: {str(error).splitlines()[0]}"

    def collapse(streams: Tensor, pre: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.empty_like(streams[:, 0])
        mhc_pre_apply_mix_fwd(streams, pre, hidden)
        return (hidden,)

    def boundary(
        partial: Tensor, streams: Tensor, post: Tensor, comb: Tensor, pre: Tensor, weight: Tensor
    ) -> tuple[Tensor, ...]:
        mixed = mhc_post_fwd(partial[None], streams[None], post[None, ..., None], comb[None])[0]
        (hidden,) = collapse(mixed, pre)
        return mixed, hidden, torch.nn.functional.rms_norm(hidden, hidden.shape[1:], weight, 1e-6)

    return {"mhc_all_reduce": boundary, "hc_collapse": collapse}
