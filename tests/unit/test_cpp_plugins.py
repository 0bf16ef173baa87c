"""The TensorRT plugins in C++, their objects driven one by one; test_cpp_plans.py builds plans through them.

Compiled here with g++ where TensorRT's headers are found. Instead of kernels there are recorders that keep the
parameter struct they were called with.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dspark_trt.plugins import abi
from dspark_trt.plugins.library import PLUGIN_ABI
from dspark_trt.plugins.op import Op, encode_attributes
from dspark_trt.plugins.registry import ALL_OPS
from dspark_trt.plugins.trt_plugin import TensorDesc, check_tensors

from tests import plugin_object
from tests.one_op_models import ATTRIBUTES, SIZES
from tests.plugin_object import (
    CASES,
    CHAR,
    CPP_PLUGINS,
    FLOAT,
    INT,
    TYPES,
    Driver,
    Headers,
    Plugin,
    RawField,
    compile_plugins,
    compile_shared,
    described,
    fields_of,
)

headers, pytest_generate_tests = plugin_object.headers, plugin_object.pytest_generate_tests

FLOATS = ("float32", "float16", "bfloat16")
IDS = [name + "".join(f" {k}={v}" for k, v in changed.items()) for name, changed in CASES]
CALL = {**SIZES, "rows": 5, "requests": 2}
Messages = Callable[[], str]
Changed = dict[str, Any]


@pytest.mark.parametrize(
    ("file", "text"), [("include/dspark_plugins.h", abi.header), ("tensorrt/op_table.inc", abi.table)]
)
def test_generated_files_are_up_to_date(file: str, text: Callable[[], str]) -> None:
    assert (CPP_PLUGINS / file).read_text() == text(), f"python -m dspark_trt.plugins.abi makes cpp_plugins/{file}"


RECORDERS = """
#include <dspark_plugins.h>
#include <cstring>
extern "C" {
__attribute__((visibility("default"))) unsigned char recorded[256];
__attribute__((visibility("default"))) int calls, answer;
int dspark_plugin_abi() { return DSPARK_PLUGIN_ABI; }
%s
}
"""
RECORDER = """
int {0}(const {0}_params* p, cudaStream_t) {{ std::memcpy(recorded, p, sizeof *p); ++calls; return answer; }}
size_t {0}_workspace(const {0}_params* p) {{ std::memcpy(recorded, p, sizeof *p); return 12345; }}
"""


class Recorded(Driver):
    """Plugins over recorders."""

    def __init__(self, folder: Path, headers: Headers):
        source = folder / "recorders.cpp"
        source.write_text(RECORDERS % "".join(RECORDER.format(abi.c_name(op)) for op in ALL_OPS.values()))
        plugins = sorted((CPP_PLUGINS / "tensorrt").glob("*.cpp"))
        library = compile_shared(folder / "libdspark_trt_plugins.so", headers, source, *plugins)
        super().__init__(library, folder, headers)

    def answer(self, status: int) -> None:
        """What kernels answer from now on."""
        ctypes.c_int.in_dll(self.plugins, "answer").value = status
        ctypes.c_int.in_dll(self.plugins, "calls").value = 0

    @property
    def calls(self) -> int:
        return ctypes.c_int.in_dll(self.plugins, "calls").value

    def recorded(self, name: str) -> Any:
        """The parameters of the last call."""
        return abi.params_struct(name).from_buffer_copy((ctypes.c_ubyte * 256).in_dll(self.plugins, "recorded"))


@pytest.fixture(scope="session")
def compiled(headers: Headers, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("plugins"), headers)


@pytest.fixture
def driver(compiled: Recorded) -> Recorded:
    compiled.answer(0)
    return compiled


@pytest.fixture
def messages(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Messages:
    """All that was logged: to stderr, or to the logger of a TensorRT that another test has loaded."""
    caplog.set_level("DEBUG")
    return lambda: capfd.readouterr().err + caplog.text


def make_plugin(driver: Driver, name: str, activation: str = "float32", **changed: Any) -> tuple[Plugin, Op, Any]:
    """A plugin of an operation, the operation and its attributes; or a skip where TensorRT 8 can't carry its bytes."""
    op = ALL_OPS[name]
    values = op.attributes_type(**{**ATTRIBUTES[name], **changed})
    plugin = driver.create(name, fields_of(values), activation)
    if plugin is None and not driver.is_v3 and any(spec.dtype == "int8" for spec in op.inputs(values)):
        pytest.skip("TensorRT 8 can't carry bytes; another test looks at the refusal")
    assert plugin is not None
    return plugin, op, values


