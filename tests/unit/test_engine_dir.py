"""The engine directory: what is written, what opening refuses, what a run must match."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dspark_trt.builder import engine_dir
from dspark_trt.builder.checkpoint import convert_checkpoint, read_shard_config
from dspark_trt.builder.engine_dir import EngineDir, EngineDirError, build_engine_dir
from dspark_trt.plugins.library import PLUGIN_ABI
from dspark_trt.plugins.tensorrt_api import EngineOptions, TensorRT

from tests.one_op_models import BUILD
from tests.released import tiny_config, write_checkpoint


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


def test_weights_carry_their_hash(built: EngineDir, shards: Path) -> None:
    name = "rank1.safetensors"
    facts = {
        "bytes": (shards / name).stat().st_size,
        "sha256": hashlib.sha256((shards / name).read_bytes()).hexdigest(),
    }
    assert built.files[f"weights/{name}"] == facts == read_shard_config(shards).rank_files[name]
