"""QuantizedLinear's and RoutedExperts' kernels against float64 arithmetic over the same quantised operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dspark_trt.plugins.numerics import decode_e4m3
from dspark_trt.plugins.op import Op
from dspark_trt.plugins.quantized_linear import QUANTIZED_LINEAR
from dspark_trt.plugins.routed_experts import ROUTED_EXPERTS
from torch import Tensor

from tests.gpu.kernel_call import KernelCall, bits, call, capture
from tests.gpu.linear_cases import DEVICE, LIMIT, Draw, attributes_of, check_experts, check_linear

pytestmark = pytest.mark.gpu

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)

activations = pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda t: str(t).removeprefix("torch."))
blocks = pytest.mark.parametrize("block", [32, 128])


def linear(inputs: list[Tensor], block: int) -> Tensor:
    return call(QUANTIZED_LINEAR, inputs, block=block)[0]


TINY = [(128, 256, 32), (512, 128, 32), (256, 384, 32), (128, 32, 32), (80, 256, 128), (96, 96, 32), (1, 128, 128)]
RELEASED = [
    (1280, 5120, 32),  # V4.1: wq_a, wkv, wq_b, wo_b, main_proj, shared w1, w2
    (512, 5120, 32),
    (32768, 1280, 32),
    (5120, 8192, 32),
    (5120, 15360, 32),
    (2304, 5120, 32),
    (5120, 2304, 32),
    (5120, 1152, 32),  # w2 of one rank of two
    (5120, 288, 32),  # of eight: a last unit of 32 channels
    (1536, 7168, 128),  # V4-Pro: wq_a, wo_b of one rank of eight
    (7168, 2048, 128),
    (4104, 384, 128),  # a last tile of 8 rows, in a block of its own
]


@activations
@pytest.mark.parametrize(("columns", "channels", "block"), TINY)
def test_small_products_against_float64(
    seed: int, activation: torch.dtype, columns: int, channels: int, block: int
) -> None:
    """CK-5, GR-6: the tiny model's shapes, partial tiles, fewer units than warps."""
    for rows in (1, 5, 12):
        inputs = Draw(seed + rows, activation).linear(rows, columns, channels, block)
        check_linear(inputs, linear(inputs, block), block)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(("columns", "channels", "block"), RELEASED)
def test_released_products_against_float64(seed: int, columns: int, channels: int, block: int, rows: int) -> None:
    inputs = Draw(seed).linear(rows, columns, channels, block)
    check_linear(inputs, linear(inputs, block), block)


@blocks
@pytest.mark.parametrize("columns", [80, 4112], ids=["16 rows per thread block", "32"])
@pytest.mark.parametrize("rows", [*range(1, 17), 40, 64, 65, 256, 1025])
def test_row_counts(seed: int, rows: int, columns: int, block: int) -> None:
    """Every number of matrix instructions, chunks of 64 rows, and more rows than one launch takes."""
    inputs = Draw(seed).linear(rows, columns, 384, block)
    check_linear(inputs, linear(inputs, block), block)


@activations
@blocks
@pytest.mark.parametrize("columns", [80, 4112])
def test_a_row_alone_and_in_a_batch(seed: int, activation: torch.dtype, block: int, columns: int) -> None:
    """HC-7: a row's bits are the same alone, in any batch, and at any place."""
    x, *weight = Draw(seed, activation).linear(100, columns, 1280, block)
    everything = linear([x, *weight], block)
    for rows in (1, 2, 5, 8, 9, 16, 33, 64, 65):
        picked = torch.randperm(100, generator=torch.Generator().manual_seed(seed + rows))[:rows].to(DEVICE)
        part = linear([x[picked].contiguous(), *weight], block)
        assert torch.equal(bits(part), bits(everything[picked])), f"{rows} rows"