def test_every_operation_is_created_or_refused_for_its_bytes(driver: Recorded, messages: Messages) -> None:
    """TensorRT 8 takes int8 for quantized numbers, so operations on bytes are refused there."""
    for name, op in ALL_OPS.items():
        values = op.attributes_type(**ATTRIBUTES[name])
        bytes_in = any(spec.dtype == "int8" for spec in op.inputs(values))
        plugin = driver.create(name, fields_of(values))
        assert (plugin is None) == (bytes_in and not driver.is_v3)
    assert driver.is_v3 or "weight int8[N, K] carries bytes" in messages()


@pytest.mark.parametrize(("name", "changed"), CASES, ids=IDS)
def test_verdicts_on_tensors_are_those_of_the_python_plugin(
    driver: Recorded, name: str, changed: dict[str, Any]
) -> None:
    """ENG-4, NVIDIA/TensorRT-LLM#13710: every tensor in every type, with every size off by one or unknown."""
    seen = set()
    for activation in FLOATS if driver.is_v3 else FLOATS[:2]:
        plugin, op, values = make_plugin(driver, name, activation, **changed)
        tensors, inputs = described(op, values, activation, SIZES)
        typed = [spec.dtype == "T" for spec in (*op.inputs(values), *op.outputs(values))]
        for position, tensor in enumerate(tensors):
            variants = [tensor, TensorDesc(tensor.dtype, tensor.dims, linear=False)]
            variants += [TensorDesc(dtype, tensor.dims) for dtype in TYPES if driver.is_v3 or dtype != "bfloat16"]
            variants += [TensorDesc(tensor.dtype, tensor.dims[:-1]), TensorDesc(tensor.dtype, (*tensor.dims, 1))]
            for axis, size in enumerate(tensor.dims):
                for other in (size + 1, -1, 7):
                    dims = (*tensor.dims[:axis], other, *tensor.dims[axis + 1 :])
                    variants.append(TensorDesc(tensor.dtype, dims))
            for variant in variants:
                given = [*tensors[:position], variant, *tensors[position + 1 :]]
                expected = not check_tensors(op, values, given[: position + 1], inputs)
                if typed[position] and not driver.is_v3:
                    expected &= variant.dtype == activation
                assert plugin.supports(position, given, inputs) == expected, (position, variant)
                seen.add(expected)
        assert not plugin.supports(0, tensors, inputs + 1)
    assert seen == {True, False}


@pytest.mark.parametrize(("name", "changed"), CASES, ids=IDS)
def test_a_plan_holds_the_abi_number_and_every_attribute(driver: Recorded, name: str, changed: Changed) -> None:
    """The plugin that wrote the plan is gone when it is read."""
    plugin, _, values = make_plugin(driver, name, **changed)
    words = [PLUGIN_ABI]
    for value in encode_attributes(values).values():
        words.append(struct.unpack("<i", struct.pack("<f", value))[0] if isinstance(value, float) else value)
    words += [] if driver.is_v3 else [abi.ACTIVATIONS["float32"]]
    assert plugin.stored_words() == words
    again = plugin.reload()
    plugin.destroy()
    assert again is not None and again.stored_words() == words
    assert again.attach().stored_words() == words


