"""Plans built through the TensorRT plugins in C++, by TensorRT-RTX, which needs no GPU for it.

In processes of their own: what a library has registered stays.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from dspark_trt.plugins import tensorrt_api
from dspark_trt.plugins.registry import ALL_OPS

from tests import plugin_object
from tests.one_op_models import ATTRIBUTES, SIZES, one_op_model, save
from tests.plugin_object import (
    CASES,
    Headers,
    compile_plugins,
    compile_shared,
)

headers, pytest_generate_tests = plugin_object.headers, plugin_object.pytest_generate_tests


@pytest.fixture(scope="session")
def plain(headers: Headers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library without kernels."""
    return compile_plugins(tmp_path_factory.mktemp("plain"), headers)


@pytest.fixture(scope="session")
def for_rtx(headers: Headers, plain: Path) -> Path:
    if not headers.is_v3:
        pytest.skip("TensorRT-RTX has no IPluginV2")
    if isinstance(found := tensorrt_api.probe("tensorrt_rtx"), str):
        pytest.skip(f"TensorRT-RTX is not installed ({found})")
    return plain


SCRIPT = """
import ctypes, logging, sys
from pathlib import Path
from dspark_trt.plugins import tensorrt_api
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(message)s")
library, ways, *models = sys.argv[1:]
api = tensorrt_api.load("tensorrt_rtx")
trt = api.module
registry = trt.get_plugin_registry()
for way in ways.split("+"):
    if way == "ctypes":
        ctypes.CDLL(library)
    elif way == "unload":
        registry.deregister_library(handle)
    else:
        handle = registry.load_library(library)
        if handle is None:
            print("refused library")
    print("registered", sum(c.plugin_namespace == "dspark" for c in registry.all_creators))
for model in models:
    try:
        parsed = api.parse(Path(model).read_bytes(), Path(model))
        for i in range(parsed.network.num_layers):
            layer = parsed.network.get_layer(i)
            if layer.type.name == "PLUGIN_V3":
                layer.__class__ = trt.IPluginV3Layer
                core = layer.plugin.get_capability_interface(trt.PluginCapabilityType.CORE)
                name = f"{core.plugin_namespace}.{core.plugin_name}.{core.plugin_version}"
                shapes = [list(layer.get_output(i).shape) for i in range(layer.num_outputs)]
                print("layer", name, core.api_language.name, shapes)
        profile = {}
        for i in range(parsed.network.num_inputs):
            tensor = parsed.network.get_input(i)
            profile[tensor.name] = tuple(tuple(n if d == -1 else d for d in tensor.shape) for n in (1, 4, 8))
        print("plan", len(parsed.build([profile], tensorrt_api.EngineOptions())) > 0)
    except tensorrt_api.EngineBuildError as error:
        print("refused", error)
"""


def run_script(library: Path, ways: str, *models: Path) -> list[str]:
    """What the script has to say, and errors of TensorRT and of the plugins."""
    command = [sys.executable, "-c", SCRIPT, library, ways, *models]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    words = ("registered", "layer", "plan", "refused", "ERROR")
    return [line for line in done.stdout.splitlines() if line.startswith(words)]


def plugin_model(name: str, activation: str = "bfloat16", **changed: Any) -> onnx.ModelProto:
    """A model without functions, whose node says which plugin it means."""
    model = one_op_model(name, activation, function=False, **changed)
    for attribute, value in (("plugin_version", "1"), ("plugin_namespace", "dspark")):
        model.graph.node[0].attribute.append(onnx.helper.make_attribute(attribute, value))
    return model


@pytest.mark.parametrize("way", ["ctypes", "load_library"])
def test_plans_are_built_through_the_creators(for_rtx: Path, tmp_path: Path, way: str) -> None:
    """One PLUGIN_V3 layer an operation, made in C++, with the declared output shapes; both ways of loading."""
    paths, expected = [], [f"registered {len(ALL_OPS)}"]
    for name, changed in CASES:
        op = ALL_OPS[name]
        paths.append(save(plugin_model(name, **changed), tmp_path / f"{len(paths)}.onnx"))
        outputs = op.outputs(op.attributes_type(**{**ATTRIBUTES[name], **changed}))
        shapes = [[SIZES.get(d, -1) if isinstance(d, str) else d for d in spec.dims] for spec in outputs]
        expected += [f"layer dspark.{name}.1 CPP {shapes}", "plan True"]
    assert run_script(for_rtx, way, *paths) == expected


