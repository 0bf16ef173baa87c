"""The engine directory: everything the runtime needs, and a header that says what it fits.

    config.json             the header, readable without TensorRT
    draft/rank{r}.engine    one plan a rank
    target/rank{r}.engine   the same for the target, unless only the draft was converted
    weights/                the rank shards, linked or copied: the torch session reads them
    tokenizer.json          and its configuration, if the checkpoint has them

It is written beside its final place and renamed when complete, so a directory of that name is whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plugins.kernels import has_kernel
from ..plugins.library import PLUGIN_ABI, find_library
from ..plugins.registry import ALL_OPS
from ..plugins.tensorrt_api import TensorRT
from . import engine
from .checkpoint import ShardConfig, rank_file_name, read_shard_config
from .checkpoint.loading import CONFIG_NAME
from .checkpoint.sharding import TOKENIZER_FILES
from .config import ConfigError, DraftConfig, TargetConfig, from_dict, to_dict
from .engine import BuildConfig, Kind, Lowering

if TYPE_CHECKING:
    from .network import NetworkIO

FORMAT = "dspark-trt engines"
VERSION = 1
"""Raised whenever an older package would read a directory wrongly."""
WEIGHTS = "weights"
REBUILD = "dspark-build --checkpoint SHARDS --output DIR"


class EngineDirError(RuntimeError):
    """An engine directory is incomplete, damaged, or not made for this place."""


def engine_file_name(kind: Kind, rank: int) -> str:
    return f"{kind}/rank{rank}.engine"


@dataclass(frozen=True, kw_only=True)
class EngineDir:
    """An engine directory that was checked to be whole."""

    path: Path
    tensorrt: Mapping[str, str]
    """``product`` (tensorrt or tensorrt_rtx) and full ``version`` that built the plans."""
    compute_capabilities: tuple[str, ...]
    """GPUs that the plans run on, such as 9.0."""
    mapping: Mapping[str, int]
    """``tp_size``: number of ranks."""
    target: TargetConfig | None
    draft: DraftConfig
    build: BuildConfig
    weights_hash: str
    plugin_abi: int
    kernels: bool
    """Whether the library had a kernel for every plugin at build time: only then do plans reserve their scratch."""
    plugins: Mapping[str, int]
    """Operation -> version of the plugin layers in the plans."""
    files: Mapping[str, Mapping[str, Any]]
    """Relative path -> ``bytes`` and, of plans, ``sha256``."""

    @property
    def tp_size(self) -> int:
        return self.mapping["tp_size"]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return ("draft", "target") if self.target else ("draft",)

    @classmethod
    def open(cls, path: Path | str) -> EngineDir:
        """Read the header and check that every file is there with its size; opens no plan.

        Raises:
            EngineDirError: listing all that is wrong.
        """
        header = Path(path) / CONFIG_NAME
        try:
            values = json.loads(header.read_text())
            found = (values.pop("format"), values.pop("version"))
            if found != (FORMAT, VERSION):
                raise ConfigError(f"format {found[0]!r} version {found[1]!r}, expected {FORMAT!r} version {VERSION}")
            values["compute_capabilities"] = tuple(values["compute_capabilities"])
            values["target"] = values["target"] and from_dict(TargetConfig, values["target"])
            values["draft"] = from_dict(DraftConfig, values["draft"])
            values["build"] = engine.from_dict(values["build"])
            opened = cls(path=Path(path), **values)  # a TypeError for a key too many or too few
            problems = opened._problems()
        except FileNotFoundError:
            raise EngineDirError(f"{header}: not found; expected a directory that dspark-build wrote") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineDirError(f"{header}: not a header of this version ({error}); build again: {REBUILD}") from None
        if problems:
            raise EngineDirError(f"{path}: {'; '.join(problems)}. Copy it again, or build again: {REBUILD}")
        return opened

    def _problems(self) -> list[str]:
        wanted = {engine_file_name(kind, rank) for kind in self.kinds for rank in range(self.tp_size)}
        wanted |= {f"{WEIGHTS}/{rank_file_name(rank)}" for rank in range(self.tp_size)}
        problems = [f"{name} is not listed" for name in sorted(wanted - set(self.files))]
        for name, facts in self.files.items():
            file = self.path / name
            if not file.is_file():
                problems.append(f"{name} is missing")
            elif file.stat().st_size != facts["bytes"]:
                problems.append(f"{name} has {file.stat().st_size} bytes, {facts['bytes']} were written")
        if (tokens := self.build.num_draft_tokens) != self.draft.block_size:
            problems.append(f"built for {tokens} draft tokens, the draft's block is {self.draft.block_size}")
        if not problems and (found := read_shard_config(self.path / WEIGHTS).weights_hash) != self.weights_hash:
            problems.append(f"{WEIGHTS} are of a checkpoint with hash {found}, the engines of {self.weights_hash}")
        return problems

    def check_runtime(self, product: str, version: str, compute_capability: str, world_size: int) -> None:
        """Compare the header with what runs here, before a plan is read.

        Args:
            product, version: of the TensorRT in use; a plan runs on the exact version that built it.
            compute_capability: of this rank's GPU, such as "9.0".
            world_size: ranks that were started.

        Raises:
            EngineDirError: naming every field that differs, with both values, and the remedy.
        """
        pairs: dict[str, tuple[Any, Any]] = {
            "TensorRT product": (self.tensorrt["product"], product),
            "TensorRT version": (self.tensorrt["version"], version),
            "number of ranks": (self.tp_size, world_size),
            "plugin ABI": (self.plugin_abi, PLUGIN_ABI),
            "kernels of all plugins": (self.kernels or not self.plugins, True),
        }
        if compute_capability not in self.compute_capabilities:
            pairs["compute capability"] = (" or ".join(self.compute_capabilities), compute_capability)
        for name, built in self.plugins.items():
            pairs[f"version of plugin {name}"] = (built, ALL_OPS[name].version if name in ALL_OPS else None)
        problems = [f"{name}: built for {built}, here {here}" for name, (built, here) in pairs.items() if built != here]
        if problems:
            remedy = f"Build on this machine: {REBUILD} --product {product}"
            if self.tensorrt != {"product": product, "version": version}:
                remedy = f"Install {self.tensorrt['product']} {self.tensorrt['version']}, or: {remedy}"
            if self.tp_size != world_size:
                remedy = f"Start it with: mpirun -n {self.tp_size} ...; or convert for {world_size} ranks. {remedy}"
            raise EngineDirError(f"{self.path} does not fit this run. {'; '.join(problems)}. {remedy}")

    def read_plan(self, kind: Kind, rank: int) -> bytes:
        """The plan of one rank.

        Raises:
            EngineDirError: it is not the one that was written there.
        """
        name = engine_file_name(kind, rank)
        plan = (self.path / name).read_bytes()
        if hashlib.sha256(plan).hexdigest() != self.files[name]["sha256"]:
            raise EngineDirError(
                f"{self.path / name}: not the plan written for rank {rank}; copy it again, or {REBUILD}"
            )
        return plan


def build_engine_dir(
    shards: Path,
    output: Path,
    build: BuildConfig,
    *,
    api: TensorRT,
    on_phase: Callable[[str], None] = lambda phase: None,
    workers: int = 1,
) -> EngineDir:
    """Export and build every network of every rank into the new directory ``output``.

    Args:
        shards: a directory that dspark-convert wrote.
        on_phase: called with a name, twice for each network and rank: when its export and its build start, or, with
            several workers, when it is queued and when it is done.
        workers: processes that build at the same time; each needs the memory of one build.

    Raises:
        CheckpointError, ConfigError, EngineBuildError: from the shards, the configuration or TensorRT.
        EngineDirError: ``output`` is in use.
    """
    source = read_shard_config(shards)
    build = build.checked(source.draft)
    engine.check_engine_draft(source.draft)
    engine.check_engine_types(api, build)
    capabilities = api.compute_capabilities(build.options.compute_capabilities)
    files: dict[str, dict[str, Any]] = {}
    plugins: set[str] = set()
    with _new_directory(output) as partial:
        for kind in network_kinds(source):
            (partial / kind).mkdir()
        with tempfile.TemporaryDirectory(dir=partial) as timing:
            jobs = [
                Job(kind, rank, partial, shards, source, _with_timing_cache(build, api, Path(timing) / kind, rank))
                for rank in range(source.tp_size)
                for kind in network_kinds(source)
            ]
            if workers > 1:
                built = _build_in_workers(jobs, api, on_phase, workers)
            else:
                built = {job.name: _build_file(job, api, on_phase) for job in jobs}
            if build.options.output_timing_cache and not api.is_rtx:
                caches = [(Path(timing) / kind).read_bytes() for kind in network_kinds(source)]
                build.options.output_timing_cache.write_bytes(api.combined_timing_caches(caches))
        for (kind, rank), (entry, names) in built.items():
            files[engine_file_name(kind, rank)] = entry
            plugins |= names
        (partial / WEIGHTS).mkdir()
        for name in (CONFIG_NAME, *source.rank_files):
            _link_or_copy(shards / name, partial / WEIGHTS / name)
            files[f"{WEIGHTS}/{name}"] = {"bytes": (shards / name).stat().st_size}
        for name in TOKENIZER_FILES:
            if (shards / name).is_file():
                shutil.copyfile(shards / name, partial / name)
                files[name] = {"bytes": (shards / name).stat().st_size}
        header = {
            "format": FORMAT,
            "version": VERSION,
            "tensorrt": {"product": api.product, "version": api.version},
            "compute_capabilities": list(capabilities),
            "mapping": {"tp_size": source.tp_size},
            "target": source.target and to_dict(source.target),
            "draft": to_dict(source.draft),
            "build": engine.to_dict(build),
            "weights_hash": source.weights_hash,
            "plugin_abi": PLUGIN_ABI,
            "kernels": find_library() is not None and all(has_kernel(ALL_OPS[name]) for name in plugins),
            "plugins": {name: ALL_OPS[name].version for name in sorted(plugins)},
            "files": files,
        }
        (partial / CONFIG_NAME).write_text(json.dumps(header, indent=2) + "\n")
    return EngineDir.open(output)


def network_io(kind: Kind, source: ShardConfig | EngineDir, build: BuildConfig) -> NetworkIO:
    """Names, dtypes and shapes of a network's inputs and outputs."""
    import torch

    from .model.context import BuildContext
    from .network import draft_io, target_io

    context = BuildContext(build.numerics, getattr(torch, build.dtype), source.tp_size)
    if kind == "target" and source.target:
        return target_io(source.target, context, slots=build.max_batch_size)
    return draft_io(source.draft, context, slots=build.max_batch_size, sampling=build.sampling)


