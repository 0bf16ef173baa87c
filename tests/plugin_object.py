"""Compiles the TensorRT plugins in C++ and drives their objects as TensorRT would, without a TensorRT.

Headers decide which generation of plugins it is. They come from ``--tensorrt-include DIR`` (several times for
several TensorRTs) or from where the system keeps them. Test modules take over ``headers`` and
``pytest_generate_tests``.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dspark_trt.plugins.abi import ACTIVATIONS
from dspark_trt.plugins.op import Op, encode_attributes
from dspark_trt.plugins.registry import ALL_OPS
from dspark_trt.plugins.trt_plugin import TensorDesc

CPP_PLUGINS = Path(__file__).resolve().parents[1] / "cpp_plugins"
STANDARD_PLACES = [
    Path(place)
    for place in ("/usr/include", "/usr/local/include", "/usr/local/tensorrt/include", "/opt/tensorrt/include")
] + [Path("/usr/include/x86_64-linux-gnu"), Path("/usr/include/aarch64-linux-gnu")]
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ALL_OPS),
    ("MhcAllReduce", {"tp_size": 2}),
    ("MhcAllReduceResidualOnly", {"tp_size": 2}),
    ("MarkovSampling", {"write_logits": False}),
    ("MarkovSampling", {"sampling": True, "float64_noise": True, "write_logits": False}),
    ("MarkovSampling", {"sampling": True}),
]
"""(operation, attributes that differ from those of tests/one_op_models.py): every set of inputs and outputs."""
TYPES = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "bool": 4, "bfloat16": 7, "int64": 8}
"""``nvinfer1::DataType``."""
INT, FLOAT, CHAR = 5, 1, 6
"""``nvinfer1::PluginFieldType``."""


@dataclass(frozen=True)
class Headers:
    """Include folders of a TensorRT and of the CUDA runtime."""

    tensorrt: Path
    cuda: Path

    @property
    def is_v3(self) -> bool:
        """Whether plugins are IPluginV3; TensorRT 8 has IPluginV2DynamicExt."""
        return "IPluginV3OneBuildV2" in (self.tensorrt / "NvInferRuntime.h").read_text()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``tensorrt_include`` runs once for each TensorRT whose headers are there."""
    if "tensorrt_include" in metafunc.fixturenames:
        named = metafunc.config.getoption("tensorrt_include", default=None) or []
        standard = [place for place in STANDARD_PLACES if (place / "NvInferRuntime.h").is_file()]
        places = [Path(name) for name in named] or standard[:1] or [None]
        metafunc.parametrize("tensorrt_include", places, ids=str, scope="session")


@pytest.fixture(scope="session")
def headers(tensorrt_include: Path | None) -> Headers:
    """The headers, or a skip that names what is missing."""
    if tensorrt_include is None:
        pytest.skip("TensorRT's headers were not found; --tensorrt-include DIR names the folder of NvInfer.h")
    if not (tensorrt_include / "NvInferRuntime.h").is_file():
        pytest.fail(f"--tensorrt-include {tensorrt_include}: there is no NvInferRuntime.h")
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile the plugins")
    nvcc = shutil.which("nvcc")
    guesses = [Path("/usr/local/cuda/include"), *([Path(nvcc).resolve().parents[1] / "include"] if nvcc else [])]
    for cuda in guesses:
        if (cuda / "cuda_runtime_api.h").is_file():
            return Headers(tensorrt_include, cuda)
    pytest.skip(f"cuda_runtime_api.h was not found in {' or '.join(map(str, guesses))}")


def compile_shared(output: Path, headers: Headers, *arguments: str | Path, nodelete: bool = True) -> Path:
    """Compile C++ sources into a shared library, one that stays with ``nodelete``; warnings are errors."""
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    flags += ["-Wno-deprecated-declarations", "-I", str(CPP_PLUGINS / "include")]
    flags += ["-Wl,-z,nodelete"] if nodelete else []
    flags += ["-isystem", str(headers.tensorrt), "-isystem", str(headers.cuda)]
    command = ["g++", *flags, *map(str, arguments), "-o", str(output), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output


def compile_plugins(folder: Path, headers: Headers, kernels: Path | None = None) -> Path:
    """libdspark_trt_plugins.so; without ``kernels`` its operations have none."""
    sources = sorted((CPP_PLUGINS / "tensorrt").glob("*.cpp"))
    link = [f"-Wl,--no-as-needed,-rpath,{kernels.parent}", kernels] if kernels else []
    return compile_shared(folder / "libdspark_trt_plugins.so", headers, *sources, *link)


class _Field(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
    )


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32),
        ("linear", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.c_int64 * 8),
        ("max", ctypes.c_int64 * 8),
    )


@dataclass(frozen=True)
class RawField:
    """A plugin field as it is in memory."""

    kind: int
    values: tuple[float | int, ...]


def fields_of(attributes: Any, **changed: RawField | None) -> dict[str, RawField]:
    """An operation's attributes as plugin fields; None removes one."""
    fields: dict[str, RawField | None] = {
        name: RawField(FLOAT if isinstance(value, float) else INT, (value,))
        for name, value in encode_attributes(attributes).items()
    }
    return {name: field for name, field in {**fields, **changed}.items() if field is not None}


