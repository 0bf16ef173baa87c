"""Plans from ONNX models, in both lowerings, and the ranges they take. Needs TensorRT-RTX for the plans."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx
import onnx.inliner
import onnx.parser
import pytest
import torch
from dspark_trt.builder import build_config, engine
from dspark_trt.builder.build_config import BuildConfig, Lowering
from dspark_trt.builder.config import ConfigError, DraftConfig, Numerics, parse_configs
from dspark_trt.builder.engine import build_engine, dimension_ranges, profiles_for
from dspark_trt.builder.network import TensorInfo
from dspark_trt.plugins import tensorrt_api
from dspark_trt.plugins.profiles import ShapeRangeError, check_shapes
from dspark_trt.plugins.registry import ALL_OPS
from dspark_trt.plugins.tensorrt_api import EngineBuildError, EngineOptions, TensorRT

from tests.fake_tensorrt import fake_api
from tests.one_op_models import one_op_model, profile_of, save
from tests.released import tiny_config

FLOATS = ("float32", "float16", "bfloat16")
BYTE_OPS = ("QuantizedLinear", "RoutedExperts")
"""Operations of released numerics alone: TensorRT refuses the casts to FP8 in their functions."""
ONE_GPU = EngineOptions(compute_capabilities=("8.0",))


def plan_of(api: TensorRT, model: onnx.ModelProto, path: Path, **options: Any) -> bytes:
    save(model, path / "model.onnx")
    expected = {n.op_type: 1 for n in model.graph.node if n.domain == "dspark"}
    return build_engine(
        path / "model.onnx",
        **{
            "api": api,
            "lowering": "plugin",
            "profiles": [profile_of(model)],
            "expected_plugin_layers": expected,
            "options": ONE_GPU,
            **options,
        },
    )


@pytest.mark.parametrize("activation", FLOATS)
@pytest.mark.parametrize("name", ALL_OPS)
def test_every_operation_builds_as_a_plugin(api: TensorRT, tmp_path: Path, name: str, activation: str) -> None:
    """One plugin layer, byte weights and aliased caches included, from 1 row to 8."""
    assert len(plan_of(api, one_op_model(name, activation), tmp_path)) > 1000


@pytest.mark.parametrize("activation", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [n for n in ALL_OPS if n not in BYTE_OPS])
def test_every_operation_builds_natively(api: TensorRT, tmp_path: Path, name: str, activation: str) -> None:
    """MhcCoefficients has 20 Sinkhorn rounds: exponential build time would end in the test's time limit."""
    assert len(plan_of(api, one_op_model(name, activation), tmp_path, lowering="native")) > 1000


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("name", ["MhcAllReduce", "MhcAllReduceResidualOnly"])
def test_the_all_reduce_builds_for_several_ranks(api: TensorRT, tmp_path: Path, name: str, tp_size: int) -> None:
    """Natively it is TensorRT's own collective; as a plugin it takes the mailbox."""
    model = one_op_model(name, "bfloat16", tp_size=tp_size)
    for lowering in Lowering:
        assert plan_of(api, model, tmp_path, lowering=lowering)
    inlined = onnx.inliner.inline_local_functions(model)
    network = api.parse(inlined.SerializeToString(), tmp_path / "model.onnx").network
    kinds = [network.get_layer(i).type.name for i in range(network.num_layers)]
    assert kinds.count("DIST_COLLECTIVE") == 1
    assert network.get_output(0).shape[1:] == (4, 128)


@pytest.mark.parametrize("function", [True, False])
def test_the_plugin_lowering_yields_plugins_with_and_without_functions(
    api: TensorRT, tmp_path: Path, function: bool
) -> None:
    """TensorRT prefers a function to a plugin unless the node names the plugin's namespace."""
    assert plan_of(api, one_op_model("HcCollapse", function=function), tmp_path)


def test_the_native_lowering_needs_the_functions(api: TensorRT, tmp_path: Path) -> None:
    with pytest.raises(EngineBuildError, match=r"HcCollapse the_HcCollapse: .*Plugin not found"):
        plan_of(api, one_op_model("HcCollapse", function=False), tmp_path, lowering="native")


