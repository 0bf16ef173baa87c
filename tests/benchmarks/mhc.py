"""Times the mHC kernels beside what a user would run instead, in one run.

    python tests/benchmarks/mhc.py --output FILE.json [--quick]
    python tests/benchmarks/mhc.py --output FILE.json --ranks 2

``--quick`` leaves out torch.compile. Two ranks time the fused all-reduce against NCCL and torch's symmetric
memory, each followed by a boundary kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from dspark_trt.plugins.hc_collapse import HC_COLLAPSE
from dspark_trt.plugins.mhc_all_reduce import MAILBOX_ROWS, MHC_ALL_REDUCE, MHC_ALL_REDUCE_RESIDUAL_ONLY
from dspark_trt.plugins.mhc_coefficients import MHC_COEFFICIENTS
from dspark_trt.runtime_py.capture_order import fork, join
from torch import Tensor

from tests.benchmarks import mhc_peers as peers
from tests.benchmarks.benchmark import (
    WARM_CALLS,
    Report,
    Timing,
    argument_parser,
    cold_sets,
    copies,
    peer_sets,
    time_graph,
    time_sets,
)
from tests.benchmarks.graph_edges import edge_kinds
from tests.gpu.kernel_call import KernelCall
from tests.gpu.mailbox_cases import values_that_differ_in_100_000_calls
from tests.op_examples import UNQUANTIZED

HIDDEN = 5120
ROWS = (1, 5, 10, 20, 40, 80)
COMPILED_ROWS = (5, 80)
PRODUCT_COLUMNS = 1792
"""Of wq_a and wkv together, the first products of V4.1's attention."""
Launch = Callable[[], Any]


def coefficient_inputs(rows: int) -> list[Tensor]:
    width = 4 * HIDDEN
    streams = torch.randn(rows, 4, HIDDEN, device="cuda").bfloat16()
    fn = torch.randn(24, width, device="cuda") * width**-0.5
    return [streams, fn, torch.rand(3, device="cuda"), torch.randn(24, device="cuda")]


def boundary_inputs(rows: int) -> list[Tensor]:
    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, device="cuda")

    wide = [torch.randn(rows, HIDDEN, device="cuda"), torch.randn(rows, 4, HIDDEN, device="cuda")]
    coefficients = [uniform(rows, 4), uniform(rows, 4, 4), uniform(rows, 4)]
    return [*(t.bfloat16() for t in wide), *coefficients, torch.randn(HIDDEN, device="cuda").bfloat16()]


def coefficients_call(inputs: list[Tensor]) -> KernelCall:
    return KernelCall(MHC_COEFFICIENTS, inputs, rms_eps=1e-20, hc_eps=1e-6, sinkhorn_iters=20)


def boundary_call(inputs: list[Tensor], *table: Tensor) -> KernelCall:
    ranks = len(table[0]) if table else 1
    return KernelCall(MHC_ALL_REDUCE, [*inputs, *table], tp_size=ranks, norm_eps=1e-6, **UNQUANTIZED)


def moved_bytes(call: KernelCall) -> int:
    return sum(t.nbytes for t in (*call.inputs, *call.outputs))


def no_work() -> None:
    """What a sublayer does in a graph of boundaries and coefficients only."""


def chain(first: Launch, second: Launch, side: torch.cuda.Stream | None, beside: Launch = no_work) -> Launch:
    """``first``, then ``second`` and ``beside``: one after the other, or ``second`` on ``side`` in the meantime."""

    def launch() -> None:
        first()
        if side is None:
            second(), beside()
            return
        main = torch.cuda.current_stream()
        forked = fork(main, side)
        with torch.cuda.stream(side):
            second()
        beside()
        join(main, side, forked)

    return launch


def pair(one: list[Tensor], side: torch.cuda.Stream | None) -> Launch:
    """A boundary, then the coefficients of the streams it wrote, from six and three inputs."""
    boundary = boundary_call(one[:6])
    return chain(boundary.launch, coefficients_call([boundary.outputs[0], *one[6:]]).launch, side)


