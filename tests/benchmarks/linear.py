"""Times QuantizedLinear and RoutedExperts beside torch, in one run.

    python tests/benchmarks/linear.py --output FILE.json [--quick]

The layers of V4.1-Flash's draft on one GPU, and two of V4-Pro for its 128 x 128 blocks. No library takes blocks of
32 x 32 with E8M0 scales, so only the peers called "same" compute what the kernel does; the others show what a weight
of the same size costs in another format. ``--quick`` takes fewer row counts and replays.

``bytes`` of RoutedExperts counts the weights of the experts that its rows chose, the mean over the calls of a graph,
each with a routing of its own. These are more than an L2 holds from five rows on; there is no warm line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from dspark_trt.plugins.numerics import (
    FP4_BLOCK,
    act_quant_dequant,
    decode_e4m3,
    decode_e8m0,
    decode_fp4,
    expand_block_scale,
)
from dspark_trt.plugins.quantized_linear import QUANTIZED_LINEAR
from dspark_trt.plugins.routed_experts import ROUTED_EXPERTS, swiglu
from torch import Tensor

from tests.benchmarks.benchmark import Report, argument_parser, cold_sets, time_graph, time_sets
from tests.gpu.kernel_call import KernelCall

ROWS = (1, 5, 10, 20, 40, 64)
QUICK_ROWS = (5, 40)
LAYERS = {  # output channels, input channels, block
    "wkv": (512, 5120, 32),
    "wq_a": (1280, 5120, 32),
    "wq_b": (32768, 1280, 32),
    "wo_b": (5120, 8192, 32),
    "main_proj": (5120, 15360, 32),
    "shared_w1": (2304, 5120, 32),
    "shared_w2": (5120, 2304, 32),
    "v4_pro_wq_b": (65536, 1536, 128),
    "v4_pro_wo_b": (7168, 16384, 128),
}
EXPERTS, TOP_K, HIDDEN, INNER, LIMIT = 128, 3, 5120, 2304, 10.0
ROUTINGS = 12
Launch = Callable[[], Any]


def random_bytes(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.int16, device="cuda").to(torch.uint8).view(torch.int8)


def layer_inputs(rows: int, columns: int, channels: int, block: int) -> list[Tensor]:
    codes = random_bytes(0, 0x7F, columns, channels)  # all but NaN, positive; signs beside them
    codes = torch.where(torch.rand(columns, channels, device="cuda") < 0.5, codes, codes | -128)
    scale = random_bytes(112, 116, -(-columns // block), channels // block)
    return [torch.randn(rows, channels, device="cuda").bfloat16(), codes, scale]


def dequantized(weight: Tensor, scale: Tensor, block: int) -> Tensor:
    shape = (weight.shape[0], weight.shape[1])
    return (decode_e4m3(weight) * expand_block_scale(decode_e8m0(scale), (block, block), shape)).bfloat16()


def eager_linear(inputs: list[Tensor], block: int) -> Tensor:
    x, weight, scale = inputs
    return F.linear(act_quant_dequant(x, block), dequantized(weight, scale, block))


def bf16_launch(inputs: list[Tensor], block: int) -> Launch:
    x, weight = act_quant_dequant(inputs[0], block), dequantized(inputs[1], inputs[2], block)
    return lambda: F.linear(x, weight)


def scaled_launch(inputs: list[Tensor], block: int | None) -> Launch:
    """FP8 by torch._scaled_mm over rows padded to 16, quantised before: a scale per tensor, or per 128 x 128 block."""
    x, weight, _ = inputs
    rows, (columns, channels) = -(-len(x) // 16) * 16, weight.shape
    a = F.pad(x, (0, 0, 0, rows - len(x))).to(torch.float8_e4m3fn)
    b = weight.view(torch.float8_e4m3fn).t()
    if block is None:
        scale_a = scale_b = torch.ones((), device="cuda")
    else:
        scale_a = torch.ones(channels // block, rows, device="cuda").t()
        scale_b = torch.ones(columns // block, channels // block, device="cuda").t()
    return lambda: torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)


def check_same(name: str, found: Tensor, wanted: Tensor) -> None:
    """A peer that computes something else is no peer; it sums in bf16 products of another order."""
    distance = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    if not distance < 2e-2:
        raise RuntimeError(f"{name} computes something else: relative distance {distance:.1e}")


def time_layer(report: Report, layer: str, rows: int, replays: int) -> None:
    columns, channels, block = LAYERS[layer]
    sets = [layer_inputs(rows, columns, channels, block) for _ in range(cold_sets(columns * channels, most=60))]
    first = KernelCall(QUANTIZED_LINEAR, sets[0], block=block).run()[0]
    check_same("torch eager", eager_linear(sets[0], block), first)
    makers: dict[str, Callable[[list[Tensor]], Launch]] = {
        "torch eager, dequantise and multiply (same)": lambda one: lambda: eager_linear(one, block),
        "cuBLAS bf16, dequantised before": lambda one: bf16_launch(one, block),
        "torch._scaled_mm, one scale": lambda one: scaled_launch(one, None),
    }
    if block == 128:
        makers["torch._scaled_mm, 1x128 and 128x128"] = lambda one: scaled_launch(one, block)
    moved = sets[0][1].nbytes + sets[0][2].nbytes + sets[0][0].nbytes + first.nbytes
    for cache in ("cold", "warm"):
        ours = time_sets(lambda one: KernelCall(QUANTIZED_LINEAR, one, block=block).launch, sets, cache, replays)
        peers = {}
        for name, make in makers.items():
            try:
                make(sets[0])()
                few = sets[:3] if "eager" in name else sets  # bound by its own traffic, not by the cache
                peers[name] = time_sets(make, few, cache, replays).median_us
            except (RuntimeError, ValueError) as error:
                report.notes.append(f"{layer}, {rows} rows: {name} does not run: {str(error).splitlines()[0]}")
        report.add(
            f"quantized_linear_{layer}",
            ours,
            rows=rows,
            hidden=channels,
            cache=cache,
            moved_bytes=moved,
            peers=peers,
            columns=columns,
            block=block,
        )


def expert_weights() -> list[Tensor]:
    packed = []
    for n, k in ((INNER, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN)):
        packed += [random_bytes(0, 256, EXPERTS, n, k // 2), random_bytes(118, 121, EXPERTS, n, k // FP4_BLOCK)]
    return packed


def route(rows: int) -> list[Tensor]:
    indices = torch.rand(rows, EXPERTS, device="cuda").argsort(-1)[:, :TOP_K].int().contiguous()
    return [torch.randn(rows, HIDDEN, device="cuda").bfloat16(), indices, torch.rand(rows, TOP_K, device="cuda")]


def dense_experts(packed: list[Tensor]) -> list[Tensor]:
    """w1, w2, w3 in bf16, [E, K, N]; an expert at a time, since float32 of all would not fit."""
    dense = []
    for codes, scale in zip(packed[::2], packed[1::2], strict=True):
        one = [
            (decode_fp4(c) * decode_e8m0(s).repeat_interleave(FP4_BLOCK, -1)).bfloat16()
            for c, s in zip(codes, scale, strict=True)
        ]
        dense.append(torch.stack(one).transpose(1, 2))
    return dense


def grouped_experts(routing: list[Tensor], dense: list[Tensor]) -> Tensor:
    """The experts by torch's grouped products over rows sorted by expert; bf16 weights, activations quantised."""
    x, indices, weights = routing
    order = indices.flatten().argsort(stable=True)
    chosen = indices.flatten().unsqueeze(1) == torch.arange(EXPERTS, device=x.device)
    ends = chosen.sum(0).cumsum(0).to(torch.int32)
    rows = order // TOP_K
    a = act_quant_dequant(x, 32)[rows]
    gate, up = torch._grouped_mm(a, dense[0], offs=ends), torch._grouped_mm(a, dense[2], offs=ends)
    inner = swiglu(gate, up, LIMIT) * weights.flatten()[order].unsqueeze(-1)
    product = torch._grouped_mm(act_quant_dequant(inner.bfloat16(), 32), dense[1], offs=ends)
    return torch.zeros_like(x, dtype=torch.float32).index_add_(0, rows, product.float())