@pytest.mark.parametrize(
    ("ways", "registered"),
    [
        ("ctypes+ctypes", [True, True]),
        ("ctypes+load_library", [True, True]),
        ("load_library+unload+load_library", [True, False, True]),
    ],
)
def test_no_way_of_loading_spoils_another(for_rtx: Path, ways: str, registered: list[bool]) -> None:
    """load_library refuses a library whose creators are registered already, and then unloads its code."""
    assert run_script(for_rtx, ways) == [f"registered {len(ALL_OPS) if there else 0}" for there in registered]


def test_refusals_reach_the_log_of_tensorrt(for_rtx: Path, tmp_path: Path) -> None:
    """ENG-4: layer, tensor, found and expected, where TensorRT alone would say that no format was found."""
    dtype, size, attribute = plugin_model("MhcCoefficients"), plugin_model("MhcAllReduce"), plugin_model("MhcAllReduce")
    dtype.graph.input[1].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    size.graph.input[5].type.tensor_type.shape.dim[0].dim_value = 96  # norm_weight, H is 128
    kept = [a for a in attribute.graph.node[0].attribute if a.name != "norm_eps"]
    del attribute.graph.node[0].attribute[:]
    attribute.graph.node[0].attribute.extend(kept)
    models = [save(m, tmp_path / f"{i}.onnx") for i, m in enumerate((dtype, size, attribute))]
    said = "\n".join(run_script(for_rtx, "ctypes", *models))
    assert "dspark.MhcCoefficients, layer the_MhcCoefficients: inputs are [bfloat16, float16, " in said
    wrong_size = "norm_weight is bfloat16[96], expected norm_weight T[H] with T = bfloat16, H = 128"
    assert f"dspark.MhcAllReduce, layer the_MhcAllReduce: {wrong_size}" in said
    assert "dspark.MhcAllReduce, layer the_MhcAllReduce: attributes missing [norm_eps], unknown []" in said
    assert "plan True" not in said


def load_alone(library: Path) -> str:
    """What the plugins say where there is no TensorRT."""
    command = [sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def test_loading_before_tensorrt_says_so(plain: Path) -> None:
    said = load_alone(plain)
    assert "registered no plugins" in said and "load TensorRT first, or use loadLibrary" in said


TENSORRT_WITH_A_LOG = """
#include <NvInferRuntime.h>
#include <cstdio>
struct Log final : nvinfer1::ILogger {
  void log(Severity, const char* line) noexcept override { std::printf("logged %s\\n", line), std::fflush(stdout); }
};
extern "C" __attribute__((visibility("default"))) nvinfer1::ILogger* getLogger() {
  static Log log;
  return &log;
}
"""
UNLOADING = """
import _ctypes, ctypes, sys
from pathlib import Path
tensorrt = ctypes.CDLL(sys.argv[1])
ctypes.CDLL(sys.argv[2])
_ctypes.dlclose(tensorrt._handle)
print("stays", sys.argv[1] in Path("/proc/self/maps").read_text())
"""


def test_a_line_in_the_log_does_not_keep_tensorrt_loaded(headers: Headers, plain: Path, tmp_path: Path) -> None:
    """TensorRT's logger is looked up for every line; whoever loaded TensorRT can still unload it."""
    name = re.search(r"as (\S+) is not loaded", load_alone(plain))
    assert name
    source = tmp_path / "log.cpp"
    source.write_text(TENSORRT_WITH_A_LOG)
    tensorrt = compile_shared(tmp_path / name[1], headers, source, f"-Wl,-soname,{name[1]}", nodelete=False)
    command = [sys.executable, "-c", UNLOADING, str(tensorrt), str(plain)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("logged libdspark_trt_plugins.so registered no plugins"), done.stderr
    assert done.stdout.endswith("stays False\n")