class Driver:
    """The driver and the plugin library, loaded into this process."""

    def __init__(self, plugins: Path, folder: Path, headers: Headers):
        driver = compile_shared(folder / "driver.so", headers, Path(__file__).with_suffix(".cpp"))
        self.is_v3 = headers.is_v3
        self.plugins, self.library = ctypes.CDLL(str(plugins)), ctypes.CDLL(str(driver))
        name = "getCreators" if self.is_v3 else "getPluginCreators"
        self.creators = ctypes.cast(getattr(self.plugins, name), ctypes.c_void_p)
        for function in ("create", "reload", "attach"):
            getattr(self.library, function).restype = ctypes.c_void_p
        self.library.workspace_bytes.restype = ctypes.c_size_t

    def create(
        self, op: str, fields: dict[str, RawField], activation: str | None = "float32", *, at_runtime: bool = False
    ) -> Plugin | None:
        """The plugin that the creator makes, or None if it refuses; TensorRT 8 tells it the activation type as well."""
        if activation and not self.is_v3:
            fields = {**fields, "activation": RawField(INT, (ACTIVATIONS[activation],))}
        arrays, raw = [], (_Field * len(fields))()
        for slot, (name, field) in zip(raw, fields.items(), strict=True):
            kind = {INT: ctypes.c_int32, FLOAT: ctypes.c_float, CHAR: ctypes.c_int8}[field.kind]
            values = (kind * len(field.values))(*field.values)
            arrays.append(values)
            slot.name, slot.type, slot.length = name.encode(), field.kind, len(field.values)
            slot.data = ctypes.addressof(values)
        made = self.library.create(self.creators, op.encode(), raw, len(fields), int(at_runtime))
        return Plugin(self, op, made) if made else None


class Plugin:
    """A plugin object. Tensors are inputs, then outputs."""

    def __init__(self, driver: Driver, op: str, address: int):
        self.driver, self.op, self.address = driver, op, ctypes.c_void_p(address)

    def _call(self, function: str, *arguments: Any) -> Any:
        return getattr(self.driver.library, function)(self.address, *arguments)

    def reload(self) -> Plugin | None:
        """The plugin that a plan with this one in it gives when it is loaded."""
        made = self.driver.library.reload(self.driver.creators, self.op.encode(), self.address)
        return Plugin(self.driver, self.op, made) if made else None

    def reload_bytes(self, count: int) -> bool:
        """Whether TensorRT 8 gets a plugin of a plan that holds so many bytes of this one."""
        load = self.driver.library.reload_bytes
        load.restype = ctypes.c_void_p
        return bool(load(self.driver.creators, self.op.encode(), self.address, ctypes.c_size_t(count)))

    def attach(self) -> Plugin:
        """The plugin of an execution context."""
        return Plugin(self.driver, self.op, self._call("attach"))

    def destroy(self) -> None:
        """Free it, as TensorRT does when an engine or a context goes."""
        self._call("destroy")

    def stored_words(self) -> list[int]:
        """What a plan holds of it, as 32-bit words: the ABI number and the attributes."""
        words = (ctypes.c_int32 * 64)()
        return list(words[: self._call("stored_words", words)])

    def alias(self, output: int) -> int:
        return self._call("alias", output)

    def output_type(self, index: int, inputs: Sequence[str]) -> int:
        types = (ctypes.c_int32 * len(inputs))(*(TYPES[t] for t in inputs))
        return self._call("output_type", index, types, len(inputs))

    def supports(self, position: int, tensors: Sequence[TensorDesc], inputs: int) -> bool:
        return bool(self._call("supports", position, *_raw(tensors, inputs)))

    def configure(self, tensors: Sequence[TensorDesc], inputs: int, largest: int = 8) -> int:
        return self._call("configure", *_raw(tensors, inputs, largest))

    def workspace_bytes(self, tensors: Sequence[TensorDesc], inputs: int, largest: int = 8) -> int:
        return self._call("workspace_bytes", *_raw(tensors, inputs, largest))

    def shape_change(self, tensors: Sequence[TensorDesc], inputs: int) -> int:
        return self._call("shape_change", *_raw(tensors, inputs))

    def enqueue(
        self, tensors: Sequence[TensorDesc], inputs: int, pointers: Sequence[int], workspace: int = 0, stream: int = 0
    ) -> int:
        addresses = (ctypes.c_void_p * len(pointers))(*pointers)
        arguments = (addresses, ctypes.c_void_p(workspace), ctypes.c_void_p(stream))
        return self._call("enqueue", *_raw(tensors, inputs), *arguments)


def _raw(tensors: Sequence[TensorDesc], inputs: int, largest: int = 8) -> tuple[Any, int, int]:
    """Tensors as the driver takes them; ``largest`` is the profile's maximum of every dynamic size."""
    raw = (_Tensor * len(tensors))()
    for slot, tensor in zip(raw, tensors, strict=True):
        slot.type, slot.linear, slot.rank = TYPES[tensor.dtype], tensor.linear, len(tensor.dims)
        for i, size in enumerate(tensor.dims):
            slot.dims[i], slot.max[i] = size, largest if size == -1 else size
    return raw, inputs, len(tensors) - inputs


def described(op: Op, attributes: Any, activation: str, sizes: dict[str, int]) -> tuple[list[TensorDesc], int]:
    """Tensors that the operation takes and gives, and the number of inputs; sizes not named are -1."""
    specs = (*op.inputs(attributes), *op.outputs(attributes))
    tensors = [
        TensorDesc(
            activation if spec.dtype == "T" else spec.dtype,
            tuple(dim if isinstance(dim, int) else sizes.get(dim, -1) for dim in spec.dims),
        )
        for spec in specs
    ]
    return tensors, len(op.inputs(attributes))