@blocks
def test_every_code_is_decoded(block: int) -> None:
    """A row of x with a single 1 picks a column of the weight; all e4m3 codes but NaN, subnormal ones too."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat(2)[:384].to(DEVICE)
    weight = codes.repeat(32, 1)
    scale = torch.full((1, 384 // block), 127, dtype=torch.int8, device=DEVICE)
    eye = torch.eye(384, device=DEVICE, dtype=torch.bfloat16)
    y = linear([eye, weight, scale], block)
    assert torch.equal(y.float(), decode_e4m3(codes).unsqueeze(1).expand(-1, 32))


@pytest.mark.parametrize("byte", [0, 1, 254])
def test_the_ends_of_the_scales_range(seed: int, byte: int) -> None:
    """2^-127 is subnormal in float32; 2^127 times the smallest activation scale is not too large."""
    x, weight, scale = Draw(seed, torch.float32).linear(3, 32, 128, 32)
    scale[:, 1] = torch.tensor(byte, dtype=torch.uint8).view(torch.int8).item()
    x[:, 32:64] = torch.where(x[:, 32:64] > 0, 2.0**-13, 0.0) if byte == 254 else x[:, 32:64] * 2.0**120
    check_linear([x, weight, scale], linear([x, weight, scale], 32), 32)


def test_nan_stays_in_its_row_or_column(seed: int) -> None:
    x, weight, scale = Draw(seed).linear(9, 4128, 256, 32)
    x[4, 77] = float("nan")
    scale[3, 2] = -1  # byte 255, NaN: weight rows 96 .. 127
    y = linear([x, weight, scale], 32)
    expected = torch.zeros_like(y, dtype=torch.bool)
    expected[4] = expected[:, 96:128] = True
    assert torch.equal(y.isnan(), expected)


@pytest.mark.parametrize("columns", [80, 4112])
def test_nothing_behind_the_weights_counts(seed: int, columns: int) -> None:
    """K ends within a unit and N within a tile; NaN codes and scales lie after the last ones."""
    inputs = Draw(seed).linear(5, columns, 160, 32)
    fenced = [inputs[0]]
    for tensor in inputs[1:]:
        buffer = torch.full((tensor.numel() + 2**14,), 0x7F, dtype=torch.int8, device=DEVICE)
        buffer[tensor.numel() :] = 0x7F if tensor is inputs[1] else -1
        fenced.append(buffer[: tensor.numel()].view(tensor.shape).copy_(tensor))
    check_linear(inputs, linear(fenced, 32), 32)


# Experts ------------------------------------------------------------------------------------------------


def experts(inputs: list[Tensor], group: int = 32, limit: float = LIMIT) -> Tensor:
    return call(ROUTED_EXPERTS, inputs, **attributes_of(inputs, group, limit))[0]


EXPERTS = [  # experts, top_k, hidden, inner, group
    (4, 2, 256, 128, 32),  # the tiny draft and target
    (8, 2, 256, 128, 32),
    (6, 3, 128, 64, 32),
    (5, 1, 96, 32, 32),
    (3, 3, 128, 128, 128),
    (7, 6, 256, 384, 128),
]


@activations
@pytest.mark.parametrize("rows", [1, 5, 12, 40])
@pytest.mark.parametrize(("count", "top_k", "hidden", "inner", "group"), EXPERTS)
def test_small_experts_against_float64(
    seed: int, activation: torch.dtype, rows: int, count: int, top_k: int, hidden: int, inner: int, group: int
) -> None:
    inputs = Draw(seed, activation).experts(rows, count, top_k, hidden, inner)
    check_experts(inputs, experts(inputs, group), group)


@pytest.mark.parametrize("rows", [1, 5, 6, 40, 64])
@pytest.mark.parametrize(
    ("count", "top_k", "hidden", "inner", "group"),
    [(128, 3, 5120, 2304, 32), (64, 6, 5120, 1152, 32), (32, 6, 5120, 576, 32), (48, 6, 4096, 2048, 128)],
    ids=["V4.1 draft", "one rank of two", "one of four", "V4"],
)
def test_released_experts_against_float64(
    seed: int, rows: int, count: int, top_k: int, hidden: int, inner: int, group: int
) -> None:
    inputs = Draw(seed).experts(rows, count, top_k, hidden, inner)
    check_experts(inputs, experts(inputs, group), group)


@pytest.mark.parametrize("rows", [*range(1, 17), 33, 64, 256, 1025])
def test_row_counts_of_experts(seed: int, rows: int) -> None:
    inputs = Draw(seed).experts(rows, 5, 2, 128, 96)
    check_experts(inputs, experts(inputs))


@activations
def test_the_clamp_acts(seed: int, activation: torch.dtype) -> None:
    inputs = Draw(seed, activation).experts(20, 4, 2, 128, 64)
    tight = experts(inputs, limit=0.5)
    check_experts(inputs, tight, limit=0.5)
    assert float((tight - experts(inputs)).abs().max()) > 0.1 * float(tight.abs().max())


@activations
def test_a_row_alone_and_in_a_batch_of_experts(seed: int, activation: torch.dtype) -> None:
    """HC-7: alone, among rows of other experts, and in a crowd at one expert."""
    x, indices, weights, *packed = Draw(seed, activation).experts(100, 6, 2, 1280, 64)
    indices[:70, 0], indices[:70, 1] = 3, 5
    everything = experts([x, indices, weights, *packed])
    for rows in (1, 2, 5, 8, 9, 16, 33, 64):
        picked = torch.randperm(100, generator=torch.Generator().manual_seed(seed + rows))[:rows].to(DEVICE)
        part = experts([*(t[picked].contiguous() for t in (x, indices, weights)), *packed])
        assert torch.equal(bits(part), bits(everything[picked])), f"{rows} rows"


def test_experts_are_added_in_ascending_order(seed: int) -> None:
    """Whatever the router's order was: to the bit what one call per expert gives, added in float32."""
    x, indices, weights, *packed = Draw(seed, torch.float32).experts(9, 16, 6, 128, 64)
    order = indices.argsort(-1)
    total = torch.zeros_like(x)
    for place in order.split(1, -1):
        total += experts([x, *(t.gather(-1, place).contiguous() for t in (indices, weights)), *packed])
    assert torch.equal(bits(experts([x, indices, weights, *packed])), bits(total))


