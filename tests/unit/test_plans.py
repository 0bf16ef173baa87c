"""Exported models and the plans that TensorRT-RTX builds of them, for one and two ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from dspark_trt.builder import onnx_export
from dspark_trt.builder.build_config import BuildConfig, Kind, Lowering
from dspark_trt.builder.checkpoint import read_shard_config
from dspark_trt.builder.checkpoint.sharding import convert_checkpoint
from dspark_trt.builder.config import Numerics
from dspark_trt.builder.engine import build_engine, dimension_ranges, profiles_for
from dspark_trt.builder.network import Network, load_network
from dspark_trt.builder.onnx_export import ExportedModel, ExportError, export_network
from dspark_trt.plugins import tensorrt_api
from dspark_trt.plugins.op import DOMAIN

from tests.released import tiny_config, write_checkpoint

PLUGIN = BuildConfig(max_batch_size=2, max_input_len=64, max_seq_len=256)
NATIVE = dataclasses.replace(PLUGIN, lowering=Lowering.NATIVE, numerics=Numerics.DEQUANTIZED, dtype="float32")

Load = Callable[[Kind, int, BuildConfig], Network]
Export = Callable[[Kind, int, BuildConfig], ExportedModel]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    directory = tmp_path_factory.mktemp("plans")
    write_checkpoint(directory / "checkpoint", tiny_config("v4.1"))
    for tp in (1, 2):
        convert_checkpoint(directory / "checkpoint", directory / f"tp{tp}", tp_size=tp)

    def make(kind: Kind, tp: int, build: BuildConfig) -> Network:
        return load_network(kind, directory / f"tp{tp}", tp - 1, build)

    return make


@pytest.fixture(scope="module")
def export(load: Load, tmp_path_factory: pytest.TempPathFactory) -> Export:
    directory = tmp_path_factory.mktemp("onnx")
    made: dict[tuple[str, int, Lowering], ExportedModel] = {}

    def make(kind: Kind, tp: int, build: BuildConfig) -> ExportedModel:
        key = (kind, tp, build.lowering)
        if key not in made:
            path = directory / f"{kind}_tp{tp}_{build.lowering.value}.onnx"
            made[key] = export_network(load(kind, tp, build), path)
        return made[key]

    return make


def test_names_mirror_the_modules(export: Export) -> None:
    """Nodes are named after the modules that computed them; inputs and outputs as the design says."""
    model = onnx.load(export("draft", 1, NATIVE).path)
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)
    for module in ("mtp/0/main_proj/", "mtp/1/attn/wq_b/", "mtp/2/ffn/gate/", "mtp/2/confidence_head/"):
        assert any(name.startswith(module) for name in names), module
    assert [i.name for i in model.graph.input] == [
        *("anchor_ids", "positions", "slots", "target_features", "feature_positions", "feature_slots"),
        *("kv_ring_0", "kv_ring_1", "kv_ring_2"),
    ]
    assert [o.name for o in model.graph.output] == [
        *("draft_tokens", "confidence", "kv_ring_0_out", "kv_ring_1_out", "kv_ring_2_out")
    ]
    dims = {i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    assert dims["anchor_ids"] == ["R"]
    assert dims["target_features"] == ["T", 768]
    assert dims["kv_ring_0"] == [2, 32, 64]


def test_weights_beside_a_large_model(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the size of a protobuf the weights go to a file beside the model, which still loads and runs."""
    monkeypatch.setattr(onnx_export, "EXTERNAL_DATA_BYTES", 1000)
    exported = export_network(load("draft", 1, NATIVE), tmp_path / "draft.onnx")
    weights = tmp_path / "draft.onnx.data"
    assert weights.stat().st_size > 10 * exported.path.stat().st_size
    session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
    assert [o.name for o in session.get_outputs()] == list(exported.outputs)


