"""The generic TensorRT plugin: declarations, fields, refusals. Needs TensorRT-RTX or TensorRT 10 and up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from dspark_trt.builder.engine import build_engine
from dspark_trt.plugins import library, tensorrt_api, trt_plugin
from dspark_trt.plugins.hc_collapse import HC_COLLAPSE, HcCollapse
from dspark_trt.plugins.library import PLUGIN_ABI, KernelUnavailableError
from dspark_trt.plugins.op import DOMAIN, Op
from dspark_trt.plugins.registry import ALL_OPS
from dspark_trt.plugins.tensorrt_api import EngineBuildError, EngineLoadError, TensorRT, TensorRTUnavailableError
from dspark_trt.plugins.trt_plugin import PluginFailures, TensorDesc, check_tensors

from tests.one_op_models import ATTRIBUTES, SIZES, one_op_model, profile_of, save

FLOATS = ("float32", "float16", "bfloat16")
DTYPES = (*FLOATS, "int32", "int8", "int64", "bool")


def attributes_of(op: Op, **changed: Any) -> Any:
    return op.attributes_type(**{**ATTRIBUTES[op.name], **changed})


def declared(op: Op, activation: str) -> tuple[list[TensorDesc], int]:
    """Tensors that the operation takes, outputs included, and the number of inputs; dynamic sizes are -1."""
    values = attributes_of(op)
    specs = op.inputs(values) + op.outputs(values)
    descs = [
        TensorDesc(
            activation if s.dtype == "T" else s.dtype,
            tuple(d if isinstance(d, int) else SIZES.get(d, -1) for d in s.dims),
        )
        for s in specs
    ]
    return descs, len(op.inputs(values))


def make_plugin(api: TensorRT, op: Op, failures: PluginFailures | None = None) -> Any:
    plugin_class, _ = trt_plugin._plugin_classes(api)
    return plugin_class(op, attributes_of(op), "a_layer", failures or PluginFailures())


def trt_descs(api: TensorRT, descs: list[TensorDesc]) -> list[Any]:
    """The descriptions as TensorRT passes them."""
    names = {v: k for k, v in tensorrt_api.DTYPE_NAMES.items()} | {"int64": "INT64", "bool": "BOOL"}
    made = []
    for desc in descs:
        inner = api.module.PluginTensorDesc()
        inner.dims = api.module.Dims(desc.dims)
        inner.type = getattr(api.module.DataType, names[desc.dtype])
        inner.format = api.module.TensorFormat.LINEAR if desc.linear else api.module.TensorFormat.CHW4
        outer = api.module.DynamicPluginTensorDesc()
        outer.desc = inner
        made.append(outer)
    return made


@pytest.mark.parametrize("activation", FLOATS)
@pytest.mark.parametrize("name", ALL_OPS)
def test_only_declared_dtypes_and_formats_are_supported(api: TensorRT, name: str, activation: str) -> None:
    """ENG-4: every input and output in every dtype and in a vectorised format."""
    op = ALL_OPS[name]
    descs, count = declared(op, activation)
    specs = op.inputs(attributes_of(op)) + op.outputs(attributes_of(op))
    first_activation = next((i for i, s in enumerate(specs) if s.dtype == "T"), None)
    plugin = make_plugin(api, op)
    for position, desc in enumerate(descs):
        for dtype in DTYPES:
            changed = [*descs]
            changed[position] = TensorDesc(dtype, desc.dims)
            free = position == first_activation and dtype in FLOATS  # what T is, the first such tensor decides
            supported = plugin.supports_format_combination(position, trt_descs(api, changed), count)
            assert supported == (dtype == desc.dtype or free), (position, dtype)
        changed = [*descs]
        changed[position] = TensorDesc(desc.dtype, desc.dims, linear=False)
        assert not plugin.supports_format_combination(position, trt_descs(api, changed), count)


@pytest.mark.parametrize("name", ALL_OPS)
def test_a_static_size_that_differs_is_refused_with_both_values(name: str) -> None:
    """NVIDIA/TensorRT-LLM#13710: a kernel made for hidden 4096 ran on 7168."""
    op = ALL_OPS[name]
    descs, count = declared(op, "bfloat16")
    values = attributes_of(op)
    specs = op.inputs(values) + op.outputs(values)
    assert check_tensors(op, values, descs, count) == []
    for position, (spec, desc) in enumerate(zip(specs, descs, strict=True)):
        for axis, dim in enumerate(spec.dims):
            if isinstance(dim, str) and not dim.isupper():
                continue
            for size in (desc.dims[axis] + 1, -1):
                changed = [*descs]
                changed[position] = TensorDesc(desc.dtype, (*desc.dims[:axis], size, *desc.dims[axis + 1 :]))
                problems = check_tensors(op, values, changed, count)
                # A symbol that occurs once may have any size, but must have one.
                once = isinstance(dim, str) and sum(dim in s.dims for s in specs) == 1
                assert bool(problems) == (size == -1 or not once), (spec, axis, size)
                if problems and not isinstance(dim, str):
                    assert spec.name in problems[0] and str(list(changed[position].dims)) in problems[0]