def time_experts(report: Report, row_counts: tuple[int, ...], replays: int) -> None:
    packed = expert_weights()
    attributes = {"group": 32, "hidden_size": HIDDEN, "intermediate_size": INNER, "swiglu_limit": LIMIT}
    dense = dense_experts(packed)
    expert_bytes = sum(t[0].nbytes for t in packed)
    for rows in row_counts:
        routings = [route(rows) for _ in range(ROUTINGS)]
        calls = [KernelCall(ROUTED_EXPERTS, [*routing, *packed], **attributes) for routing in routings]
        result = calls[0].run()[0]
        peers = {}
        try:
            check_same("torch grouped_mm", grouped_experts(routings[0], dense), result)
            launches = [lambda one=one: grouped_experts(one, dense) for one in routings]
            peers["torch grouped_mm, bf16 weights"] = time_graph(launches, replays).median_us
        except (RuntimeError, ValueError, AttributeError) as error:
            report.notes.append(f"experts, {rows} rows: torch grouped_mm does not run: {str(error).splitlines()[0]}")
        distinct = sum(len(routing[1].unique()) for routing in routings) / ROUTINGS
        moved = int(distinct * expert_bytes) + routings[0][0].nbytes + result.nbytes
        report.add(
            "routed_experts",
            time_graph([one.launch for one in calls], replays),
            rows=rows,
            hidden=HIDDEN,
            cache="cold",
            moved_bytes=moved,
            peers=peers,
            experts=round(distinct, 1),
        )


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    torch.manual_seed(0)
    report = Report()
    replays, row_counts = (20, QUICK_ROWS) if arguments.quick else (40, ROWS)
    for layer in LAYERS:
        for rows in row_counts:
            time_layer(report, layer, rows, replays)
    time_experts(report, row_counts, replays)
    cold = {r["name"]: r for r in report.results if r["cache"] == "cold" and r["rows"] == 5}
    report.summary["share_of_floor_at_5_rows"] = {
        name: round(line["floor_us"] / line["median_us"], 3) for name, line in cold.items()
    }
    report.write(arguments.output)


if __name__ == "__main__":
    main()
