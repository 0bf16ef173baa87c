"""The commands dspark-convert, dspark-build and dspark-inspect.

Flags come from the dataclasses below. An error that a user can act on is printed as one message, with
exit status 2; its traceback is shown at log level debug. A command that is interrupted by Ctrl-C or SIGTERM
leaves nothing behind.
"""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import tyro
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..plugins import tensorrt_api
from ..plugins.library import TRT_LIBRARY_NAME, KernelUnavailableError, describe_library, load_library
from ..plugins.op import OpError
from . import engine, engine_dir
from .checkpoint import Checkpoint, CheckpointError, ShardConfig, count_stages, read_shard_config
from .checkpoint.loading import REMAKE, rank_file_name
from .checkpoint.sharding import convert_checkpoint, plan_conversion
from .checkpoint.tensor_file import StoredTensor, read_header
from .config import ConfigError, ModelConfig, Numerics, read_configs, to_dict
from .directories import NAMES, check_new, kind_of
from .engine import BuildConfig, Lowering
from .engine_dir import EngineDir, EngineDirError, build_engine_dir, check_build, network_kinds
from .interrupts import exit_status, raised_interrupts

USER_ERRORS = (
    *(ConfigError, CheckpointError, EngineDirError, OpError, OSError, KernelUnavailableError),
    *(tensorrt_api.TensorRTUnavailableError, tensorrt_api.EngineBuildError, tensorrt_api.EngineLoadError),
)
CONVERT_BYTES_A_SECOND = 300e6
"""Read, hashed and written on one core and an ordinary disk."""
BUILD_COPIES = 5
"""Copies of a network's weights in memory at the worst moment of an export and build, as measured."""
BASE_BYTES = 1e9
"""Memory of the interpreter, torch and TensorRT."""
ENGINE_SECONDS = {Lowering.PLUGIN: 12, Lowering.NATIVE: 30}
"""Export and build of a network of a few layers with TensorRT-RTX on two cores; weights come on top."""
BUILD_BYTES_A_SECOND = 100e6

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
            work(options, Console())
    except USER_ERRORS as error:
        if options.log_level == "debug":
            raise
        return _fail(errors, str(error), 2)
    except KeyboardInterrupt as interrupt:
        return _fail(errors, f"interrupted ({str(interrupt) or 'Ctrl-C'}); nothing was written", exit_status(interrupt))
    return 0


def _fail(errors: Console, message: str, status: int) -> int:
    errors.print("error:", style="bold red", end=" ")
    errors.print(message, markup=False, highlight=False)
    return status


