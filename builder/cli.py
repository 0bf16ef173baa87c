"""The commands dspark-convert, dspark-build and dspark-inspect.

Flags come from the dataclasses below. An error that a user can act on is printed as one message, with
exit status 2; its traceback is shown at log level debug. A command that is interrupted (:mod:`.interrupts`)
leaves nothing behind.
"""

from __future__ import annotations

import errno
import importlib.metadata
import logging
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import torch
import tyro
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..plugins import tensorrt_api
from ..plugins.library import TRT_LIBRARY_NAME, KernelUnavailableError, describe_library, load_library
from ..plugins.op import OpError
from . import build_config
from .build_config import BuildConfig
from .checkpoint import Checkpoint, CheckpointError, count_stages, read_shard_config
from .checkpoint.loading import REMAKE, rank_file_name
from .checkpoint.sharding import plan_conversion, write_shards
from .checkpoint.tensor_file import read_header
from .config import ConfigError, ModelConfig, read_configs
from .directories import NAMES, check_new, kind_of
from .engine_dir import EngineDir, EngineDirError, check_build, network_kinds, write_engines
from .estimates import estimate_build, estimate_conversion, weight_bytes
from .interrupts import exit_status, raised_interrupts
from .tables import config_table, facts_table, readable_duration, readable_size, shape_table, tensor_table

USER_ERRORS = (
    CheckpointError,
    ConfigError,
    EngineDirError,
    KernelUnavailableError,
    OpError,
    OSError,
    tensorrt_api.EngineBuildError,
    tensorrt_api.EngineLoadError,
    tensorrt_api.TensorRTUnavailableError,
)

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Of a file that can't be written to its end: no refusal, but a failure while the command ran."""

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Cut a released DeepSeek-V4 / V4.1 checkpoint into one shard a rank."""

    checkpoint: Path
    """Released checkpoint: config.json and safetensors."""
    output: Path
    """New directory for the shards."""
    tp_size: int = 1
    """Number of ranks (tensor parallel)."""
    draft_only: bool = False
    """Leave the target out."""
    allow_config_key: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Unknown key of config.json that can't change results; may be repeated."""
    dry_run: bool = False
    """Print sizes, memory and time to expect, and write nothing."""
    log_level: LogLevel = "info"
    """Messages to show; debug adds the traceback of an error and what libraries say."""


@dataclass(frozen=True, kw_only=True)
class Build:
    """Build the engines of every rank from rank shards."""

    checkpoint: Path
    """Directory that dspark-convert wrote."""
    output: Path
    """New engine directory."""
    build: BuildConfig = field(default_factory=BuildConfig)
    product: Literal["tensorrt", "tensorrt_rtx"] | None = None
    """TensorRT product; left out, enterprise TensorRT where it is installed with a GPU, else TensorRT-RTX."""
    workers: int = 1
    """Engines to build at the same time, each in a process of its own. With enterprise TensorRT the other ranks' builds
    wait for rank 0's, and start from what that has timed."""
    dry_run: bool = False
    """Print shapes, sizes, memory and time to expect, and write nothing."""
    log_level: LogLevel = "info"
    """Messages to show; debug adds the traceback of an error and what libraries say."""


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Show what a checkpoint, a shard directory or an engine directory holds, or what this machine can do."""

    directory: Annotated[Path | None, tyro.conf.Positional] = None
    """Left out: what this machine has, and which executors it can use."""
    log_level: LogLevel = "warning"
    """Messages to show; debug adds the traceback of an error and what libraries say."""


Options = TypeVar("Options", Convert, Build, Inspect)


def convert(arguments: Sequence[str] | None = None) -> int:
    """Run dspark-convert; returns the exit status."""
    return _run(Convert, _convert, "dspark-convert", arguments)


def build(arguments: Sequence[str] | None = None) -> int:
    """Run dspark-build; returns the exit status."""
    return _run(Build, _build, "dspark-build", arguments)


def inspect(arguments: Sequence[str] | None = None) -> int:
    """Run dspark-inspect; returns the exit status."""
    return _run(Inspect, _inspect, "dspark-inspect", arguments)


def _run(
    kind: type[Options], work: Callable[[Options, Console], None], name: str, arguments: Sequence[str] | None
) -> int:
    options = tyro.cli(
        kind, prog=name, args=arguments, config=(tyro.conf.OmitArgPrefixes, tyro.conf.EnumChoicesFromValues)
    )
    errors = Console(stderr=True, soft_wrap=True)
    handler = RichHandler(console=errors, show_path=False, show_time=False)
    # The libraries below report their own steps at "info", which nobody asked for.
    others = "DEBUG" if options.log_level == "debug" else "WARNING"
    logging.basicConfig(level=others, format="%(message)s", handlers=[handler], force=True)
    logging.getLogger("dspark_trt").setLevel(options.log_level.upper())
    try:
        with raised_interrupts():
            work(options, _Output())
    except USER_ERRORS as error:
        if options.log_level == "debug":
            raise
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            where = error.filename or getattr(options, "output", None) or "the output"
            return _fail(errors, f"{where}: {error.strerror}; nothing was kept, free space or pass another --output", 1)
        return _fail(errors, str(error), 2)
    except KeyboardInterrupt as interrupt:
        return _fail(errors, f"interrupted ({str(interrupt) or 'Ctrl-C'}); nothing was written", exit_status(interrupt))
    return 0


class _Output(Console):
    """Where a command prints. If the reader goes, as ``head`` does, the work goes on without."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(errors: Console, message: str, status: int) -> int:
    errors.print("error:", style="bold red", end=" ")
    errors.print(message, markup=False, highlight=False)
    return status