def test_experts_out_of_range_add_nothing(seed: int) -> None:
    x, indices, weights, *packed = Draw(seed).experts(6, 8, 3, 128, 64)
    wild = indices.clone()
    for place, value in (((0, 1), -1), ((2, 0), 8), ((5, 2), 2**30)):
        wild[place], weights[place] = value, 0.0
    wild[3] = -7
    weights[3] = 0.0
    assert torch.equal(experts([x, wild, weights, *packed]), experts([x, indices, weights, *packed]))
    assert not experts([x, torch.full_like(wild, -1), weights, *packed]).any()


@pytest.mark.parametrize("inner", [128, 96], ids=["scales in words", "in bytes"])
def test_nan_in_an_expert(seed: int, inner: int) -> None:
    """A NaN scale of w2 reaches one channel of the rows that chose the expert; a NaN activation its row."""
    x, indices, weights, *packed = Draw(seed).experts(9, 4, 2, 128, inner)
    packed[3][2, 37, 0] = -1  # byte 255, after the last one of channel 36
    packed[3][2, 38, 0] = 0  # 2^-127
    x[5, 100] = float("nan")
    y = experts([x, indices, weights, *packed])
    expected = torch.zeros_like(y, dtype=torch.bool)
    expected[(indices == 2).any(-1), 37] = True
    expected[5] = True
    assert torch.equal(y.isnan(), expected)


# Both ---------------------------------------------------------------------------------------------------


def one_call(name: str, seed: int, activation: torch.dtype, rows: int) -> tuple[Op, list[Tensor], dict[str, Any]]:
    if name == "QuantizedLinear":
        return QUANTIZED_LINEAR, Draw(seed, activation).linear(rows, 160, 256, 32), {"block": 32}
    inputs = Draw(seed, activation).experts(rows, 6, 3, 128, 64)
    return ROUTED_EXPERTS, inputs, attributes_of(inputs)


both = pytest.mark.parametrize(("name", "nodes"), [("QuantizedLinear", 2), ("RoutedExperts", 5)])