def _convert(options: Convert, console: Console) -> None:
    chosen: dict[str, Any] = {"tp_size": options.tp_size, "draft_only": options.draft_only}
    chosen["allow_keys"] = options.allow_config_key
    check_new(options.output, CheckpointError)
    plan = plan_conversion(options.checkpoint, **chosen)
    facts = {
        "tensors": len(plan.stored),
        "read": _size(plan.source_bytes),
        "written": f"{options.tp_size} x {_size(plan.rank_file_bytes)}",
        "peak memory": _size(plan.peak_memory_bytes + BASE_BYTES),
        "time": f"about {_duration((plan.source_bytes + plan.output_bytes) / CONVERT_BYTES_A_SECOND)}",
    }
    console.print(_facts("conversion", facts))
    if options.dry_run:
        return
    started = time.perf_counter()
    columns = (TextColumn("converting"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=plan.source_bytes)
        convert_checkpoint(
            options.checkpoint, options.output, **chosen, on_progress=lambda n: progress.advance(task, n)
        )
    _next(console, started, f"dspark-build --checkpoint {options.output} --output ENGINES")


def _build(options: Build, console: Console) -> None:
    source = read_shard_config(options.checkpoint)
    options.build.checked(source.draft)  # before TensorRT is loaded, which may be missing as well
    api = tensorrt_api.load(options.product)
    request = (options.checkpoint, options.output, options.build)
    source, chosen, gpus = check_build(*request, api=api, workers=options.workers)
    kinds = network_kinds(source)
    header = read_header(options.checkpoint / rank_file_name(0), REMAKE)
    weights = {kind: _weight_bytes(kind, header.values(), chosen) for kind in kinds}
    seconds = ENGINE_SECONDS[chosen.lowering] * len(kinds) + sum(weights.values()) / BUILD_BYTES_A_SECOND
    facts = {
        "TensorRT": str(api),
        "GPUs": ", ".join(gpus),
        "ranks": source.tp_size,
        "lowering": f"{chosen.lowering.value}, {chosen.numerics.value} numerics, {chosen.dtype}",
        **{f"{kind} engine": f"about {_size(size)} a rank" for kind, size in weights.items()},
        "peak memory": f"about {_size(BUILD_COPIES * max(weights.values()) + BASE_BYTES)}",
        "time": f"about {_duration(seconds * source.tp_size)}",
    }
    console.print(_facts("build", facts))
    if options.dry_run:
        console.print(*(_shapes(kind, source, chosen) for kind in kinds))
        return
    started = time.perf_counter()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("reading the shards", total=2 * len(kinds) * source.tp_size, completed=-1)

        def on_phase(name: str) -> None:
            progress.update(task, description=name, advance=1)

        build_engine_dir(*request, api=api, on_phase=on_phase, workers=options.workers)
        on_phase("engines")
    _next(console, started, f"mpirun -n {source.tp_size} python examples/run.py --engine-dir {options.output}")


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
    console.print(_facts(str(path), facts), _configs(target, draft), _tensors(tensors.values()))
    return None


def _inspect_engines(opened: EngineDir, console: Console) -> None:
    facts = {
        "what": "engine directory",
        "TensorRT": f"{opened.tensorrt['product']} {opened.tensorrt['version']}",
        "GPUs": ", ".join(opened.compute_capabilities),
        "ranks": opened.tp_size,
        **engine.to_dict(opened.build),
        "plugins": ", ".join(f"{name} {version}" for name, version in opened.plugins.items()) or "none",
        "plugin ABI": opened.plugin_abi,
        "weights hash": opened.weights_hash,
    }
    console.print(_facts(str(opened.path), facts), _configs(opened.target, opened.draft))
    console.print(*(_shapes(kind, opened, opened.build) for kind in opened.kinds))
    console.print(_facts("files", {name: _size(entry["bytes"]) for name, entry in opened.files.items()}))


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
    console.print(_facts("this machine", facts), _facts("executors", usable))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _next(console: Console, started: float, command: str) -> None:
    console.print(
        f"done in {_duration(time.perf_counter() - started)}; next: {command}", soft_wrap=True, highlight=False
    )


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", show_header=bool(columns))


def _facts(title: str, facts: Mapping[str, Any]) -> Table:
    table = _table(title)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, str(value))
    return table


def _configs(target: ModelConfig | None, draft: ModelConfig) -> Table:
    columns = {"draft": to_dict(draft)} | ({"target": to_dict(target)} if target else {})
    table = _table("configuration", "", *columns)
    for name in dict.fromkeys(key for values in columns.values() for key in values):
        table.add_row(name, *(str(values.get(name, "-")) for values in columns.values()))
    return table


def _tensors(tensors: Iterable[StoredTensor]) -> Table:
    """Number and size of tensors by part of the model (layer, draft stage) and dtype."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for tensor in tensors:
        parts = tensor.name.split(".")
        key = (".".join(parts[: 2 if parts[0] in ("layers", "mtp") else 1]), tensor.dtype)
        counts[key] += 1
        sizes[key] += tensor.nbytes
    table = _table("tensors", "part", "dtype", "number", "size")
    for key, count in counts.items():
        table.add_row(*key, str(count), _size(sizes[key]))
    return table


def _shapes(kind: engine_dir.Kind, source: ShardConfig | EngineDir, build: BuildConfig) -> Table:
    """The inputs of an engine and what each profile takes."""
    io = engine_dir.network_io(kind, source, build)
    ranges = engine.dimension_ranges(kind, source.draft, build)
    table = _table(f"{kind} engine", "input", "dtype", *ranges)
    for info in io.inputs:
        shapes = [
            ", ".join(str(d) if isinstance(d, int) else f"{sizes[d][0]} to {sizes[d][2]}" for d in info.shape)
            for sizes in ranges.values()
        ]
        table.add_row(info.name, str(info.dtype).removeprefix("torch."), *shapes)
    return table


def _weight_bytes(kind: engine_dir.Kind, tensors: Iterable[StoredTensor], build: BuildConfig) -> int:
    """Bytes of a network's weights in its engine."""
    wide = 4 if build.dtype == "float32" else 2
    total = 0
    for tensor in tensors:
        part = tensor.name.split(".")[0]
        if part in ("mtp", "embed", "head") if kind == "draft" else part != "mtp":
            if build.numerics is Numerics.RELEASED or tensor.dtype != "I8":
                total += tensor.nbytes
            elif tensor.name.endswith(".weight"):  # FP4 codes are two per byte; the scales are gone
                total += tensor.nbytes * wide * (2 if ".experts." in tensor.name else 1)
    return total


def _size(count: float) -> str:
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= bytes_:
            return f"{count / bytes_:.1f} {unit}"
    return f"{count:.0f} bytes"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
