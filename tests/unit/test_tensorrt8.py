"""TensorRT 8 as a builder: types pinned, plugins from the C++ library, and their faults heard. Its API is played by
fakes, as its module exists for one version of Python only."""

from __future__ import annotations

import shutil
import subprocess
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from dspark_trt.plugins import library, tensorrt8, trt_plugin
from dspark_trt.plugins.library import TRT_LIBRARY_NAME, KernelUnavailableError, load_trt_plugins
from dspark_trt.plugins.registry import ALL_OPS
from dspark_trt.plugins.tensorrt_api import EngineBuildError, EngineOptions, ParsedNetwork, TensorRT

from tests.fake_tensorrt import DataType, Severity, fake_api
from tests.one_op_models import one_op_model

FLOAT, HALF, INT32, BOOL = DataType.FLOAT, DataType.HALF, DataType.INT32, DataType.BOOL
Flag = Enum("Flag", "FP16 TF32 OBEY_PRECISION_CONSTRAINTS")


def tensor(dtype: DataType, *, on_gpu: bool = True, name: str = "t", shape: tuple[int, ...] = (1,)) -> Any:
    return SimpleNamespace(dtype=dtype, is_execution_tensor=on_gpu, name=name, shape=shape)


class Layer:
    """A layer as TensorRT 8 shows it: what is not pinned stays None."""

    def __init__(self, kind: str, inputs: list[Any], outputs: list[Any], plugin: str = ""):
        self.type, self.inputs, self.outputs = SimpleNamespace(name=kind), inputs, outputs
        self.num_inputs, self.num_outputs = len(inputs), len(outputs)
        self.precision: DataType | None = None
        self.output_types: dict[int, DataType] = {}
        self.plugin = SimpleNamespace(plugin_type=plugin)

    def get_input(self, index: int) -> Any:
        return self.inputs[index]

    def get_output(self, index: int) -> Any:
        return self.outputs[index]

    def set_output_type(self, index: int, dtype: DataType) -> None:
        self.output_types[index] = dtype


class Config:
    """A builder's configuration; TF32 is on in a new one."""

    def __init__(self) -> None:
        self.flags, self.tactics, self.preview, self.profiles = {Flag.TF32}, 7, {}, 0

    def set_flag(self, flag: Flag) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: Flag) -> None:
        self.flags.discard(flag)

    def set_tactic_sources(self, sources: int) -> None:
        self.tactics = sources

    def set_preview_feature(self, feature: str, on: bool) -> None:
        self.preview[feature] = on

    def create_timing_cache(self, start: bytes) -> bytes:
        return start

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        return not cache

    def add_optimization_profile(self, profile: Any) -> None:
        self.profiles += 1


MODULE = SimpleNamespace(
    BuilderFlag=Flag,
    DataType=DataType,
    PreviewFeature=SimpleNamespace(PROFILE_SHARING_0806="sharing"),
    ProfilingVerbosity=SimpleNamespace(LAYER_NAMES_ONLY="names"),
)


def configured(*layers: Layer, types: dict[str, str]) -> Config:
    config = Config()
    network = SimpleNamespace(num_layers=len(layers), get_layer=lambda i: layers[i])
    tensorrt8.configure(MODULE, network, config, types)
    return config


def test_float16_is_computed_where_the_model_says_so() -> None:
    """Weakly typed networks may compute in any enabled type, and call computed tensors float32 whatever the model
    says: a plugin pinned to float32 by that has no format left. What is float32 in the model stays it; what is float16
    may be either."""
    half = Layer("MATRIX_MULTIPLY", [tensor(HALF, name="x"), tensor(HALF, name="w")], [tensor(FLOAT, name="q")])
    between = Layer("SHUFFLE", [tensor(FLOAT, name="q")], [tensor(FLOAT, name="(made by the parser)")])
    wide = Layer("ELEMENTWISE", [tensor(FLOAT, name="a"), tensor(FLOAT, name="b")], [tensor(FLOAT, name="c")])
    inputs = [tensor(FLOAT, name="(made by the parser)"), None, tensor(FLOAT, name="c"), tensor(INT32, name="slots")]
    plugin = Layer("PLUGIN_V2", inputs, [tensor(FLOAT, name="attended"), tensor(FLOAT, name="sums")])
    compare = Layer("ELEMENTWISE", [tensor(FLOAT, name="attended")] * 2, [tensor(BOOL, name="more")])
    halves, wides = ("x", "w", "q", "attended"), ("a", "b", "c", "sums")
    types = dict.fromkeys(halves, "float16") | dict.fromkeys(wides, "float32")
    config = configured(half, between, wide, plugin, compare, types=types)
    assert config.flags == {Flag.FP16, Flag.OBEY_PRECISION_CONSTRAINTS}
    assert [layer.precision for layer in (half, between, wide, plugin, compare)] == [None, None, FLOAT, None, None]
    assert half.output_types == {} and between.output_types == {} and wide.output_types == {0: FLOAT}
    assert plugin.output_types == {0: HALF, 1: FLOAT} and compare.output_types == {}


