"""Builds of engine directories: what is refused before any work, what a failure leaves, several ranks and workers."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dspark_trt.builder import build_config, engine, engine_jobs
from dspark_trt.builder.build_config import BuildConfig, Lowering
from dspark_trt.builder.checkpoint import CheckpointError, convert_checkpoint
from dspark_trt.builder.config import ConfigError, Numerics
from dspark_trt.builder.engine_dir import EngineDirError, build_engine_dir
from dspark_trt.builder.onnx_export import ExportedModel
from dspark_trt.plugins import tensorrt_api
from dspark_trt.plugins.tensorrt_api import EngineBuildError, EngineOptions, TensorRT

from tests.fake_tensorrt import fake_api
from tests.one_op_models import BUILD, stand_in_export


def test_a_failed_build_leaves_nothing(
    api: TensorRT, shards: Path, tmp_path: Path, exporter: Callable[[Callable[..., Any]], None]
) -> None:
    def export(network: tuple[str, Path, int, BuildConfig], path: Path) -> ExportedModel:
        found = stand_in_export(network, path)
        return dataclasses.replace(found, plugin_counts={"HcCollapse": 1 + network[2]})

    exporter(export)
    with pytest.raises(EngineBuildError, match="HcCollapse 1 "):
        build_engine_dir(shards, tmp_path / "engines", BUILD, api=api)
    assert list(tmp_path.iterdir()) == []


def test_another_draft_length_is_refused_before_anything_is_built(api: TensorRT, shards: Path, tmp_path: Path) -> None:
    """ENG-8: more drafts than the block has rows, with both numbers."""
    with pytest.raises(ConfigError, match="7 draft tokens requested, but this draft was trained with blocks of 5"):
        build_engine_dir(shards, tmp_path / "e", dataclasses.replace(BUILD, num_draft_tokens=7), api=api)
    assert list(tmp_path.iterdir()) == []


REFUSED_BY_8 = [
    ({}, "released numerics in bfloat16"),
    ({"numerics": Numerics.DEQUANTIZED}, "dequantized numerics in bfloat16"),
    ({"numerics": Numerics.DEQUANTIZED, "lowering": Lowering.NATIVE}, "dequantized numerics in bfloat16"),
]


@pytest.mark.parametrize(("values", "asked"), REFUSED_BY_8)
def test_types_that_tensorrt_8_has_not_are_refused_before_the_export(
    shards: Path,
    tmp_path: Path,
    exporter: Callable[[Callable[..., Any]], None],
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, Any],
    asked: str,
) -> None:
    """ENG-9: bfloat16 is not offered there, and the default options ask for it: one line says so, in milliseconds."""

    def export(*_: object) -> ExportedModel:
        raise AssertionError("exported before the types were checked")

    exporter(export)
    monkeypatch.setattr(tensorrt_api, "gpu_compute_capabilities", lambda: ["9.0"])
    with pytest.raises(ConfigError) as caught:
        build_engine_dir(shards, tmp_path / "engines", BuildConfig(max_batch_size=2, **values), api=fake_api())
    assert str(caught.value) == (
        f"tensorrt 8.6.0 was asked for {asked}, and TensorRT 8.x carries float32, float16 and int32 only; pass "
        "--numerics dequantized --dtype float32 (or float16), or build with TensorRT 10 and up"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("version", "product", "dtypes"),
    [
        ("8.6.0", "tensorrt", ("float32", "float16")),
        ("10.14.1.48", "tensorrt", ("float32", "float16", "bfloat16")),
        ("1.7.1.116", "tensorrt_rtx", ("float32", "float16", "bfloat16")),
    ],
)
def test_types_that_a_tensorrt_has_are_built(version: str, product: str, dtypes: tuple[Any, ...]) -> None:
    for dtype in dtypes:
        build_config.check_engine_options(
            fake_api(version, product), BuildConfig(numerics=Numerics.DEQUANTIZED, dtype=dtype)
        )


class Cache:
    """A timing cache as TensorRT has it."""

    def __init__(self, content: bytes):
        self.content = content

    def combine(self, other: Cache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.content += other.content
        return b"other GPU" not in other.content

    def serialize(self) -> bytes:
        return self.content


@pytest.mark.usefixtures("exporter")
@pytest.mark.parametrize("workers", [1, 4])
def test_ranks_start_from_what_rank_0_timed(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Kernels chosen for each rank alone round differently, and ranks in a near tie would emit different tokens."""
    api, builds = fake_api("10.14.1.48"), dict[str, EngineOptions]()
    config = SimpleNamespace(create_timing_cache=Cache)
    api.module.Builder = lambda log: SimpleNamespace(create_builder_config=lambda: config)
    monkeypatch.setattr(tensorrt_api, "gpu_compute_capabilities", lambda: ["9.0"])
    monkeypatch.setattr(tensorrt_api, "load", lambda product: api)
    monkeypatch.setattr(engine_jobs, "ProcessPoolExecutor", lambda count, *_: ThreadPoolExecutor(count))

    def build_engine(path: Path, *, options: EngineOptions, **rest: Any) -> bytes:
        name, start = path.stem, options.input_timing_cache
        builds[name] = options
        if options.output_timing_cache:
            options.output_timing_cache.write_bytes((start.read_bytes() if start else b"") + f"[{name}]".encode())
        elif start:
            builds[name] = dataclasses.replace(options, input_timing_cache=Path(start.read_text()))
        return b"plan of " + name.encode()

    monkeypatch.setattr(engine, "build_engine", build_engine)
    given, left = tmp_path / "given", tmp_path / "left"
    given.write_bytes(b"[earlier]")
    options = EngineOptions(input_timing_cache=given, output_timing_cache=left)
    opened = build_engine_dir(
        shards, tmp_path / "engines", dataclasses.replace(BUILD, options=options), api=api, workers=workers
    )
    for kind in ("draft", "target"):
        assert builds[f"{kind}_rank0"].input_timing_cache == given
        assert builds[f"{kind}_rank1"].input_timing_cache == Path(f"[earlier][{kind}_rank0]")
        assert opened.read_plan(kind, 1) == f"plan of {kind}_rank1".encode()
    assert left.read_bytes() == b"[earlier][draft_rank0][earlier][target_rank0]"
    assert not [path for path in opened.path.iterdir() if path.name.startswith("tmp")]


