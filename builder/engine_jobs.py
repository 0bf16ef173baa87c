"""Exports and builds of single networks: one after the other, or in processes of their own."""

from __future__ import annotations

import dataclasses
import hashlib
import signal
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from ..plugins.tensorrt_api import TensorRT
from . import engine
from .build_config import BuildConfig, Kind, Lowering
from .checkpoint import ShardConfig

Built = tuple[dict[str, Any], set[str]]
"""What the directory says of a plan's file, and the plugins in it."""


@dataclass(frozen=True)
class Job:
    """One network of one rank to build into ``file``."""

    kind: Kind
    rank: int
    file: Path
    shards: Path
    source: ShardConfig
    build: BuildConfig

    @property
    def name(self) -> tuple[Kind, int]:
        return self.kind, self.rank


def with_timing_cache(build: BuildConfig, api: TensorRT, first: Path, rank: int) -> BuildConfig:
    """``build`` for a rank. Rank 0 writes what it timed to ``first``, and the other ranks start from that.

    What is not split is the same on all ranks, and must be computed by the same kernels to have the same bits there;
    a build that timed for itself might choose others.
    """
    if api.is_rtx:  # times nothing
        return build
    caches = {"output_timing_cache": first} if rank == 0 else {"input_timing_cache": first, "output_timing_cache": None}
    return dataclasses.replace(build, options=dataclasses.replace(build.options, **caches))


def build_file(job: Job, api: TensorRT, on_phase: Callable[[str], None]) -> Built:
    with tempfile.TemporaryDirectory(dir=job.file.parent) as scratch:
        plan, names = _build_one(job, Path(scratch), api, on_phase)
    job.file.write_bytes(plan)
    return {"bytes": len(plan), "sha256": hashlib.sha256(plan).hexdigest()}, names


def build_in_workers(
    jobs: Sequence[Job], api: TensorRT, on_phase: Callable[[str], None], workers: int
) -> dict[tuple[Kind, int], Built]:
    """What was built, in the order of ``jobs``; the first error, or an interrupt, ends the other builds."""
    built: dict[tuple[Kind, int], Built] = {}
    strangers = set(active_children())
    # New interpreters: a process that has CUDA or TensorRT open can't be forked.
    with ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn"), _leave_interrupts_to_the_parent) as pool:
        futures: dict[Future[Built], Job] = {}

        def submit(chosen: Iterable[Job]) -> None:
            for job in chosen:
                on_phase(f"{job.kind} rank {job.rank}: queued")
                futures[pool.submit(_work, job, api.product)] = job

        # Where the other ranks start from what rank 0's build timed, they wait for it.
        first, later = (jobs, []) if api.is_rtx else ([j for j in jobs if not j.rank], [j for j in jobs if j.rank])
        submit(first)
        try:
            while futures:
                for future in wait(futures, return_when=FIRST_COMPLETED).done:
                    job = futures.pop(future)
                    built[job.name] = future.result()
                    on_phase(f"{job.kind} rank {job.rank}: done")
                    if job.rank == 0:
                        submit(other for other in later if other.kind == job.kind)
        except BaseException:
            # A build can take hours, and TensorRT can't be asked to stop.
            for worker in set(active_children()) - strangers:
                worker.terminate()
            pool.shutdown(cancel_futures=True)
            raise
    return {job.name: built[job.name] for job in jobs}


def _leave_interrupts_to_the_parent() -> None:
    """Ctrl-C reaches all processes of a terminal; the parent ends its workers itself, without a traceback of each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _work(job: Job, product: str) -> Built:
    """:func:`build_file` in a process of its own, on one of the GPUs."""
    import torch

    from ..plugins import tensorrt_api

    if torch.cuda.is_available():
        torch.cuda.set_device(job.rank % torch.cuda.device_count())
    return build_file(job, tensorrt_api.load(product), lambda phase: None)


def _build_one(job: Job, scratch: Path, api: TensorRT, on_phase: Callable[[str], None]) -> tuple[bytes, set[str]]:
    """The plan of one network and rank, and the names of its plugins."""
    # Imported here because reading a directory needs neither torch.onnx nor the networks.
    from .network import load_network
    from .onnx_export import export_network

    kind, rank, build = job.kind, job.rank, job.build
    on_phase(f"{kind} rank {rank}: export")
    # The bytes were checked before the first job.
    network = load_network(kind, job.shards, rank, build, check_bytes=False)
    model = export_network(network, scratch / f"{kind}_rank{rank}.onnx")
    on_phase(f"{kind} rank {rank}: build")
    plan = engine.build_engine(
        model.path,
        api=api,
        lowering=build.lowering,
        profiles=engine.profiles_for(model.inputs, engine.dimension_ranges(kind, job.source.draft, build)),
        expected_plugin_layers=model.plugin_counts,
        options=build.options,
    )
    return plan, set(model.plugin_counts) if build.lowering is Lowering.PLUGIN else set()
