"""The engine directory: everything the runtime needs, and a header that says what it fits.

config.json             the header, readable without TensorRT
draft/rank{r}.engine    one plan per rank
target/rank{r}.engine   the same for the target, unless only the draft was converted
weights/                the rank shards, linked or copied: the torch session reads them
tokenizer.json          and its configuration, if the checkpoint has them
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plugins.kernels import has_kernel
from ..plugins.library import PLUGIN_ABI, find_library
from ..plugins.registry import ALL_OPS
from ..plugins.tensorrt_api import TensorRT
from . import build_config
from .build_config import BuildConfig, Kind
from .checkpoint import CheckpointError, ShardConfig, rank_file_name, read_shard_config
from .checkpoint.loading import check_rank_files
from .checkpoint.sharding import TOKENIZER_FILES
from .config import ConfigError, DraftConfig, TargetConfig, networks_from_dict, to_dict
from .directories import CONFIG_NAME, ENGINE_FORMAT, WEIGHTS, check_new, file_problems, new_directory, read_dir_header
from .engine_jobs import Job, build_file, build_in_workers, with_timing_cache
from .json_values import read_value

if TYPE_CHECKING:
    from .network import NetworkIO

VERSION = 2
"""Raised whenever an older package would read a directory wrongly."""
REBUILD = "dspark-build --checkpoint SHARDS --output DIR"


_FILE: Any = {"bytes": int, "sha256": str | None}
_KEYS: dict[str, Any] = {
    "format": str,
    "version": int,
    "tensorrt": {"product": str, "version": str},
    "compute_capabilities": tuple[str, ...],
    "mapping": {"tp_size": int},
    "target": Any,
    "draft": Any,
    "build": Any,
    "build_sha256": str,
    "weights_hash": str,
    "plugin_abi": int,
    "kernels": bool,
    "plugins": Mapping[str, int],
    "files": Mapping[str, _FILE],
}


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
    """Relative path -> ``bytes`` and, of plans and rank shards, ``sha256``."""

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks that the engines were built for."""
        return self.mapping["tp_size"]

    @classmethod
    def open(cls, path: Path | str) -> EngineDir:
        """Read the header and check that every file is there with its size; opens no plan.

        Raises:
            EngineDirError: listing all that is wrong.
        """
        path = Path(path)
        header = path / CONFIG_NAME
        remedy, outdated = f"build again: {REBUILD}", f"run dspark-convert again, then {REBUILD}"
        values = read_dir_header(path, "engines", VERSION, EngineDirError, remedy=remedy, outdated=outdated)
        problems: list[str] = []
        built: Any = values.get("build")
        values = read_value(_KEYS, values, "", problems)
        values |= networks_from_dict(values, problems)
        try:
            values["build"] = build_config.from_dict(built)
        except ConfigError as error:
            problems.append(str(error))
        if not problems:
            try:
                dataclasses.replace(values["build"], num_draft_tokens=None).checked(values["draft"])
            except ConfigError as error:
                problems += [f"build: {line}" for line in str(error).splitlines()]
        if problems:
            raise EngineDirError(f"{header}: not a header of this version: {'; '.join(problems)}; {remedy}")
        if values.pop("build_sha256") != build_config.digest(built):
            problems.append("the section build of config.json is not the one that was built")
        del values["format"], values["version"]
        opened = cls(path=path, **values)
        if problems := problems + opened._problems():
            raise EngineDirError(f"{path}: {'; '.join(problems)}. Copy it again, or build again: {REBUILD}")
        return opened

    def _problems(self) -> list[str]:
        wanted = {engine_file_name(kind, rank) for kind in network_kinds(self) for rank in range(self.tp_size)}
        wanted |= {f"{WEIGHTS}/{rank_file_name(rank)}" for rank in range(self.tp_size)}
        problems = [] if self.tp_size > 0 else [f"mapping.tp_size is {self.tp_size}, expected at least 1"]
        problems += [f"{name} is not listed" for name in sorted(wanted - set(self.files))]
        problems += file_problems(self.path, self.files)
        if (tokens := self.build.num_draft_tokens) != self.draft.block_size:
            problems.append(f"built for {tokens} draft tokens, the draft's block is {self.draft.block_size}")
        return problems or self._differences()

    def _differences(self) -> list[str]:
        """What the header says otherwise than the weights beside it, which hold the same facts."""
        try:
            weights = read_shard_config(self.path / WEIGHTS)
        except CheckpointError as error:
            return [str(error)]
        problems = []
        if weights.weights_hash != self.weights_hash:
            problems.append(
                f"{WEIGHTS} are of a checkpoint with hash {weights.weights_hash}, the engines of {self.weights_hash}"
            )
        here, there = (
            _flat(self.target, self.draft, self.tp_size),
            _flat(weights.target, weights.draft, weights.tp_size),
        )
        problems += [
            f"{key} is {here.get(key)!r} in {CONFIG_NAME}, {there.get(key)!r} in {WEIGHTS}/{CONFIG_NAME}"
            for key in here | there
            if here.get(key) != there.get(key)
        ]
        return problems + [
            f"{WEIGHTS}/{name} has another sha256 in {CONFIG_NAME} than in {WEIGHTS}/{CONFIG_NAME}"
            for name, facts in weights.rank_files.items()
            if self.files[f"{WEIGHTS}/{name}"]["sha256"] != facts["sha256"]
        ]

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