@pytest.mark.parametrize(("name", "changed"), CASES, ids=IDS)
def test_kernels_get_the_parameters_that_python_gives_them(
    driver: Recorded, name: str, changed: dict[str, Any]
) -> None:
    """One struct, filled by two languages; and the workspace is asked for at the profile's maximum."""
    for activation in FLOATS if driver.is_v3 else FLOATS[:2]:
        plugin, op, values = make_plugin(driver, name, activation, **changed)
        plugin = plugin.reload() or plugin
        tensors, inputs = described(op, values, activation, CALL)
        specs = (*op.inputs(values), *op.outputs(values))
        pointers = {spec.name: 4096 + 256 * i for i, spec in enumerate(specs)}
        for output, source in op.aliases(values).items():
            pointers[specs[inputs + output].name] = pointers[specs[source].name]
        sizes = {d: n for s, t in zip(specs, tensors, strict=True) for d, n in zip(s.dims, t.dims, strict=True)}
        context = plugin.attach()
        assert context.shape_change(tensors, inputs) == 0
        assert context.enqueue(tensors, inputs, list(pointers.values()), workspace=64) == 0
        expected = abi.fill_params(op, values, activation, sizes, pointers, 64)
        assert bytes(driver.recorded(name)) == bytes(expected)
        tensors, inputs = described(op, values, activation, SIZES)
        assert plugin.workspace_bytes(tensors, inputs, largest=40) == 12345
        largest = abi.fill_params(op, values, activation, {**sizes, "rows": 40, "requests": 40}, {})
        assert bytes(driver.recorded(name)) == bytes(largest)


def test_outputs_have_the_declared_types_and_aliases(driver: Recorded, messages: Messages) -> None:
    for name, changed in CASES:
        op = ALL_OPS[name]
        values = op.attributes_type(**{**ATTRIBUTES[name], **changed})
        for activation in FLOATS if driver.is_v3 else FLOATS[:2]:
            if (plugin := driver.create(name, fields_of(values), activation)) is None:
                break
            tensors, inputs = described(op, values, activation, CALL)
            types = [t.dtype for t in tensors]
            for i, output in enumerate(types[inputs:]):
                assert plugin.output_type(i, types[:inputs]) == TYPES[output]
        for i in range(len(types) - inputs if plugin else 0):
            assert plugin is not None
            assert plugin.alias(i) == (op.aliases(values).get(i, -1) if driver.is_v3 else -1)
    assert plugin is not None and plugin.output_type(0, ["int32"] * inputs) == (-1 if driver.is_v3 else 0)
    assert "dspark.MarkovSampling, layer a_layer: inputs are [int32, " in messages()


def test_types_that_are_not_settled_yet(driver: Recorded, messages: Messages) -> None:
    """TensorRT 8 asks for an output's type while it takes computed tensors for float32."""
    values = ALL_OPS["ContextKvInsert"].attributes_type(**ATTRIBUTES["ContextKvInsert"])
    plugin = driver.create("ContextKvInsert", fields_of(values), "float16")
    assert plugin is not None
    for computed, ring in (("float32", "float16"), ("float16", "float32")):
        found = plugin.output_type(0, [computed, "int32", "int32", ring])
        assert found == (-1 if driver.is_v3 else TYPES["float16"])
    assert ("inputs are [float32, int32, int32, float16]" in messages()) == driver.is_v3
    plugin.output_type(0, ["float32", "int32", "float32", "float16"])
    assert "inputs are [float32, int32, float32, float16], expected [kv T[" in messages()


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"surprise": RawField(INT, (3,))}, "missing [], unknown [surprise], of wrong type []"),
        ({"norm_eps": None}, "missing [norm_eps]"),
        ({"norm_eps": RawField(INT, (1,))}, "norm_eps (int, expected float)"),
        ({"tp_size": RawField(FLOAT, (2.0,))}, "tp_size (float, expected int)"),
        ({"tp_size": RawField(INT, (1, 2))}, "tp_size (int[2], expected int)"),
        ({"tp_size": RawField(CHAR, (50, 0))}, "tp_size (neither int nor float[2], expected int)"),
        (
            {"tp_size": None, "norm_eps": RawField(INT, (1,)), "x": RawField(INT, (1,))},
            "missing [tp_size], unknown [x]",
        ),
    ],
)
def test_attribute_traps_are_caught_by_the_creator(
    driver: Recorded, messages: Messages, changed: dict[str, RawField | None], wanted: str
) -> None:
    """What TensorRT passes on without a word: wrong type, absent, unknown, more than one value."""
    values = ALL_OPS["MhcAllReduce"].attributes_type(**ATTRIBUTES["MhcAllReduce"])
    assert driver.create("MhcAllReduce", fields_of(values, **changed)) is None
    said = messages()
    assert "dspark.MhcAllReduce, layer a_layer: attributes missing" in said and wanted in said