def test_one_function_serves_one_set_of_attributes(load: Load, tmp_path: Path) -> None:
    """Nodes of an operation that differ in attributes can't share a local function: refused by name."""
    network = load("draft", 1, NATIVE)
    network.model.mtp[1].attn.cache_attributes["rope_theta"] = 5e5  # type: ignore[index,union-attr]
    with pytest.raises(ExportError, match=r"another node of the model has .*rope_theta=10000\.0"):
        export_network(network, tmp_path / "draft.onnx")


@pytest.mark.parametrize(
    ("kind", "tp", "build"),
    [
        ("draft", 1, PLUGIN),
        ("draft", 2, PLUGIN),
        ("target", 1, PLUGIN),
        ("target", 2, PLUGIN),
        # The native lowering takes half a minute per plan, so each network is built for one size.
        ("draft", 1, NATIVE),
        ("target", 2, NATIVE),
    ],
)
def test_tensorrt_builds_it(kind: Kind, tp: int, build: BuildConfig, load: Load, export: Export) -> None:
    """Both lowerings, one and two ranks: the plugin layers are really in the network, or none is."""
    network, exported = load(kind, tp, build), export(kind, tp, build)
    api = tensorrt_api.load()
    checked = build.checked(network.model.config if kind == "draft" else load("draft", tp, build).model.config)  # type: ignore[arg-type]
    plan = build_engine(
        exported.path,
        api=api,
        lowering=build.lowering,
        profiles=profiles_for(exported.inputs, dimension_ranges(kind, network.model.config, checked)),
        expected_plugin_layers=exported.plugin_counts,
        options=build.options,
    )
    assert len(plan) > 1e6
    stages = 3 if kind == "draft" else 4
    assert exported.plugin_counts["MhcCoefficients"] == 2 * stages
    assert exported.plugin_counts["MhcAllReduce"] == 2 * stages - 1
    assert exported.plugin_counts["MhcAllReduceResidualOnly"] == 1
    assert ("RoutedExperts" in exported.plugin_counts) == (build is PLUGIN)
    assert ("mailbox" in {i.name for i in exported.inputs}) == (tp > 1)


def test_released_bytes_are_carried(export: Export) -> None:
    """The plugin lowering's model holds FP8 and FP4 weights as the released bytes, not dequantised."""
    model = onnx.load(export("target", 1, PLUGIN).path)
    kinds = {t.name: t.data_type for t in model.graph.initializer}
    carried = [
        kinds[name]
        for node in model.graph.node
        if node.domain == DOMAIN and node.op_type in ("QuantizedLinear", "RoutedExperts")
        for name in node.input
        if name in kinds
    ]
    assert len(carried) == 28 * 2 + 4 * 6
    assert set(carried) == {onnx.TensorProto.INT8}
    large_floats = [t for t in model.graph.initializer if t.data_type == 1 and torch.tensor(t.dims).prod() > 50_000]
    assert all(list(t.dims) == [24, 1024] for t in large_floats)  # the coefficient projections are released in float32


@pytest.mark.parametrize("variant", ["v4", "v4.1"])
def test_sampling_draft_has_its_inputs(variant: str, tmp_path: Path) -> None:
    """With sampling the draft takes temperature and seeds and returns its logits; V4 exports as well."""
    write_checkpoint(tmp_path / "checkpoint", tiny_config(variant))
    convert_checkpoint(tmp_path / "checkpoint", tmp_path / "shards", tp_size=1)
    build = dataclasses.replace(PLUGIN, sampling=True).checked(read_shard_config(tmp_path / "shards").draft)
    exported = export_network(load_network("draft", tmp_path / "shards", 0, build), tmp_path / "draft.onnx")
    assert [i.name for i in exported.inputs][-2:] == ["temperature", "seeds"]
    assert exported.outputs[:3] == ("draft_tokens", "confidence", "draft_logits")
    assert exported.plugin_counts["HcCollapse"] == (7 if variant == "v4" else 1)