def network_kinds(source: ShardConfig) -> tuple[Kind, ...]:
    """The networks that a shard directory holds."""
    return ("draft", "target") if source.target else ("draft",)


Built = tuple[dict[str, Any], set[str]]
"""What the directory says of a plan's file, and the plugins in it."""


@dataclass(frozen=True)
class Job:
    """One network of one rank to build into its file in ``directory``."""

    kind: Kind
    rank: int
    directory: Path
    shards: Path
    source: ShardConfig
    build: BuildConfig

    @property
    def name(self) -> tuple[Kind, int]:
        return self.kind, self.rank


def _with_timing_cache(build: BuildConfig, api: TensorRT, first: Path, rank: int) -> BuildConfig:
    """``build`` for a rank. Rank 0 writes what it timed to ``first``, and the other ranks start from that.

    What is not split is the same on all ranks, and must be computed by the same kernels to have the same bits there;
    a build that timed for itself might choose others.
    """
    if api.is_rtx:  # times nothing
        return build
    caches = {"output_timing_cache": first} if rank == 0 else {"input_timing_cache": first, "output_timing_cache": None}
    return dataclasses.replace(build, options=dataclasses.replace(build.options, **caches))


def _build_file(job: Job, api: TensorRT, on_phase: Callable[[str], None]) -> Built:
    with tempfile.TemporaryDirectory(dir=job.directory) as scratch:
        plan, names = _build_one(job, Path(scratch), api, on_phase)
    (job.directory / engine_file_name(*job.name)).write_bytes(plan)
    return {"bytes": len(plan), "sha256": hashlib.sha256(plan).hexdigest()}, names