@pytest.mark.parametrize(("number", "shown"), [(PLUGIN_ABI + 1, str(PLUGIN_ABI + 1)), (None, "of no number")])
def test_a_plan_of_another_abi_is_refused(driver: Recorded, messages: Messages, number: int | None, shown: str) -> None:
    """ENG-2: the ABI number in the fields."""
    values = ALL_OPS["MhcAllReduce"].attributes_type(**ATTRIBUTES["MhcAllReduce"])
    fields = {"plugin_abi": RawField(INT, (number,))} if number else {}
    nameless = not number and not driver.is_v3  # of these TensorRT 8 would take the first for the number
    if not nameless:
        fields |= fields_of(values)
    assert driver.create("MhcAllReduce", fields, None if nameless else "float32", at_runtime=True) is None
    assert f"built with plugin ABI {shown}, this library has {PLUGIN_ABI}; build it again" in messages()


def test_a_plan_with_fewer_or_more_fields_is_refused(driver: Recorded, messages: Messages) -> None:
    values = ALL_OPS["MhcAllReduce"].attributes_type(**ATTRIBUTES["MhcAllReduce"])
    number = {"plugin_abi": RawField(INT, (PLUGIN_ABI,))}
    *_, last = fields_of(values)
    assert driver.create("MhcAllReduce", number | fields_of(values, **{last: None}), at_runtime=True) is None
    # TensorRT 8 has no names in a plan, so the last field is missed.
    assert f"missing [{last if driver.is_v3 else 'activation'}], unknown []" in messages()
    more = fields_of(values, surprise=RawField(INT, (3,)))
    assert driver.create("MhcAllReduce", number | more, at_runtime=True) is None
    assert f"missing [], unknown [{'surprise' if driver.is_v3 else '(surplus)'}]" in messages()
    assert driver.create("MhcAllReduce", number | fields_of(values), at_runtime=True) is not None


def test_a_plan_with_a_part_of_a_field_is_refused(driver: Recorded, messages: Messages) -> None:
    """A damaged plan of TensorRT 8, which holds the fields one behind the other; a newer one holds them by name."""
    if driver.is_v3:
        pytest.skip("TensorRT itself reads the fields of a plan")
    plugin, *_ = make_plugin(driver, "HcCollapse")
    whole = 4 * len(plugin.stored_words())
    assert plugin.reload_bytes(whole)
    for surplus in (1, 2, 3, -1):
        assert not plugin.reload_bytes(whole + surplus)
        said = (
            f"dspark.HcCollapse, layer a_layer: the plan holds {whole + surplus} bytes for it, expected four for each"
        )
        assert said in messages()


def test_the_activation_type_is_an_attribute_of_tensorrt_8(driver: Recorded, messages: Messages) -> None:
    """Left to the builder, a float16 network's layer may run in float32, and a mailbox for float16 gets float32."""
    values = ALL_OPS["HcCollapse"].attributes_type(**ATTRIBUTES["HcCollapse"])
    for number in (abi.ACTIVATIONS["bfloat16"], 3, -1):
        fields = fields_of(values, activation=RawField(INT, (number,)))
        assert driver.create("HcCollapse", fields, None) is None
        wanted = (
            "unknown [activation]" if driver.is_v3 else f"activation is {number}, expected 1 (float16) or 2 (float32)"
        )
        assert wanted in messages()
    assert (driver.create("HcCollapse", fields_of(values), None) is None) != driver.is_v3
    assert ("missing [activation]" in messages()) != driver.is_v3