def test_rows_may_differ_between_calls_but_not_within_one() -> None:
    """ENG-6: on_shape_change looks at the sizes of this call."""
    values = attributes_of(HC_COLLAPSE)
    for rows in (1, 40):
        tensors = [TensorDesc("float32", (rows, 4, 128)), TensorDesc("float32", (rows, 4))]
        assert check_tensors(HC_COLLAPSE, values, tensors, 2) == []
    tensors = [TensorDesc("float32", (5, 4, 128)), TensorDesc("float32", (6, 4))]
    assert (
        "pre is float32[6, 4], expected pre float32[rows, 4] with T = float32, rows = 5"
        in (check_tensors(HC_COLLAPSE, values, tensors, 2)[0])
    )


def test_on_shape_change_refuses_and_notes_the_layer(api: TensorRT) -> None:
    failures = PluginFailures()
    plugin = make_plugin(api, HC_COLLAPSE, failures)
    shapes = ((5, 4, 128), (6, 4), (5, 128))
    descs = [d.desc for d in trt_descs(api, [TensorDesc("float32", s) for s in shapes])]
    with pytest.raises(ValueError, match="rows = 5"):
        plugin.on_shape_change(descs[:2], descs[2:])
    assert "dspark.HcCollapse, layer a_layer" in failures.text()


@pytest.mark.parametrize("name", ALL_OPS)
def test_fields_survive_the_plan(api: TensorRT, name: str) -> None:
    """Attributes that are serialised come back equal (floats as float32) in the runtime phase."""
    op, failures = ALL_OPS[name], PluginFailures()
    plugin = make_plugin(api, op, failures)
    creator = trt_plugin._plugin_classes(api)[1](op, failures)
    again = creator.create_plugin("again", plugin.get_fields_to_serialize(), api.module.TensorRTPhase.RUNTIME)
    assert failures.errors == []
    for field, value in vars(plugin.attributes).items():
        found = getattr(again.attributes, field)
        assert type(found) is type(value)
        assert found == (pytest.approx(value, rel=1e-7) if isinstance(value, float) else value)


