"""The engine directory: what is written, what opening refuses, what a run must match."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dspark_trt.builder import engine, engine_dir, engine_jobs, network, onnx_export
from dspark_trt.builder.checkpoint import CheckpointError, convert_checkpoint, read_shard_config
from dspark_trt.builder.config import ConfigError, Numerics
from dspark_trt.builder.engine import BuildConfig, Lowering
from dspark_trt.builder.engine_dir import EngineDir, EngineDirError, build_engine_dir
from dspark_trt.builder.onnx_export import ExportedModel
from dspark_trt.plugins import tensorrt_api
from dspark_trt.plugins.library import PLUGIN_ABI
from dspark_trt.plugins.tensorrt_api import EngineBuildError, EngineOptions, TensorRT

from tests.fake_tensorrt import fake_api
from tests.one_op_models import stand_in_export
from tests.released import tiny_config, write_checkpoint

BUILD = BuildConfig(max_batch_size=2, options=EngineOptions(compute_capabilities=("8.9",)))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks of a random V4.1 checkpoint with a tokenizer."""
    root = tmp_path_factory.mktemp("shards")
    write_checkpoint(root / "released", tiny_config("v4.1"))
    (root / "released" / "tokenizer.json").write_text("{}")
    convert_checkpoint(root / "released", root / "shards", tp_size=2)
    return root / "shards"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Puts a function in place of the exporter of both networks; a network is then what it is loaded from."""

    def replace(export: Callable[..., Any]) -> None:
        monkeypatch.setattr(network, "load_network", lambda *source, **options: source)
        monkeypatch.setattr(onnx_export, "export_network", export)

    replace(stand_in_export)
    return replace


@pytest.fixture
def built(api: TensorRT, shards: Path, tmp_path: Path, exporter: object) -> EngineDir:
    """As built on a machine that has the kernel library."""
    directory = build_engine_dir(shards, tmp_path / "engines", BUILD, api=api)
    return EngineDir.open(change_header(directory, lambda header: header.update(kernels=True)))


def change_header(opened: EngineDir, change: Callable[[dict[str, Any]], object]) -> Path:
    path = opened.path / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return opened.path


@pytest.mark.usefixtures("exporter")
def test_a_build_writes_one_engine_a_network_and_rank(api: TensorRT, shards: Path, tmp_path: Path) -> None:
    phases: list[str] = []
    opened = build_engine_dir(shards, tmp_path / "engines", BUILD, api=api, on_phase=phases.append)
    assert phases == [
        f"{kind} rank {rank}: {step}" for rank in (0, 1) for kind in ("draft", "target") for step in ("export", "build")
    ]
    files = sorted(str(p.relative_to(opened.path)) for p in opened.path.rglob("*") if p.is_file())
    assert files == [
        "config.json",
        "draft/rank0.engine",
        "draft/rank1.engine",
        "target/rank0.engine",
        "target/rank1.engine",
        "tokenizer.json",
        "weights/config.json",
        "weights/rank0.safetensors",
        "weights/rank1.safetensors",
    ]
    assert opened.tensorrt == {"product": "tensorrt_rtx", "version": api.version}
    assert (opened.compute_capabilities, opened.tp_size, opened.plugins) == (("8.9",), 2, {"HcCollapse": 1})
    assert opened.build == dataclasses.replace(BUILD, num_draft_tokens=5, options=EngineOptions())
    assert opened.weights_hash == read_shard_config(shards).weights_hash
    assert opened == EngineDir.open(str(opened.path))
    assert opened.read_plan("draft", 0) != opened.read_plan("draft", 1)
    assert [p.name for p in tmp_path.iterdir()] == ["engines"]


def test_the_weights_are_the_shards_themselves(built: EngineDir, shards: Path) -> None:
    """They are read by the torch session and by refits; linked, not copied, where the file system can."""
    assert read_shard_config(built.path / "weights") == read_shard_config(shards)
    name = "rank0.safetensors"
    assert (built.path / "weights" / name).samefile(shards / name)


@pytest.mark.usefixtures("exporter")
def test_weights_are_copied_where_links_are_impossible(
    api: TensorRT, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise OSError("another file system")

    monkeypatch.setattr(os, "link", no_links)
    opened = build_engine_dir(shards, tmp_path / "engines", BUILD, api=api)
    assert read_shard_config(opened.path / "weights") == read_shard_config(shards)


def test_a_matching_run_is_accepted(built: EngineDir, api: TensorRT) -> None:
    built.check_runtime("tensorrt_rtx", api.version, "8.9", 2)


FLIPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "product": ("TensorRT product: built for tensorrt_rtx, here tensorrt", {"product": "tensorrt"}),
    "version": ("TensorRT version: built for {version}, here 1.7.1.117", {"version": "1.7.1.117"}),
    "sm": ("compute capability: built for 8.9, here 9.0", {"compute_capability": "9.0"}),
    "tp": ("number of ranks: built for 2, here 1", {"world_size": 1}),
}


@pytest.mark.parametrize("field", FLIPPED)
def test_a_run_that_differs_in_one_field_is_refused(built: EngineDir, api: TensorRT, field: str) -> None:
    """ENG-2: each field of the header that a run can contradict; both values and the remedy."""
    message, change = FLIPPED[field]
    facts: dict[str, Any] = {
        "product": "tensorrt_rtx",
        "version": api.version,
        "compute_capability": "8.9",
        "world_size": 2,
    }
    with pytest.raises(EngineDirError) as caught:
        built.check_runtime(**{**facts, **change})
    expected = message.format(version=api.version)
    assert f"does not fit this run. {expected}. " in str(caught.value)
    assert "dspark-build --checkpoint" in str(caught.value)
    assert ("mpirun -n 2" in str(caught.value)) == (field == "tp")


def test_plans_without_room_for_kernels_are_refused(built: EngineDir, api: TensorRT) -> None:
    """Plans built without the kernel library reserve no scratch memory: kernels would write past it."""
    opened = EngineDir.open(change_header(built, lambda header: header.update(kernels=False)))
    with pytest.raises(EngineDirError, match="kernels of all plugins: built for False, here True"):
        opened.check_runtime("tensorrt_rtx", api.version, "8.9", 2)


def test_all_differences_are_reported_together(built: EngineDir) -> None:
    """NVIDIA/TensorRT-LLM#1038: one number at a time, after minutes of loading."""
    with pytest.raises(EngineDirError) as caught:
        built.check_runtime("tensorrt", "10.14.1.48", "9.0", 4)
    assert str(caught.value).count("built for") == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(plugin_abi=PLUGIN_ABI + 1), f"plugin ABI: built for {PLUGIN_ABI + 1}, here {PLUGIN_ABI}"),
        (lambda v: v["plugins"].update(HcCollapse=2), "version of plugin HcCollapse: built for 2, here 1"),
        (lambda v: v["plugins"].update(Gone=1), "version of plugin Gone: built for 1, here None"),
    ],
)
def test_plugins_of_another_package_version_are_refused(
    built: EngineDir, api: TensorRT, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    """ENG-2: plugin ABI and plugin versions of the header."""
    opened = EngineDir.open(change_header(built, change))
    with pytest.raises(EngineDirError, match=message):
        opened.check_runtime("tensorrt_rtx", api.version, "8.9", 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda v: v.update(version=1),
            "format 'dspark-trt engines' version 1, expected 'dspark-trt engines' version 2; run dspark-convert again",
        ),
        (lambda v: v.update(format="other"), "format 'other'"),
        (lambda v: v.update(surprise=1), "surprise"),
        (lambda v: v.pop("weights_hash"), "weights_hash"),
        (lambda v: v["draft"].pop("block_size"), "block_size"),
        (lambda v: v["build"].update(surprise=1), "surprise"),
        (lambda v: v["build"].update(num_draft_tokens=7), "built for 7 draft tokens, the draft's block is 5"),
        (lambda v: v["files"].pop("draft/rank1.engine"), "draft/rank1.engine is not listed"),
        (lambda v: v.update(mapping={"tp_size": 0}), "mapping.tp_size is 0, expected at least 1"),
        (lambda v: v.update(tensorrt={}), "tensorrt: unknown keys [], missing keys ['product', 'version']"),
        (lambda v: v.update(compute_capabilities=[9]), "compute_capabilities[0] is 9, expected a string"),
        (lambda v: v.update(plugins=3), "plugins is 3, expected an object"),
        (lambda v: v.update(kernels="yes"), "kernels is 'yes', expected true or false"),
        (lambda v: v.update(files={"draft/rank0.engine": 3}), "files['draft/rank0.engine'] is 3, expected an object"),
        (lambda v: v.update(target={}), "target: unknown keys [], missing keys ['bos_token_id'"),
        (lambda v: v["target"].update(eos_token_ids=3), "target.eos_token_ids is 3, expected a list"),
        (lambda v: v["build"].update(dtype="foo"), "build.dtype is 'foo', expected one of 'bfloat16', 'float16'"),
        (lambda v: v["build"].update(max_batch_size="8"), "build.max_batch_size is '8', expected an integer"),
        (lambda v: v["build"].update(max_batch_size=-1), "build: max_batch_size is -1, expected 1..64"),
        (lambda v: v["build"].update(max_batch_size=0), "build: max_batch_size is 0, expected 1..64"),
        (lambda v: v["build"].update(max_seq_len="x"), "build.max_seq_len is 'x', expected an integer"),
        (lambda v: v.update(build=None), "build is None, expected an object"),
        (
            lambda v: v["draft"].update(hidden_size=512),
            "draft.hidden_size is 512 in config.json, 256 in weights/config",
        ),
        (lambda v: v["target"].update(rope_theta=5.0), "target.rope_theta is 5.0 in config.json, "),
        (lambda v: v.update(target=None), "target.hidden_size is None in config.json, 256 in weights/config.json"),
        (lambda v: v["build"].update(max_batch_size=3), "the section build of config.json is not the one that was"),
        (
            lambda v: v["build"].update(numerics="dequantized"),
            "the section build of config.json is not the one that was built. Copy it again, or build again",
        ),
        (
            lambda v: v["files"]["weights/rank0.safetensors"].update(sha256="0"),
            "weights/rank0.safetensors has another sha256 in config.json than in weights/config.json",
        ),
        (lambda v: v.update(mapping={"tp_size": 3}), "draft/rank2.engine is not listed; target/rank2.engine is not"),
    ],
)
def test_a_header_that_cannot_be_right_is_refused(
    built: EngineDir, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    """ENG-2: format version, N, rank files; unknown and missing keys."""
    path = change_header(built, change)
    with pytest.raises(EngineDirError) as caught:
        EngineDir.open(path)
    assert message in str(caught.value) and "dspark-build" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_header_in_another_order_is_the_same(built: EngineDir) -> None:
    change_header(built, lambda header: header.update(build=dict(reversed(header.pop("build").items()))))
    assert EngineDir.open(built.path) == built


def test_a_truncated_engine_is_found_before_it_is_loaded(built: EngineDir) -> None:
    plan = built.path / "draft" / "rank1.engine"
    size = plan.stat().st_size
    plan.write_bytes(plan.read_bytes()[:-1])
    (built.path / "weights" / "rank0.safetensors").unlink()
    with pytest.raises(EngineDirError) as caught:
        EngineDir.open(built.path)
    assert f"draft/rank1.engine has {size - 1} bytes, {size} were written" in str(caught.value)
    assert "weights/rank0.safetensors is missing" in str(caught.value)


def test_the_engine_of_another_rank_is_refused(built: EngineDir) -> None:
    """ENG-2, rank: plans may have the same size, and the wrong one would give wrong tokens."""
    other = (built.path / "draft" / "rank0.engine").read_bytes()
    (built.path / "draft" / "rank1.engine").write_bytes(other)
    change_header(built, lambda header: header["files"]["draft/rank1.engine"].update(bytes=len(other)))
    opened = EngineDir.open(built.path)
    opened.read_plan("draft", 0)
    with pytest.raises(EngineDirError, match=r"rank1\.engine: not the plan written for rank 1"):
        opened.read_plan("draft", 1)


@pytest.mark.parametrize("text", [None, b"", b"\xff\xfe", b"[]", b"{}"])
def test_what_is_no_engine_directory_is_named(tmp_path: Path, text: bytes | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(EngineDirError, match=str(tmp_path / "config.json")):
        EngineDir.open(tmp_path)


def test_an_existing_directory_is_left_alone(built: EngineDir, api: TensorRT, shards: Path) -> None:
    before = sorted(built.path.rglob("*"))
    with pytest.raises(EngineDirError, match="exists already; remove it or pass another --output"):
        build_engine_dir(shards, built.path, BUILD, api=api)
    assert sorted(built.path.rglob("*")) == before


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
        engine.check_engine_options(fake_api(version, product), BuildConfig(numerics=Numerics.DEQUANTIZED, dtype=dtype))


def test_engine_file_names() -> None:
    assert engine_dir.engine_file_name("target", 3) == "target/rank3.engine"


def test_weights_of_another_checkpoint_are_refused(built: EngineDir, shards: Path, tmp_path: Path) -> None:
    """ENG-2: the same shapes and sizes, so that nothing else tells them apart."""
    write_checkpoint(tmp_path / "released", tiny_config("v4.1"), seed=1)
    convert_checkpoint(tmp_path / "released", tmp_path / "other", tp_size=2)
    weights = built.path / "weights"
    for name in ("config.json", "rank0.safetensors", "rank1.safetensors"):
        (weights / name).unlink()
        shutil.copyfile(tmp_path / "other" / name, weights / name)
    with pytest.raises(EngineDirError, match=r"weights are of a checkpoint with hash .*, the engines of .*build again"):
        EngineDir.open(built.path)


class Cache:
    """A timing cache as TensorRT has it."""

    def __init__(self, content: bytes):
        self.content = content

    def combine(self, other: Cache, ignore_mismatch: bool) -> None:
        assert not ignore_mismatch
        self.content += other.content

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
    monkeypatch.setattr(engine_jobs, "ProcessPoolExecutor", lambda count, context: ThreadPoolExecutor(count))

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
    monkeypatch.setattr(engine, "check_engine_options", lambda api, build: None)
    build = dataclasses.replace(BUILD, options=EngineOptions(builder_optimization_level=1))
    with pytest.raises(EngineBuildError, match="has no optimization levels; leave builder_optimization_level out"):
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


def test_weights_carry_their_hash(built: EngineDir, shards: Path) -> None:
    name = "rank1.safetensors"
    facts = {
        "bytes": (shards / name).stat().st_size,
        "sha256": hashlib.sha256((shards / name).read_bytes()).hexdigest(),
    }
    assert built.files[f"weights/{name}"] == facts == read_shard_config(shards).rank_files[name]


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