def test_sizes_that_do_not_fit_are_refused_at_run_time(driver: Recorded, messages: Messages) -> None:
    """ENG-6: nothing is launched, and the message has layer, tensor, found, expected."""
    plugin, op, values = make_plugin(driver, "HcCollapse")
    tensors, inputs = described(op, values, "float32", CALL)
    tensors[1] = TensorDesc("float32", (6, 4))
    plugin = plugin.reload() or plugin
    assert not driver.is_v3 or plugin.shape_change(tensors, inputs) != 0
    assert plugin.enqueue(tensors, inputs, [64, 64, 64]) != 0
    assert driver.calls == 0
    said = "dspark.HcCollapse, layer a_layer: pre is float32[6, 4], expected pre float32[rows, 4] with T = float32"
    assert f"{said}, rows = 5, H = 128" in messages()


@pytest.mark.parametrize("status", range(1, 6))
def test_what_a_kernel_refuses_is_told_in_words(driver: Recorded, messages: Messages, status: int) -> None:
    plugin, op, values = make_plugin(driver, "MhcAllReduce", "float16")
    tensors, inputs = described(op, values, "float16", CALL)
    plugin = plugin.reload() or plugin
    driver.answer(status)
    assert plugin.enqueue(tensors, inputs, [64] * len(tensors)) != 0
    said = messages()
    assert f"{abi.STATUS[status]}: T = float16, rows = 5, H = 128, tp_size = 1" in said


def test_shapes_that_the_kernel_was_not_built_for_are_refused_while_building(
    driver: Recorded, messages: Messages
) -> None:
    """The kernel is asked with null pointers, so that it can only complain; too many rows are only a warning."""
    plugin, op, values = make_plugin(driver, "HcCollapse")
    tensors, inputs = described(op, values, "float32", SIZES)
    for status, refused in ((0, False), (3, False), (5, False), (1, True), (2, True), (4, True)):
        driver.answer(status)
        assert (plugin.configure(tensors, inputs, largest=300) != 0) == (refused and driver.is_v3)
        assert driver.recorded("HcCollapse").size_rows == 300
        assert driver.recorded("HcCollapse").streams is None
        said = messages()
        assert (abi.STATUS[status] + ": T = float32, rows = 300, H = 128" in said) == (refused or status == 5)


def test_addresses_are_not_followed_while_an_engine_is_built(driver: Recorded, messages: Messages) -> None:
    """While TensorRT times a plugin, a mailbox holds anything."""
    plugin, op, values = make_plugin(driver, "MhcAllReduce", tp_size=2)
    tensors, inputs = described(op, values, "float32", CALL)
    assert plugin.enqueue(tensors, inputs, [64] * len(tensors)) == 0
    assert driver.calls == 0 and "not run while an engine is built, when mailbox holds no addresses" in messages()
    loaded = plugin.reload()
    assert loaded is not None and loaded.enqueue(tensors, inputs, [64] * len(tensors)) == 0
    assert driver.calls == 1


def test_an_update_in_place_refuses_two_addresses(driver: Recorded, messages: Messages) -> None:
    """TensorRT may have put a copy between; while it times, it may give what memory it likes."""
    plugin, op, values = make_plugin(driver, "ContextKvInsert")
    tensors, inputs = described(op, values, "float32", CALL)
    pointers = [64, 128, 192, 256, 320]
    assert plugin.enqueue(tensors, inputs, pointers) == 0
    assert driver.recorded("ContextKvInsert").ring == driver.recorded("ContextKvInsert").ring_out == 320
    driver.answer(0)
    loaded = plugin.reload()
    assert loaded is not None and loaded.enqueue(tensors, inputs, pointers) != 0
    assert driver.calls == 0 and "ring and ring_out have different addresses, expected one" in messages()


def test_without_kernels_nothing_runs_and_the_reason_is_said(
    headers: Headers, tmp_path: Path, messages: Messages
) -> None:
    driver = Driver(compile_plugins(tmp_path, headers), tmp_path, headers)
    plugin, op, values = make_plugin(driver, "HcCollapse")
    tensors, inputs = described(op, values, "float32", CALL)
    assert plugin.configure(tensors, inputs) == 0
    assert plugin.enqueue(tensors, inputs, [64, 64, 64]) != 0
    said = messages()
    assert "libdspark_plugins.so has no kernel for it, so an engine with it can be built but not run" in said
    assert said.count("has no kernel for it") == 2