@pytest.mark.parametrize("expected", [{}, {"HcCollapse": 2}, {"HcCollapse": 1, "MhcAllReduce": 1}])
def test_other_plugin_layers_than_meant_are_refused(api: TensorRT, tmp_path: Path, expected: dict[str, int]) -> None:
    with pytest.raises(EngineBuildError) as caught:
        plan_of(api, one_op_model("HcCollapse"), tmp_path, expected_plugin_layers=expected)
    if "MhcAllReduce" in expected:
        assert "than meant: MhcAllReduce 0 (expected 1). A missing one" in str(caught.value)
    else:
        assert f"than meant: HcCollapse 1 (expected {expected.get('HcCollapse', 0)})" in str(caught.value)


def test_an_operation_that_was_imported_as_layers_fails_the_count(
    api: TensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is registered while a model is parsed decides silently; here a creator and a name are missing."""
    monkeypatch.setattr(engine, "_name_plugins", lambda model, versions: None)
    with pytest.raises(EngineBuildError, match=r"HcCollapse 0 \(expected 1\)"):
        plan_of(api, one_op_model("HcCollapse"), tmp_path)


def test_two_functions_of_one_name_keep_their_own_bodies(api: TensorRT, tmp_path: Path) -> None:
    """Nodes with different attributes have different bodies; TensorRT ignores ONNX overloads and takes the first."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18, "local": 1]> g (float[n,8] x) => (float[n,8] y)'
        "{ z = local.F(x) y = local.F(z) }"
        '<opset_import: ["": 18], domain: "local"> F (x) => (y) { y = Relu(x) }'
        '<opset_import: ["": 18], domain: "local"> F (x) => (y) { y = Exp(x) }'
    )
    for index in range(2):
        model.graph.node[index].overload = model.functions[index].overload = str(index)
    seen: list[list[str]] = []

    def layers(network: tensorrt_api.ParsedNetwork, *_: Any) -> None:
        seen.append([network.network.get_layer(i).type.name for i in range(network.network.num_layers)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_check_plugin_layers", layers)
        plan_of(api, model, tmp_path, lowering="native")
    assert seen == [["ACTIVATION", "UNARY"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op_type": "HcCollapsed"}, "dspark.HcCollapsed version 1 is not an operation of this package"),
        ({"plugin_version": "2"}, "dspark.HcCollapse version 2 is not an operation"),
        ({"plugin_namespace": "other"}, "other.HcCollapse version 1 is not an operation"),
    ],
)
def test_unknown_operations_are_named_with_what_is_known(
    api: TensorRT, tmp_path: Path, change: dict[str, str], message: str
) -> None:
    """ENG-1: wrong name, wrong version, wrong namespace."""
    model = one_op_model("HcCollapse")
    node = model.graph.node[0]
    for name, value in change.items():
        if name == "op_type":
            node.op_type = value
        else:
            node.attribute.append(onnx.helper.make_attribute(name, value))
    with pytest.raises(EngineBuildError) as caught:
        plan_of(api, model, tmp_path)
    assert message in str(caught.value) and "HcCollapse 1, " in str(caught.value)


def test_a_static_size_that_is_dynamic_is_refused(api: TensorRT, tmp_path: Path) -> None:
    """A kernel made for one number of slots would run on another."""
    model = one_op_model("ContextKvInsert")
    for value in (model.graph.input[3], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_param = "S"
    with pytest.raises(EngineBuildError, match=r"ring is float32\[-1, 16, 32\], expected ring T\[S, W, 32\]"):
        plan_of(api, model, tmp_path)


def test_a_profile_must_cover_the_inputs(api: TensorRT, tmp_path: Path) -> None:
    model = one_op_model("HcCollapse")
    profile = profile_of(model)
    for wrong in ([], [{"streams": profile["streams"]}], [{**profile, "other": profile["pre"]}]):
        with pytest.raises(EngineBuildError, match=r"dynamic inputs are \['pre', 'streams'\]"):
            plan_of(api, model, tmp_path, profiles=wrong)


def test_gpus_that_the_product_cannot_build_for_are_named(api: TensorRT, tmp_path: Path) -> None:
    options = EngineOptions(compute_capabilities=("8.9", "9.0"))
    with pytest.raises(
        EngineBuildError, match=r"compute capability 9.0, .*data-centre GPUs such as 9.0 need enterprise"
    ):
        plan_of(api, one_op_model("HcCollapse"), tmp_path, options=options)


def test_a_timing_cache_is_refused_where_none_exists(api: TensorRT, tmp_path: Path) -> None:
    options = EngineOptions(output_timing_cache=tmp_path / "cache")
    with pytest.raises(EngineBuildError, match="leave the timing cache options out"):
        plan_of(api, one_op_model("HcCollapse"), tmp_path, options=options)


def test_a_build_says_what_it_built_in_one_line(
    api: TensorRT, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="dspark_trt"):
        plan_of(api, one_op_model("HcCollapse"), tmp_path)
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO]
    assert len(lines) == 1
    assert lines[0].startswith("model.onnx: plugin lowering, 1 layers of which 1 plugins, ")


PROFILES = [{"x": ((2, 4), (3, 4), (6, 4))}, {"x": ((7, 4), (8, 4), (9, 4))}]


@pytest.mark.parametrize(("rows", "profile"), [(2, 0), (3, 0), (6, 0), (7, 1), (9, 1)])
def test_shapes_inside_a_profile_are_taken(rows: int, profile: int) -> None:
    """ENG-3: min, opt, max; a second profile."""
    assert check_shapes(PROFILES, {"x": (rows, 4)}) == profile


@pytest.mark.parametrize("shape", [(0, 4), (1, 4), (10, 4), (3, 5), (3,), (3, 4, 1)])
def test_shapes_outside_every_profile_are_refused_with_the_range(shape: tuple[int, ...]) -> None:
    """ENG-3: 0, min - 1, max + 1 rows; another width or rank."""
    with pytest.raises(ShapeRangeError) as caught:
        check_shapes(PROFILES, {"x": shape})
    assert f"profile 0: x is {list(shape)}, expected [2, 4] to [6, 4]" in str(caught.value)
    assert "profile 1:" in str(caught.value)


def test_missing_and_surplus_inputs_are_named() -> None:
    with pytest.raises(ShapeRangeError, match="x is missing; z is not an input"):
        check_shapes(PROFILES, {"z": (1,)})


@pytest.fixture(scope="module")
def draft() -> DraftConfig:
    """Block 5, window 32."""
    return parse_configs(tiny_config("v4.1"))[1]


def test_ranges_cover_prefill_and_captured_steps(draft: DraftConfig) -> None:
    build = BuildConfig(max_batch_size=4, max_input_len=100).checked(draft)
    ranges = dimension_ranges("draft", draft, build)
    assert ranges["decode"] == {"R": (1, 1, 4), "T": (6, 6, 24)}
    assert ranges["context"]["T"] == (1, 50, 100)
    assert dimension_ranges("target", draft, build)["decode"]["T"] == (1, 6, 24)
    longer = dataclasses.replace(build, max_input_len=1000)
    assert dimension_ranges("draft", draft, longer)["context"]["T"][2] == 4 * 32  # windows hold no more
    assert dimension_ranges("target", draft, longer)["context"]["T"][2] == 1000
    inputs = [TensorInfo("anchor_ids", torch.int32, ("R",)), TensorInfo("kv_ring_0", torch.bfloat16, (4, 32, 64))]
    profiles = profiles_for(inputs, ranges)
    assert [p["anchor_ids"] for p in profiles] == [((1,), (1,), (4,))] * 2
    assert profiles[0]["kv_ring_0"] == ((4, 32, 64),) * 3
    with pytest.raises(ConfigError, match="checked"):
        dimension_ranges("draft", draft, BuildConfig())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lowering": Lowering.NATIVE}, "add --numerics dequantized"),
        (
            {"lowering": Lowering.NATIVE, "numerics": Numerics.DEQUANTIZED, "sampling": True},
            "no bitwise operators",
        ),
        ({"dtype": "float16"}, "dtype is float16"),
        ({"max_batch_size": 0}, "max_batch_size is 0, expected 1..64"),
        ({"max_batch_size": 65}, "max_batch_size is 65, expected 1..64: sampling takes so many"),
        ({"max_input_len": 5}, "max_input_len is 5, expected 6, a step of one request, to 32768"),
        ({"max_seq_len": 6}, "max_seq_len is 6, expected 7..4096"),
        ({"max_seq_len": 4097}, "max_seq_len is 4097, expected 7..4096"),
        ({"num_draft_tokens": 7}, "7 draft tokens requested, but this draft was trained with blocks of 5"),
    ],
)
def test_configurations_that_cannot_work_are_refused(draft: DraftConfig, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BuildConfig(**values).checked(draft)


def test_all_bad_values_are_reported_at_once(draft: DraftConfig) -> None:
    with pytest.raises(ConfigError, match=r"max_batch_size(.|\n)*max_input_len(.|\n)*max_seq_len"):
        BuildConfig(max_batch_size=-1, max_input_len=1, max_seq_len=1).checked(draft)


def test_a_build_configuration_survives_json(draft: DraftConfig) -> None:
    build = BuildConfig(lowering=Lowering.NATIVE, numerics=Numerics.DEQUANTIZED, dtype="float16", max_seq_len=99)
    build = build.checked(draft)
    values = build_config.to_dict(build)
    assert build_config.from_dict(values) == build
    for wrong in ({**values, "more": 1}, {k: v for k, v in values.items() if k != "dtype"}):
        with pytest.raises(ConfigError, match=r"^build: unknown keys .* missing keys"):
            build_config.from_dict(wrong)


def test_the_table_of_operations_cannot_be_changed() -> None:
    assert isinstance(ALL_OPS, MappingProxyType)
    assert all(name == op.name for name, op in ALL_OPS.items())


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("dtype", "foo", "'foo', expected one of 'bfloat16', 'float16', 'float32'"),
        ("numerics", 1, "1, expected one of 'released', 'dequantized'"),
        ("max_batch_size", "8", "'8', expected an integer"),
        ("max_seq_len", 4096.0, "4096.0, expected an integer"),
        ("sampling", 1, "1, expected true or false"),
        ("num_draft_tokens", "5", "'5', expected an integer"),
    ],
)
def test_a_build_configuration_of_other_types_is_refused(key: str, value: object, expected: str) -> None:
    """Of a header that was edited: key, value and what was expected."""
    with pytest.raises(ConfigError) as caught:
        build_config.from_dict({**build_config.to_dict(BuildConfig()), key: value})
    assert str(caught.value) == f"build.{key} is {expected}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"builder_optimization_level": 3}, "has no optimization levels; leave --builder-optimization-level out"),
        ({"input_timing_cache": Path("x")}, "times kernels where the plan runs; leave the timing cache options out"),
        ({"output_timing_cache": Path("x")}, "times kernels where the plan runs; leave the timing cache options out"),
    ],
)
def test_options_that_tensorrt_rtx_has_not_are_refused(options: dict[str, Any], message: str) -> None:
    build = BuildConfig(options=EngineOptions(**options))
    with pytest.raises(ConfigError, match=message):
        build_config.check_engine_options(fake_api("1.7.1.116", "tensorrt_rtx"), build)


def test_a_timing_cache_that_is_not_there_is_refused(tmp_path: Path) -> None:
    api, given = fake_api("10.14.1.48"), tmp_path / "cache"
    build = BuildConfig(options=EngineOptions(input_timing_cache=given))
    with pytest.raises(ConfigError, match="cache: not found; leave it out to start anew"):
        build_config.check_engine_options(api, build)
    given.touch()
    build_config.check_engine_options(api, build)