@both
@pytest.mark.parametrize("rows", [1, 9])
def test_a_graph_replays_what_eager_calls_compute(seed: int, name: str, nodes: int, rows: int) -> None:
    """GR-1, GR-4, GR-6: captured with one batch, replayed with another, many times, from poisoned scratch memory."""
    calls = [one_call(name, seed + i, torch.bfloat16, rows) for i in range(2)]
    wanted = [call(op, inputs, **attributes)[0].clone() for op, inputs, attributes in calls]
    captured = [tensor.clone() for tensor in calls[0][1]]
    one = KernelCall(calls[0][0], captured, **calls[0][2])
    graph, count = capture(one)
    assert count == nodes
    for turn in range(20):
        for target, source in zip(captured, calls[turn % 2][1], strict=True):
            target.copy_(source)
        one.poison()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(one.outputs[0]), bits(wanted[turn % 2])), f"replay {turn}"


def test_back_to_back_calls_share_a_workspace(seed: int) -> None:
    """GR-8: kernels that start early must not meet what the call before them still reads."""
    calls = [one_call("RoutedExperts", seed + i, torch.bfloat16, 8) for i in range(6)]
    wanted = [call(op, inputs, **attributes)[0].clone() for op, inputs, attributes in calls]
    queue = [KernelCall(op, inputs, **attributes) for op, inputs, attributes in calls]
    for one in queue[1:]:
        one._workspace = queue[0]._workspace
    torch.cuda.synchronize()
    for one in queue:
        one.launch()
    torch.cuda.synchronize()
    for one, expected in zip(queue, wanted, strict=True):
        assert torch.equal(bits(one.outputs[0]), bits(expected))


def refused(op: Op, inputs: list[Tensor], attributes: dict[str, Any], words: str) -> None:
    one = KernelCall(op, inputs, **attributes)
    with pytest.raises(RuntimeError, match=words):
        one.launch()
    assert bool((bits(one.outputs[0]) == -1).all())


@pytest.mark.parametrize(("channels", "block"), [(128, 64), (256, 256), (48, 16), (2**16 + 32, 32)])
def test_unsupported_products_are_refused(channels: int, block: int) -> None:
    inputs = Draw(0).linear(1, block, channels, block)
    refused(QUANTIZED_LINEAR, inputs, {"block": block}, "shape or attribute")


@pytest.mark.parametrize(
    ("count", "top_k", "hidden", "inner", "group"),
    [(2, 1, 128, 64, 64), (2, 1, 128, 96, 128), (2, 1, 96, 128, 128), (1025, 1, 32, 32, 32), (17, 17, 32, 32, 32)],
)
def test_unsupported_experts_are_refused(count: int, top_k: int, hidden: int, inner: int, group: int) -> None:
    inputs = Draw(0).experts(1, count, top_k, hidden, inner)
    refused(ROUTED_EXPERTS, inputs, attributes_of(inputs, group), "shape or attribute")


@both
@pytest.mark.parametrize("offset", [None, 2])
def test_bad_pointers_are_refused(name: str, nodes: int, offset: int | None) -> None:
    op, inputs, attributes = one_call(name, 0, torch.bfloat16, 2)
    for tensor in KernelCall(op, inputs, **attributes).pointers:
        one = KernelCall(op, inputs, **attributes)
        one.pointers[tensor] = 0 if offset is None else one.pointers[tensor] + offset
        with pytest.raises(RuntimeError, match="null or not aligned"):
            one.launch()


@both
def test_no_rows_is_a_no_op(name: str, nodes: int) -> None:
    op, inputs, attributes = one_call(name, 0, torch.bfloat16, 2)
    one = KernelCall(op, inputs, **attributes)
    one.sizes["rows"] = 0
    one.launch()
    assert bool((bits(one.outputs[0]) == -1).all())


def test_weights_beyond_four_gigabytes(seed: int) -> None:
    """GR-7: offsets into the weights are 64-bit."""
    columns, channels = 2**20 - 8, 2**12 + 2**11
    if torch.cuda.mem_get_info()[0] < 2**34:
        pytest.skip("needs 16 GiB of free GPU memory")
    draw = Draw(seed)
    weight = torch.zeros(columns, channels, dtype=torch.int8, device=DEVICE)
    weight[-40:] = draw.codes(40, channels, fp8=True)
    scale = draw.scales(-(-columns // 32), channels // 32)
    x = draw.rows(3, channels)
    y = linear([x, weight, scale], 32)
    tail = columns // 32 * 32 - 32
    check_linear([x, weight[tail:], scale[tail // 32 :]], y[:, tail:], 32)