def _build_in_workers(
    jobs: Sequence[Job], api: TensorRT, on_phase: Callable[[str], None], workers: int
) -> dict[tuple[Kind, int], Built]:
    """What was built, in the order of ``jobs``; the first error ends what has not begun."""
    built: dict[tuple[Kind, int], Built] = {}
    # New interpreters: a process that has CUDA or TensorRT open can't be forked.
    with ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn")) as pool:
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
            pool.shutdown(cancel_futures=True)
            raise
    return {job.name: built[job.name] for job in jobs}


def _work(job: Job, product: str) -> Built:
    """:func:`_build_file` in a process of its own, on one of the GPUs."""
    import torch

    from ..plugins import tensorrt_api

    if torch.cuda.is_available():
        torch.cuda.set_device(job.rank % torch.cuda.device_count())
    return _build_file(job, tensorrt_api.load(product), lambda phase: None)


def _build_one(job: Job, scratch: Path, api: TensorRT, on_phase: Callable[[str], None]) -> tuple[bytes, set[str]]:
    """The plan of one network and rank, and the names of its plugins."""
    # Imported here because reading a directory needs neither torch.onnx nor the networks.
    from .network import load_network
    from .onnx_export import export_network

    kind, rank, build = job.kind, job.rank, job.build
    on_phase(f"{kind} rank {rank}: export")
    model = export_network(load_network(kind, job.shards, rank, build), scratch / f"{kind}_rank{rank}.onnx")
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


@contextmanager
def _new_directory(output: Path) -> Iterator[Path]:
    """A directory that is renamed to ``output`` if the block succeeds, and removed if it fails."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise EngineDirError(f"{output}: exists already; remove it or pass another --output")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.parent / f".{output.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _link_or_copy(source: Path, destination: Path) -> None:
    try:
        os.link(source.resolve(), destination)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, destination)