def test_what_has_its_type_anyway_is_left_alone() -> None:
    """Casts, constants and shapes; TensorRT refuses some of these constraints. What follows them has their types."""
    layers = [
        Layer("CAST", [tensor(FLOAT, name="x")], [tensor(FLOAT, name="wide")]),
        Layer("CONSTANT", [], [tensor(HALF, name="(a scalar)")]),
        Layer("SHAPE", [tensor(FLOAT, name="x")], [tensor(INT32, name="s", on_gpu=False)]),
        Layer("GATHER", [tensor(FLOAT, name="x"), tensor(INT32)], [tensor(FLOAT, name="f", on_gpu=False)]),
        Layer("GATHER", [tensor(INT32), tensor(INT32)], [tensor(INT32)]),
    ]
    after = Layer("ELEMENTWISE", [tensor(FLOAT, name="x"), tensor(HALF, name="(a scalar)")], [tensor(FLOAT, name="y")])
    configured(*layers, after, types={"x": "float16", "wide": "float32", "f": "float16"})
    assert [(layer.precision, layer.output_types) for layer in layers] == [(None, {})] * len(layers)
    assert (after.precision, after.output_types) == (None, {})
    more = Layer("UNARY", [tensor(FLOAT, name="wide")], [tensor(FLOAT, name="(made by the parser)")])
    sums = Layer("REDUCE", [tensor(FLOAT, name="(made by the parser)")], [tensor(FLOAT, name="sum")])
    configured(more, sums, types={"x": "float16", "wide": "float32", "sum": "float32"})
    assert [(layer.precision, layer.output_types) for layer in (more, sums)] == [(FLOAT, {0: FLOAT})] * 2


def test_a_float32_network_stays_float32() -> None:
    """Without TF32 and without libraries of kernels; a profile serves several contexts."""
    layer = Layer("MATRIX_MULTIPLY", [tensor(FLOAT), tensor(FLOAT)], [tensor(FLOAT)])
    config = configured(layer, types={"t": "float32"})
    assert (config.flags, config.tactics, config.preview) == (set(), 0, {"sharing": True})
    assert layer.precision is None


def parsed_network(api: TensorRT, *layers: Layer, logs: str = "") -> tuple[ParsedNetwork, Config]:
    """A network with one dynamic input, whose build logs an error and succeeds."""
    config = Config()
    network = SimpleNamespace(
        num_layers=len(layers),
        get_layer=lambda i: layers[i],
        num_inputs=1,
        get_input=lambda i: tensor(HALF, name="streams", shape=(-1, 4, 128)),
    )

    def build(network: Any, config: Any) -> bytes:
        if logs:
            api.log.log(Severity.ERROR, logs)
        return b"plan"

    builder = SimpleNamespace(
        create_builder_config=lambda: config,
        create_optimization_profile=lambda: SimpleNamespace(set_shape=lambda *shapes: None),
        build_serialized_network=build,
    )
    vars(api.module).update(vars(MODULE), IPluginV2Layer=Layer)
    return ParsedNetwork(api, builder, network, None), config


def test_plugin_layers_of_this_kind_are_counted_and_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_trt.plugins.tensorrt_api.gpu_compute_capabilities", lambda: ["9.0"])
    layers = [
        Layer("PLUGIN_V2", [tensor(HALF)], [tensor(HALF)], name) for name in ("HcCollapse", "HcCollapse", "Other")
    ]
    network, config = parsed_network(fake_api(), *layers, Layer("CAST", [tensor(HALF)], [tensor(FLOAT)]))
    assert network.plugin_layers() == {"HcCollapse": 2, "Other": 1}
    shapes = {"streams": ((1, 4, 128), (2, 4, 128), (8, 4, 128))}
    assert network.build([shapes, shapes], EngineOptions(), {"t": "float16"}) == b"plan"
    assert (config.profiles, config.tactics) == (2, 0) and Flag.FP16 in config.flags


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    loaded: list[int] = []
    monkeypatch.setattr(trt_plugin, "load_trt_plugins", loaded.append)
    return loaded


def test_plugins_come_from_the_library_and_their_errors_are_faults(libraries: list[int]) -> None:
    """They can only log; of a refused configuration TensorRT 8 never hears, and builds a plan that can't run."""
    api = fake_api()
    with trt_plugin.registered_creators(api, ALL_OPS.values()) as failures:
        api.log.log(Severity.ERROR, "dspark.HcCollapse, layer a: pre is float32[6, 4], expected pre float32[rows, 4]")
        api.log.log(Severity.WARNING, "dspark.HcCollapse, layer a: libdspark_plugins.so has no kernel for it")
        api.log.log(Severity.ERROR, "something of TensorRT's own")
    api.log.log(Severity.ERROR, "dspark.HcCollapse, later")
    assert libraries == [8]
    assert failures.errors == ["dspark.HcCollapse, layer a: pre is float32[6, 4], expected pre float32[rows, 4]"]