def assert_same(name: str, got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """A peer that computes something else is no peer."""
    for g, w in zip(got, want, strict=True):
        error = ((g.double() - w.double()).norm() / w.double().norm()).item()
        if not error < 1e-2:
            raise RuntimeError(f"{name} differs from the kernel by {error:.2g}")


def one_gpu(report: Report, quick: bool) -> None:
    kinds = {
        "mhc_coefficients": (
            coefficient_inputs,
            coefficients_call,
            peers.torch_coefficients,
            peers.triton_coefficients,
        ),
        "mhc_all_reduce": (boundary_inputs, boundary_call, peers.torch_boundary, peers.triton_boundary),
        "hc_collapse": (
            lambda rows: [boundary_inputs(rows)[1], torch.rand(rows, 4, device="cuda")],
            lambda inputs: KernelCall(HC_COLLAPSE, inputs),
            peers.torch_collapse,
            peers.triton_collapse,
        ),
    }
    replays = 50 if quick else 200
    third = peers.tile_kernels()
    if isinstance(third, str):
        report.notes.append(third)
        third = {}
    for name, (draw, make, expression, in_triton) in kinds.items():
        for rows in ROWS:
            inputs = draw(rows)
            ours = make(inputs)
            outputs = [t.clone() for t in ours.run()]
            functions = {"torch eager": expression}
            if rows in COMPILED_ROWS and not quick:
                functions["torch.compile"] = torch.compile(expression, dynamic=False)
                functions |= {"tile-kernels": third[name]} if name in third else {}
            for peer, function in functions.items():
                found = function(*inputs)
                assert_same(f"{name}, {peer}", found if isinstance(found, tuple) else (found,), outputs)
            in_triton(inputs, ours.outputs)()
            assert_same(f"{name}, simple Triton", ours.outputs, outputs)
            for cache in ("cold", "warm"):
                sets = copies(inputs, cold_sets(moved_bytes(ours)) if cache == "cold" else 1)
                timing = time_sets(lambda one, make=make: make(one).launch, sets, cache, replays)
                beside = {
                    peer: time_sets(
                        lambda one, f=f: lambda: f(*one), sets[: peer_sets(peer, len(sets))], cache, replays // 5
                    ).median_us
                    for peer, f in functions.items()
                }
                beside["simple Triton"] = time_sets(
                    lambda one, t=in_triton, like=outputs: t(one, [torch.empty_like(o) for o in like]),
                    sets,
                    cache,
                    replays,
                ).median_us
                facts = {"rows": rows, "hidden": HIDDEN, "cache": cache, "moved_bytes": moved_bytes(ours)}
                report.add(name, timing, peers=beside, **facts)
    for rows in ROWS:
        boundary = boundary_inputs(rows)
        residual = KernelCall(MHC_ALL_REDUCE_RESIDUAL_ONLY, boundary[:4], tp_size=1)
        for cache in ("cold", "warm"):
            facts = {"rows": rows, "hidden": HIDDEN, "cache": cache}
            sets = copies(boundary[:4], cold_sets(moved_bytes(residual)) if cache == "cold" else 1)
            timing = time_sets(
                lambda one: KernelCall(MHC_ALL_REDUCE_RESIDUAL_ONLY, one, tp_size=1).launch, sets, cache, replays
            )
            report.add("mhc_all_reduce_residual_only", timing, moved_bytes=moved_bytes(residual), **facts)
            time_pairs(report, rows, cache, replays)


def time_pairs(report: Report, rows: int, cache: str, replays: int, side: torch.cuda.Stream | None = None) -> None:
    """A boundary, then the coefficients of its streams, which wait for it on ``side`` if that is given."""
    boundary, (_, *parameters) = boundary_inputs(rows), coefficient_inputs(rows)
    size = sum(t.nbytes for t in (*boundary, *parameters)) + boundary[1].nbytes
    sets = copies([*boundary, *parameters], cold_sets(size) if cache == "cold" else 1)
    timing = time_sets(lambda one: pair(one, side), sets, cache, replays)
    facts = {"rows": rows, "hidden": HIDDEN, "cache": cache, "streams": 1 if side is None else 2}
    report.add("mhc_boundary_and_coefficients", timing, moved_bytes=size, **facts)


def time_beside_a_product(report: Report, rows: int, side: torch.cuda.Stream, replays: int) -> None:
    """What coefficients add to a boundary and a product that doesn't need them, as a sublayer's first doesn't: on the
    same stream, or on ``side`` while the product runs."""
    boundary, (_, *parameters) = boundary_inputs(rows), coefficient_inputs(rows)
    weight = torch.randn(HIDDEN, PRODUCT_COLUMNS, device="cuda").bfloat16()

    def made(side: torch.cuda.Stream | None, with_coefficients: bool) -> Callable[[list[Tensor]], Launch]:
        def make(one: list[Tensor]) -> Launch:
            first = boundary_call(one[:6])
            second = coefficients_call([first.outputs[0], *one[6:9]]).launch if with_coefficients else no_work
            product = torch.empty(rows, PRODUCT_COLUMNS, device="cuda", dtype=weight.dtype)
            return chain(first.launch, second, side, lambda: torch.mm(first.outputs[2], one[9], out=product))

        return make

    inputs = [*boundary, *parameters, weight]
    size = sum(t.nbytes for t in inputs) + boundary[1].nbytes
    sets = copies(inputs, cold_sets(size))
    timing = time_sets(made(side, True), sets, "cold", replays)
    peers = {"one stream": time_sets(made(None, True), sets, "cold", replays).median_us}
    without = time_sets(made(None, False), sets, "cold", replays).median_us
    facts = {
        "rows": rows,
        "hidden": HIDDEN,
        "cache": "cold",
        "streams": 2,
        "without_coefficients_us": round(without, 3),
    }
    report.add("mhc_boundary_and_coefficients_beside_a_product", timing, peers=peers, moved_bytes=size, **facts)


def cost_of_a_fork(side: torch.cuda.Stream, replays: int) -> dict[str, Any]:
    """What two streams cost in a graph without any work, and how nodes wait for each other in ours."""
    found: dict[str, Any] = {}
    inputs = [*boundary_inputs(5), *coefficient_inputs(5)[1:]]
    for name, stream in (("one stream", None), ("two streams", side)):

        def empty() -> None:
            torch.cuda._sleep(0)

        # A boundary is one kernel, coefficients are two.
        launch = chain(empty, lambda: (empty(), empty()), stream)
        ours = pair(inputs, stream)
        ours()
        found[name] = {
            "three_empty_kernels_us": time_graph([launch] * WARM_CALLS, replays).median_us,
            "edges_of_ten_pairs": edge_kinds(ours, 10),
        }
    return found


def rank_main(rank: int, ranks: int, port: int, output: Path, quick: bool) -> None:
    """What each of the ranks runs."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric
    from dspark_trt.runtime_py.mailbox import Mailbox

    torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", f"tcp://127.0.0.1:{port}", world_size=ranks, rank=rank, device_id=device)
    communicator = _Collectives(rank, ranks)
    box = Mailbox.create(communicator, HIDDEN, torch.bfloat16, device, timeout_s=60)
    report = Report()
    replays = 50 if quick else 200

    def slowest(launches: list[Launch]) -> Timing:
        """Every rank's figures; the slowest counts."""
        own = time_graph(launches, replays, meet=communicator.barrier)
        everyone = communicator.all_gather_object(own)
        return max(everyone, key=lambda t: t.median_us)

    def nccl(partial: Tensor, rest: Launch) -> Launch:
        # The average keeps values finite over thousands of calls in place.
        return lambda: (dist.all_reduce(partial, dist.ReduceOp.AVG), rest())

    group = dist.group.WORLD
    assert group is not None
    for rows in (*ROWS, 160, MAILBOX_ROWS):
        inputs = boundary_inputs(rows)
        shared = symmetric.empty(rows * HIDDEN, dtype=torch.bfloat16, device=device)
        symmetric.rendezvous(shared, group.group_name)
        shared.copy_(inputs[0].flatten())
        size = moved_bytes(boundary_call(inputs))
        for cache in ("cold", "warm"):
            sets = cold_sets(size) if cache == "cold" else 1
            times = 1 if cache == "cold" else WARM_CALLS
            every = copies(inputs, sets)
            fused = [boundary_call(one, box.tensor) for one in every]
            timing = slowest([call.launch for call in fused] * times)
            box.check()
            beside = {}
            simple = [peers.triton_boundary(one, [torch.empty_like(t) for t in fused[0].outputs]) for one in every]
            alone = [boundary_call(one) for one in every]
            for label, rests in (("our boundary", [c.launch for c in alone]), ("simple Triton", simple)):
                pairs = [nccl(one[0], rest) for one, rest in zip(every, rests, strict=True)]
                beside[f"NCCL + {label}"] = slowest(pairs * times).median_us
                reduce = torch.ops.symm_mem.one_shot_all_reduce

                def pair(rest: Launch, reduce: Any = reduce, shared: Tensor = shared) -> Launch:
                    return lambda: (reduce(shared, "sum", group.group_name), rest())

                beside[f"one-shot + {label}"] = slowest([pair(rest) for rest in rests] * times).median_us
            if rank == 0:
                facts = {"rows": rows, "hidden": HIDDEN, "cache": cache, "moved_bytes": size, "ranks": ranks}
                report.add("mhc_all_reduce", timing, peers=beside, **facts)
    if not quick:
        seed = communicator.all_gather_object(int(torch.seed() % 2**31))[0]
        wrong = sum(communicator.all_gather_object(values_that_differ_in_100_000_calls(box, rank, seed, HIDDEN)))
        report.summary["correctness"] = {"calls_of_each_rank": 100_000, "values_that_differ": wrong, "seed": seed}
        box.check()
    if rank == 0:
        report.write(output)
    torch.cuda.synchronize()
    communicator.barrier()
    box.close()
    dist.destroy_process_group()


class _Collectives:
    """What a mailbox asks of a communicator, over torch.distributed."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def all_gather_object(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier()
        torch.cuda.synchronize()


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.ranks > 1:
        import socket

        import torch.multiprocessing as multiprocessing

        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        multiprocessing.spawn(
            rank_main, (arguments.ranks, port, arguments.output, arguments.quick), nprocs=arguments.ranks
        )
        return
    report = Report()
    one_gpu(report, arguments.quick)
    report.write(arguments.output)
    side = torch.cuda.Stream()
    for rows in ROWS:
        for cache in ("cold", "warm"):
            time_pairs(report, rows, cache, 50, side)
        time_beside_a_product(report, rows, side, 50)
    report.summary["two_streams"] = cost_of_a_fork(side, 50)
    print(report.summary, flush=True)
    report.write(arguments.output)


if __name__ == "__main__":
    main()