def test_a_plan_of_another_abi_is_refused(api: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENG-2: the ABI number in the fields."""
    failures = PluginFailures()
    fields = make_plugin(api, HC_COLLAPSE).get_fields_to_serialize()
    monkeypatch.setattr(trt_plugin, "PLUGIN_ABI", PLUGIN_ABI + 1)
    creator = trt_plugin._plugin_classes(api)[1](HC_COLLAPSE, failures)
    assert creator.create_plugin("old", fields, api.module.TensorRTPhase.RUNTIME) is None
    assert f"built with plugin ABI {PLUGIN_ABI}, this package has {PLUGIN_ABI + 1}" in failures.text()


def change_attribute(model: onnx.ModelProto, name: str, value: Any) -> onnx.ModelProto:
    """Set (or with None remove) an attribute of the model's node, behind the exporter's back."""
    node = model.graph.node[0]
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend(kept if value is None else [*kept, onnx.helper.make_attribute(name, value)])
    return model


ATTRIBUTE_TRAPS = [
    ("surprise", 3, "unknown ['surprise']"),  # dropped without a message
    ("norm_eps", None, "missing ['norm_eps']"),  # absent without a message
    ("norm_eps", 1, "norm_eps = 1 (int, expected float)"),  # a plugin that casts reads garbage
    ("tp_size", 2.0, "tp_size = 2.0 (float, expected int)"),
    ("tp_size", [1, 2], "tp_size = [1, 2] (list, expected int)"),
    ("tp_size", 2**40, "tp_size = 1099511627776 does not fit 32 bits"),  # would arrive as 0
]


@pytest.mark.parametrize(("name", "value", "message"), ATTRIBUTE_TRAPS)
def test_attribute_traps_are_caught_before_the_parser(
    api: TensorRT, tmp_path: Path, name: str, value: Any, message: str
) -> None:
    model = change_attribute(one_op_model("MhcAllReduce"), name, value)
    path = save(model, tmp_path / "m.onnx")
    with pytest.raises(EngineBuildError) as caught:
        build_engine(
            path, api=api, lowering="plugin", profiles=[profile_of(model)], expected_plugin_layers={"MhcAllReduce": 1}
        )
    assert message in str(caught.value) and "the_MhcAllReduce" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"), [trap for trap in ATTRIBUTE_TRAPS if trap[0] != "surprise" and trap[1] != 2**40]
)
def test_attribute_traps_are_caught_by_the_creator(
    api: TensorRT, tmp_path: Path, name: str, value: Any, message: str
) -> None:
    """A model that another program parses: creation fails and all three lists are noted."""
    model = change_attribute(one_op_model("MhcAllReduce", function=False), name, value)
    with trt_plugin.registered_creators(api, ALL_OPS.values()) as failures:
        with pytest.raises(EngineBuildError, match="Could not create the plugin"):
            api.parse(model.SerializeToString(), tmp_path / "m.onnx")
        assert message in failures.text()
        for word in ("missing", "unknown", "wrong type"):
            assert word in failures.text()


@pytest.mark.parametrize("method", ["aliases", "field_kinds"])
def test_a_fault_that_tensorrt_ignores_voids_the_build(
    api: TensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """An exception in get_aliased_input is printed and ignored by TensorRT, which returns a plan."""
    model = one_op_model("HcCollapse")
    path = save(model, tmp_path / "m.onnx")

    def fail(self: Op, *args: Any) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(HcCollapse, method, fail)
    with pytest.raises((EngineBuildError, RuntimeError), match="out of order"):
        build_engine(
            path, api=api, lowering="plugin", profiles=[profile_of(model)], expected_plugin_layers={"HcCollapse": 1}
        )


def test_a_tensor_of_the_wrong_dtype_names_plugin_tensor_wanted_and_got(api: TensorRT, tmp_path: Path) -> None:
    """ENG-4: TensorRT itself only says that no format was found."""
    model = one_op_model("MhcCoefficients", "bfloat16")
    model.graph.input[1].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    path = save(model, tmp_path / "m.onnx")
    with pytest.raises(EngineBuildError) as caught:
        build_engine(
            path,
            api=api,
            lowering="plugin",
            profiles=[profile_of(model)],
            expected_plugin_layers={"MhcCoefficients": 1},
        )
    for part in ("dspark.MhcCoefficients", "the_MhcCoefficients", "fn float32[24, K]", "float16"):
        assert part in str(caught.value)


def test_a_size_that_does_not_fit_names_tensor_wanted_and_got(api: TensorRT, tmp_path: Path) -> None:
    model = one_op_model("MhcAllReduce")
    model.graph.input[5].type.tensor_type.shape.dim[0].dim_value = 96  # norm_weight, H is 128
    path = save(model, tmp_path / "m.onnx")
    with pytest.raises(EngineBuildError, match=r"norm_weight is float32\[96\], expected norm_weight T\[H\].*H = 128"):
        build_engine(
            path, api=api, lowering="plugin", profiles=[profile_of(model)], expected_plugin_layers={"MhcAllReduce": 1}
        )


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine where the kernels were not built."""
    library.load_library.cache_clear()
    monkeypatch.setattr(library, "find_library", lambda *name: None)
    yield
    library.load_library.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_missing_creators_are_all_named(api: TensorRT) -> None:
    """ENG-1: wanted triple, what is registered, which library."""
    wanted = {"HcCollapse": 1, "MhcAllReduce": 2}
    with pytest.raises(EngineLoadError) as caught:
        trt_plugin.require_creators(api, wanted)
    assert "HcCollapse version 1 namespace dspark" in str(caught.value)
    assert "registered in namespace dspark: none" in str(caught.value)
    with trt_plugin.registered_creators(api, ALL_OPS.values()):
        trt_plugin.require_creators(api, {"HcCollapse": 1})
        with pytest.raises(EngineLoadError) as caught:
            trt_plugin.require_creators(api, wanted)
    assert "no plugin creator for MhcAllReduce version 2 namespace dspark;" in str(caught.value)
    assert "MhcAllReduce version 1" in str(caught.value)
    assert "plugin library: libdspark_trt_plugins.so not found" in str(caught.value)


def test_creators_are_gone_after_the_block_and_never_registered_twice(api: TensorRT) -> None:
    registry = api.module.get_plugin_registry()

    def ours() -> list[str]:
        return sorted(c.name for c in registry.all_creators if c.plugin_namespace == DOMAIN)

    assert ours() == []
    with trt_plugin.registered_creators(api, ALL_OPS.values()):
        assert ours() == sorted(ALL_OPS)
        with (
            pytest.raises(EngineBuildError, match=r"HcCollapse version 1 is already registered.*trt_plugins\.so"),
            trt_plugin.registered_creators(api, [HC_COLLAPSE]),
        ):
            pass
        assert ours() == sorted(ALL_OPS)
    assert ours() == []


@pytest.mark.usefixtures("no_library")
def test_enqueue_without_the_library_says_what_is_missing(api: TensorRT) -> None:
    failures = PluginFailures()
    plugin = make_plugin(api, HC_COLLAPSE, failures)
    shapes = ((5, 4, 128), (5, 4), (5, 128))
    descs = [d.desc for d in trt_descs(api, [TensorDesc("float32", s) for s in shapes])]
    with pytest.raises(KernelUnavailableError, match=r"libdspark_plugins.so"):
        plugin.enqueue(descs[:2], descs[2:], [0, 0], [0], 0, 0)
    assert "enqueue: libdspark_plugins.so" in failures.text()


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


PARSE_A_PLUGIN = """
import tensorrt_rtx, pathlib
from dspark_trt.plugins import library, rtx, tensorrt_api, trt_plugin
from dspark_trt.plugins.registry import ALL_OPS
import onnx.parser
model = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 18, "dspark": 1]> g (float[n,4,8] s, float[n,4] p) => (float[n,8] y)'
    '{ y = dspark.HcCollapse(s, p) }'
)
%s
api = tensorrt_api.load("tensorrt_rtx")
with trt_plugin.registered_creators(api, ALL_OPS.values()):
    try:
        print(dict(api.parse(model.SerializeToString(), pathlib.Path("m.onnx")).plugin_layers()))
    except tensorrt_api.TensorRTUnavailableError as error:
        print("refused:", error)
"""


def test_the_parser_finds_its_unversioned_library_in_a_fresh_process(api: TensorRT) -> None:
    """The wheel ships libtensorrt_rtx.so.1 only, and the parser aborts the process without the other name."""
    done = run_python(PARSE_A_PLUGIN % "")
    assert (done.returncode, done.stdout) == (0, "{'HcCollapse': 1}\n"), done.stderr


def test_an_unversioned_library_that_cannot_be_provided_names_both_fixes(api: TensorRT) -> None:
    done = run_python(PARSE_A_PLUGIN % 'rtx._alias_library = lambda *names: b"not an ELF file"')
    assert done.returncode == 0, done.stderr
    assert "refused: libtensorrt_rtx.so can't be loaded" in done.stdout
    assert "LD_LIBRARY_PATH" in done.stdout and "--no-as-needed" in done.stdout


def test_importing_loads_no_tensorrt() -> None:
    """Nothing at import time starts TensorRT, CUDA or MPI."""
    done = run_python(
        "import sys, dspark_trt.builder.cli, dspark_trt.plugins.trt_plugin\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('tensorrt', 'tensorrt_rtx', 'mpi4py')])"
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.fixture
def no_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tensorrt_api, "probe", lambda product: f"ImportError: no {product}")
    yield


@pytest.mark.usefixtures("no_products")
def test_without_a_tensorrt_every_product_is_named() -> None:
    with pytest.raises(
        TensorRTUnavailableError, match=r"tensorrt: ImportError.*; tensorrt_rtx: ImportError.*pip install .\.\[rtx\]"
    ):
        tensorrt_api.load()
    with pytest.raises(TensorRTUnavailableError, match="'trt' is unknown, expected one of tensorrt, tensorrt_rtx"):
        tensorrt_api.load("trt")


@pytest.mark.parametrize(("gpus", "chosen"), [([], "tensorrt_rtx"), (["9.0"], "tensorrt")])
def test_enterprise_tensorrt_is_preferred_where_it_can_build(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], chosen: str
) -> None:
    """Enterprise TensorRT makes no builder without a GPU; TensorRT-RTX builds anywhere."""
    monkeypatch.setattr(tensorrt_api, "probe", lambda product: TensorRT(None, product, "10.14", None))
    monkeypatch.setattr(tensorrt_api, "gpu_compute_capabilities", lambda: gpus)
    assert tensorrt_api.load().product == chosen
    assert tensorrt_api.load("tensorrt").product == "tensorrt"


def test_a_plan_that_cannot_be_loaded_raises_with_the_reason(api: TensorRT) -> None:
    """TensorRT returns None and logs a line."""
    with pytest.raises(
        EngineLoadError, match=r"^tensorrt_rtx .* can't load this plan of 8 bytes, expected .*; it said: .+; build.*$"
    ):
        api.deserialize(b"not-plan")