def _convert(options: Convert, console: Console) -> None:
    check_new(options.output, CheckpointError)
    plan = plan_conversion(
        options.checkpoint,
        tp_size=options.tp_size,
        draft_only=options.draft_only,
        allow_keys=options.allow_config_key,
    )
    estimate = estimate_conversion(plan)
    facts = {
        "tensors": len(plan.stored),
        "read": readable_size(plan.source_bytes),
        "written": f"{options.tp_size} x {readable_size(plan.rank_file_bytes)}",
        "peak memory": readable_size(estimate.memory_bytes),
        "time": f"about {readable_duration(estimate.seconds)}",
    }
    console.print(facts_table("conversion", facts))
    if options.dry_run:
        return
    started = time.perf_counter()
    columns = (TextColumn("converting"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=plan.source_bytes)
        write_shards(plan, options.output, lambda n: progress.advance(task, n))
    _next(console, started, f"dspark-build --checkpoint {shlex.quote(str(options.output))} --output ENGINES")


def _build(options: Build, console: Console) -> None:
    source = read_shard_config(options.checkpoint)
    options.build.checked(source.draft)  # before TensorRT is loaded, which may be missing as well
    api = tensorrt_api.load(options.product)
    checked = check_build(
        options.checkpoint, options.output, options.build, api=api, workers=options.workers, source=source
    )
    chosen, kinds = checked.build, network_kinds(source)
    header = read_header(options.checkpoint / rank_file_name(0), REMAKE)
    weights = {kind: weight_bytes(kind, header.values(), chosen) for kind in kinds}
    estimate = estimate_build(weights, chosen, source.tp_size)
    facts = {
        "TensorRT": str(api),
        "GPUs": ", ".join(checked.compute_capabilities),
        "ranks": source.tp_size,
        "lowering": f"{chosen.lowering.value}, {chosen.numerics.value} numerics, {chosen.dtype}",
        **{f"{kind} engine": f"about {readable_size(size)} a rank" for kind, size in weights.items()},
        "peak memory": f"about {readable_size(estimate.memory_bytes)}",
        "time": f"about {readable_duration(estimate.seconds)}",
    }
    console.print(facts_table("build", facts))
    if options.dry_run:
        console.print(*(shape_table(kind, source, chosen) for kind in kinds))
        return
    started = time.perf_counter()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("reading the shards", total=2 * len(kinds) * source.tp_size, completed=-1)

        def on_phase(name: str) -> None:
            progress.update(task, description=name, advance=1)

        write_engines(checked, on_phase)
        on_phase("engines")
    _next(
        console,
        started,
        f"mpirun -n {source.tp_size} python examples/run.py --engine-dir {shlex.quote(str(options.output))}",
    )


def _inspect(options: Inspect, console: Console) -> None:
    if (path := options.directory) is None:
        return _doctor(console)
    known = f"expected {', '.join(NAMES.values())}"
    if not path.is_dir():
        raise CheckpointError(f"{path}: {'not a directory' if path.exists() else 'not found'}; {known}")
    found = kind_of(path)
    if found is None:
        raise CheckpointError(f"{path}: holds neither weights nor engines of this package; {known}")
    if found == "engines":
        return _inspect_engines(EngineDir.open(path), console)
    target: ModelConfig | None
    if found == "shards":
        shards = read_shard_config(path)
        target, draft = shards.target, shards.draft
        facts = {"what": "rank shards", "ranks": shards.tp_size, "weights hash": shards.weights_hash}
        tensors = read_header(path / rank_file_name(0), REMAKE)
    else:
        checkpoint = Checkpoint(path)
        target, draft = read_configs(path, num_stages=count_stages(checkpoint.files))
        facts, tensors = {"what": "released checkpoint"}, checkpoint.find(checkpoint.files)
    console.print(facts_table(str(path), facts), config_table(target, draft), tensor_table(tensors.values()))
    return None


def _inspect_engines(opened: EngineDir, console: Console) -> None:
    facts = {
        "what": "engine directory",
        "TensorRT": f"{opened.tensorrt['product']} {opened.tensorrt['version']}",
        "GPUs": ", ".join(opened.compute_capabilities),
        "ranks": opened.tp_size,
        **build_config.to_dict(opened.build),
        "plugins": ", ".join(f"{name} {version}" for name, version in opened.plugins.items()) or "none",
        "plugin ABI": opened.plugin_abi,
        "weights hash": opened.weights_hash,
    }
    console.print(facts_table(str(opened.path), facts), config_table(opened.target, opened.draft))
    console.print(*(shape_table(kind, opened, opened.build) for kind in network_kinds(opened)))
    console.print(facts_table("files", {name: readable_size(entry["bytes"]) for name, entry in opened.files.items()}))


def _doctor(console: Console) -> None:
    gpus = tensorrt_api.gpu_compute_capabilities()
    products = {name: tensorrt_api.probe(name) for name in tensorrt_api.PRODUCTS}
    names = [f"{torch.cuda.get_device_name(i)} ({c})" for i, c in enumerate(gpus)]
    facts = {
        "dspark-trt": _version("dspark-trt"),
        "Python": f"{platform.python_version()} on {platform.machine()}",
        "torch": torch.__version__,
        "GPUs": ", ".join(names) or "none that torch can use",
        "MPI": f"{shutil.which('mpirun') or 'no mpirun on PATH'}; mpi4py {_version('mpi4py')}",
        "kernel library": describe_library(),
        "plugins for TensorRT 8": describe_library(TRT_LIBRARY_NAME),
        **products,
    }
    usable = {"torch on the CPU": "yes", "torch with kernels": "yes" if gpus else "no GPU"}
    try:
        load_library()
    except KernelUnavailableError as error:
        usable["torch with kernels"] = str(error)
    for name, found in products.items():
        if isinstance(found, str):
            usable[name] = "not installed"
        elif gpus and found.runs_on(gpus[0]):
            usable[name] = "builds and runs engines"
        elif found.is_rtx:
            usable[name] = "builds engines; runs none here, " + (f"not on {gpus[0]}" if gpus else "there is no GPU")
        else:
            usable[name] = "neither builds nor runs engines without a GPU"
    console.print(facts_table("this machine", facts), facts_table("executors", usable))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _next(console: Console, started: float, command: str) -> None:
    console.print(
        f"done in {readable_duration(time.perf_counter() - started)}; next: {command}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