@dataclass(frozen=True, kw_only=True)
class CheckedBuild:
    """A build that may start: :func:`check_build` found nothing against it."""

    shards: Path
    source: ShardConfig
    """What the shards hold."""
    output: Path
    build: BuildConfig
    """Complete: :meth:`.BuildConfig.checked` has filled it in."""
    api: TensorRT
    workers: int
    compute_capabilities: tuple[str, ...]
    """GPUs that the plans will run on."""


def check_build(
    shards: Path,
    output: Path,
    build: BuildConfig,
    *,
    api: TensorRT,
    workers: int = 1,
    source: ShardConfig | None = None,
) -> CheckedBuild:
    """Everything that refuses a build before it starts; reads no weights and writes nothing.

    Args:
        source: what the shards hold, where that was read already.

    Raises:
        As :func:`build_engine_dir`.
    """
    check_new(output, EngineDirError)
    source = source or read_shard_config(shards)
    build = build.checked(source.draft)
    if workers < 1:
        raise ConfigError(f"--workers is {workers}, expected at least 1; leave it out for one engine at a time")
    build_config.check_engine_draft(source.draft)
    build_config.check_engine_options(api, build)
    return CheckedBuild(
        shards=shards,
        source=source,
        output=output,
        build=build,
        api=api,
        workers=workers,
        compute_capabilities=api.compute_capabilities(build.options.compute_capabilities),
    )


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
        EngineDirError: ``output`` is in use, or can't be made.
    """
    return write_engines(check_build(shards, output, build, api=api, workers=workers), on_phase)


def write_engines(checked: CheckedBuild, on_phase: Callable[[str], None] = lambda phase: None) -> EngineDir:
    """:func:`build_engine_dir` where the checks are done already."""
    shards, source, build, api = checked.shards, checked.source, checked.build, checked.api
    check_rank_files(shards, source, source.rank_files)
    files: dict[str, dict[str, Any]] = {}
    plugins: set[str] = set()
    with new_directory(checked.output, EngineDirError) as partial:
        for kind in network_kinds(source):
            (partial / kind).mkdir()
        with tempfile.TemporaryDirectory(dir=partial) as timing:
            jobs = [
                Job(
                    kind=kind,
                    rank=rank,
                    file=partial / engine_file_name(kind, rank),
                    shards=shards,
                    source=source,
                    build=with_timing_cache(build, api, Path(timing) / kind, rank),
                )
                for rank in range(source.tp_size)
                for kind in network_kinds(source)
            ]
            if checked.workers > 1:
                built = build_in_workers(jobs, api, on_phase, checked.workers)
            else:
                built = {job.name: build_file(job, api, on_phase) for job in jobs}
            if build.options.output_timing_cache and not api.is_rtx:
                caches = [(Path(timing) / kind).read_bytes() for kind in network_kinds(source)]
                build.options.output_timing_cache.write_bytes(api.combined_timing_caches(caches))
        for (kind, rank), (entry, names) in built.items():
            files[engine_file_name(kind, rank)] = entry
            plugins |= names
        (partial / WEIGHTS).mkdir()
        for name in (CONFIG_NAME, *source.rank_files):
            _link_or_copy(shards / name, partial / WEIGHTS / name)
            sha256 = source.rank_files[name]["sha256"] if name in source.rank_files else None
            files[f"{WEIGHTS}/{name}"] = {"bytes": (shards / name).stat().st_size, "sha256": sha256}
        for name in TOKENIZER_FILES:
            if (shards / name).is_file():
                shutil.copyfile(shards / name, partial / name)
                files[name] = {"bytes": (shards / name).stat().st_size, "sha256": None}
        header = {
            "format": ENGINE_FORMAT,
            "version": VERSION,
            "tensorrt": {"product": api.product, "version": api.version},
            "compute_capabilities": list(checked.compute_capabilities),
            "mapping": {"tp_size": source.tp_size},
            "target": source.target and to_dict(source.target),
            "draft": to_dict(source.draft),
            "build": build_config.to_dict(build),
            "build_sha256": build_config.digest(build_config.to_dict(build)),
            "weights_hash": source.weights_hash,
            "plugin_abi": PLUGIN_ABI,
            "kernels": find_library() is not None and all(has_kernel(ALL_OPS[name]) for name in plugins),
            "plugins": {name: ALL_OPS[name].version for name in sorted(plugins)},
            "files": files,
        }
        (partial / CONFIG_NAME).write_text(json.dumps(header, indent=2) + "\n")
    return EngineDir.open(checked.output)


def network_io(kind: Kind, source: ShardConfig | EngineDir, build: BuildConfig) -> NetworkIO:
    """Names, dtypes and shapes of a network's inputs and outputs."""
    import torch

    from .model.context import BuildContext
    from .network import draft_io, target_io

    context = BuildContext(build.numerics, getattr(torch, build.dtype), source.tp_size)
    if kind == "target" and source.target:
        return target_io(source.target, context, slots=build.max_batch_size)
    return draft_io(source.draft, context, slots=build.max_batch_size, sampling=build.sampling)


def network_kinds(source: ShardConfig | EngineDir) -> tuple[Kind, ...]:
    """The networks that a shard or an engine directory holds."""
    return ("draft", "target") if source.target else ("draft",)


def _flat(target: TargetConfig | None, draft: DraftConfig, tp_size: int) -> dict[str, Any]:
    """Key of a header -> value."""
    sections = {"target": to_dict(target) if target else {}, "draft": to_dict(draft), "mapping": {"tp_size": tp_size}}
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


def _link_or_copy(source: Path, destination: Path) -> None:
    try:
        os.link(source.resolve(), destination)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, destination)