def test_a_build_in_which_a_plugin_refused_is_void(
    libraries: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dspark_trt.builder.engine import build_engine

    monkeypatch.setattr("dspark_trt.plugins.tensorrt_api.gpu_compute_capabilities", lambda: ["9.0"])
    api = fake_api()
    layer = Layer("PLUGIN_V2", [tensor(HALF)], [tensor(HALF)], "HcCollapse")
    network, _ = parsed_network(api, layer, logs="dspark.HcCollapse, layer the_HcCollapse: refused")
    monkeypatch.setattr(TensorRT, "parse", lambda *_: network)
    onnx.save(one_op_model("HcCollapse", "float16"), tmp_path / "m.onnx")
    shapes = {"streams": ((1, 4, 128), (2, 4, 128), (8, 4, 128))}
    with pytest.raises(EngineBuildError, match=r"failed while the engine was built:\ndspark\.HcCollapse, layer the_"):
        build_engine(
            tmp_path / "m.onnx",
            api=api,
            lowering="plugin",
            profiles=[shapes],
            expected_plugin_layers={"HcCollapse": 1},
        )


def test_a_refused_node_is_named_by_its_index() -> None:
    """Its parser's errors have no name of the node."""
    error = SimpleNamespace(node=lambda: 0, desc=lambda: "Unsupported", num_errors=1)
    api = fake_api()
    parser = SimpleNamespace(parse=lambda *_: False, num_errors=1, get_error=lambda i: error)
    flags = SimpleNamespace(EXPLICIT_BATCH=0)
    builder = SimpleNamespace(create_network=lambda flags: None)
    vars(api.module).update(
        Builder=lambda log: builder, OnnxParser=lambda *_: parser, NetworkDefinitionCreationFlag=flags
    )
    with pytest.raises(EngineBuildError, match=r"can't parse m\.onnx:\nHcCollapse the_HcCollapse: Unsupported"):
        api.parse(one_op_model("HcCollapse").SerializeToString(), Path("m.onnx"))
    error.node = lambda: -1
    with pytest.raises(EngineBuildError, match=r"can't parse m\.onnx:\nnode -1: Unsupported"):
        api.parse(one_op_model("HcCollapse").SerializeToString(), Path("m.onnx"))


def shared_object(folder: Path, *functions: str) -> Path:
    """A library beside nothing, that exports functions."""
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("there is no gcc to make a library with")
    source = folder / "library.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in functions) or "static int nothing;\n")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", folder / TRT_LIBRARY_NAME], check=True)
    return folder / TRT_LIBRARY_NAME


@pytest.mark.parametrize(
    ("functions", "major", "message"),
    [
        (["getCreators"], 8, "has plugins for TensorRT 10 and up, not for TensorRT 8"),
        (["getPluginCreators"], 10, "has plugins for TensorRT 8, not for TensorRT 10"),
        ([], 8, "has plugins for no TensorRT, not for TensorRT 8"),
        (["getPluginCreators"], 8, ""),
        (["getCreators"], 11, ""),
    ],
)
def test_a_library_for_another_tensorrt_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, functions: list[str], major: int, message: str
) -> None:
    """Complaint 7: told apart by what TensorRT would call."""
    path = shared_object(tmp_path, *functions)
    monkeypatch.setattr(library, "find_library", lambda name: path)
    if not message:
        assert load_trt_plugins(major) == path
        return
    with pytest.raises(KernelUnavailableError) as caught:
        load_trt_plugins(major)
    assert f"{path} {message}; build cpp_plugins with -DTENSORRT_INCLUDE_DIR=" in str(caught.value)


def test_a_library_that_is_absent_or_broken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_library", lambda name: None)
    with pytest.raises(KernelUnavailableError, match=r"libdspark_trt_plugins\.so was not found, and plugins for .* 8"):
        load_trt_plugins(8)
    broken = tmp_path / TRT_LIBRARY_NAME
    broken.write_bytes(b"no library")
    monkeypatch.setattr(library, "find_library", lambda name: broken)
    with pytest.raises(KernelUnavailableError, match=f"{broken} can't be used: .*; build cpp_plugins with"):
        load_trt_plugins(8)


@pytest.mark.parametrize(
    ("version", "product", "is_8"),
    [("8.6.0", "tensorrt", True), ("10.14.1.48", "tensorrt", False), ("1.7.1.116", "tensorrt_rtx", False)],
)
def test_versions_are_told_apart(version: str, product: str, is_8: bool) -> None:
    assert fake_api(version, product).is_8 == is_8