def test_timing_caches_that_do_not_combine_are_an_error() -> None:
    """Otherwise a part of them would be written as the whole."""
    api, config = fake_api("10.14.1.48"), SimpleNamespace(create_timing_cache=Cache)
    api.module.Builder = lambda log: SimpleNamespace(create_builder_config=lambda: config)
    assert api.combined_timing_caches([b"a", b"b", b"c"]) == b"abc"
    message = "tensorrt 10.14.1.48 can't combine the timing caches of the 3 networks.*leave --output-timing-cache out"
    with pytest.raises(EngineBuildError, match=message):
        api.combined_timing_caches([b"a", b"other GPU", b"c"])


def test_several_workers_build_all_engines(api: TensorRT, shards: Path, tmp_path: Path) -> None:
    """In processes of their own, which export and load TensorRT anew."""
    phases: list[str] = []
    convert_checkpoint(shards.parent / "released", tmp_path / "drafts", tp_size=2, draft_only=True)
    build = {"api": api, "workers": 2, "on_phase": phases.append}
    opened = build_engine_dir(tmp_path / "drafts", tmp_path / "engines", BUILD, **build)
    assert sorted(phases) == sorted(f"draft rank {rank}: {step}" for rank in (0, 1) for step in ("queued", "done"))
    assert "MarkovSampling" in opened.plugins
    assert all(len(opened.read_plan("draft", rank)) > 10_000 for rank in (0, 1))


def test_a_worker_that_fails_says_why(
    api: TensorRT, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that shows itself only where TensorRT builds."""
    monkeypatch.setattr(build_config, "check_engine_options", lambda api, build: None)
    build = dataclasses.replace(BUILD, options=EngineOptions(builder_optimization_level=1))
    with pytest.raises(EngineBuildError, match="has no optimization levels; leave --builder-optimization-level out"):
        build_engine_dir(shards, tmp_path / "engines", build, api=api, workers=2)
    assert not (tmp_path / "engines").exists() and not list(tmp_path.glob(".engines*"))


@pytest.fixture
def no_export(exporter: Callable[[Callable[..., Any]], None]) -> None:
    def export(*_: object) -> ExportedModel:
        raise AssertionError("exported")

    exporter(export)


@pytest.mark.usefixtures("no_export")
def test_damaged_shards_are_found_before_anything_is_exported(api: TensorRT, shards: Path, tmp_path: Path) -> None:
    """All files that are damaged, in one line; plans of such weights would draft and say other things."""
    shutil.copytree(shards, tmp_path / "copy")
    for rank in (0, 1):
        data = bytearray((tmp_path / "copy" / f"rank{rank}.safetensors").read_bytes())
        data[-1000:] = bytes(1000)
        (tmp_path / "copy" / f"rank{rank}.safetensors").write_bytes(data)
    message = r"damaged weights: rank0.* has sha256 .*; rank1.* was written; copy it again, or run dspark-convert \("
    with pytest.raises(CheckpointError, match=message):
        build_engine_dir(tmp_path / "copy", tmp_path / "engines", BUILD, api=api)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def cwd(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path)


def mount(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda found: Path(found) == path)


def bind_mount(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the same file system looks like a directory until it is moved or removed."""
    rmdir = Path.rmdir

    def busy(self: Path) -> None:
        if self == path:
            raise OSError(16, "Device or resource busy")
        rmdir(self)

    monkeypatch.setattr(Path, "rmdir", busy)


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (cwd, "the current directory"),
        (mount, "a mount point"),
        (bind_mount, r"busy \(Device or resource busy\)"),
    ],
)
@pytest.mark.usefixtures("no_export")
def test_an_output_that_cannot_be_replaced_is_refused_before_any_work(
    api: TensorRT,
    shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: Callable[[Path, pytest.MonkeyPatch], None],
    why: str,
) -> None:
    """An empty volume: renaming onto it fails when everything is done, and what was written is removed."""
    (tmp_path / "engines").mkdir()
    place(tmp_path / "engines", monkeypatch)
    message = rf"engines: is {why}, which can't be replaced .*, such as --output .*/engines/new$"
    with pytest.raises(EngineDirError, match=message):
        build_engine_dir(shards, tmp_path / "engines", BUILD, api=api)
    assert [path.name for path in tmp_path.iterdir()] == ["engines"]


@pytest.mark.usefixtures("exporter")
def test_an_empty_output_is_replaced_and_comes_back_after_a_failure(
    api: TensorRT, shards: Path, tmp_path: Path, exporter: Callable[[Callable[..., Any]], None]
) -> None:
    def export(*_: object) -> ExportedModel:
        raise KeyboardInterrupt

    (tmp_path / "engines").mkdir()
    exporter(export)
    with pytest.raises(KeyboardInterrupt):
        build_engine_dir(shards, tmp_path / "engines", BUILD, api=api)
    assert [path.name for path in tmp_path.iterdir()] == ["engines"]
    exporter(stand_in_export)
    assert build_engine_dir(shards, tmp_path / "engines", BUILD, api=api).tp_size == 2
