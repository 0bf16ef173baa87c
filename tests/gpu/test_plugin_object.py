"""The TensorRT plugins in C++, driven as TensorRT does: created, written to a plan, loaded, captured, replayed.

TensorRT itself isn't needed: see tests/plugin_object.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dspark_trt.plugins.kernels import has_kernel, kernel_scope
from dspark_trt.plugins.trt_plugin import TensorDesc
from torch import Tensor

from tests import plugin_object
from tests.gpu.kernel_call import bits
from tests.op_examples import LABELS, Example, example
from tests.plugin_object import (
    Driver,
    Headers,
    Plugin,
    compile_plugins,
    described,
    fields_of,
)

headers, pytest_generate_tests = plugin_object.headers, plugin_object.pytest_generate_tests

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="session")
def driver(headers: Headers, library: Path, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    folder = tmp_path_factory.mktemp("plugins")
    return Driver(compile_plugins(folder, headers, kernels=library), folder, headers)


@pytest.mark.parametrize("activation", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("label", LABELS)
def test_a_replayed_plugin_gives_the_bits_of_the_kernel(driver: Driver, label: str, activation: torch.dtype) -> None:
    """Enqueue is captured, and all it needs is in the plan and the workspace. One object
    serves several row counts, one after the other."""
    call = example(label, activation)
    op, values = call.op, call.values
    if not has_kernel(op):
        pytest.skip(f"the library has no kernel for {op.name}")
    name = str(activation).removeprefix("torch.")
    if not driver.is_v3 and activation is torch.bfloat16:
        pytest.skip("TensorRT 8 has no bfloat16")
    if not driver.is_v3 and any(spec.dtype == "int8" for spec in (*op.inputs(values), *op.outputs(values))):
        pytest.skip("TensorRT 8 can't carry bytes")
    plugin = driver.create(op.name, fields_of(values), name)
    assert plugin is not None
    sizes = {k: v for k, v in op.bind(values, call.tensors).items() if k not in ("T", "rows", "requests")}
    dynamic, count = described(op, values, name, sizes)
    assert plugin.configure(dynamic, count, largest=16) == 0
    scratch = torch.empty(plugin.workspace_bytes(dynamic, count, largest=16), dtype=torch.uint8, device="cuda")
    loaded = plugin.reload()
    plugin.destroy()
    assert loaded is not None
    context = loaded.attach()
    for part in (call, call.rows(slice(2, 5)), call):
        assert_replays_like_the_kernel(context, part, count, scratch)


def assert_replays_like_the_kernel(context: Plugin, call: Example, count: int, scratch: Tensor) -> None:
    """``count`` is the number of inputs; outputs are poisoned and aliased ones restored before each replay."""
    inputs = [t.cuda().contiguous() for t in call.tensors]
    with kernel_scope():
        results = call.op(*(t.clone() for t in inputs), **call.attributes)
    expected = results if isinstance(results, tuple) else (results,)
    aliases = call.op.aliases(call.values)
    rings = {source: inputs[source].clone() for source in aliases.values()}
    outputs = [inputs[aliases[i]] if i in aliases else torch.empty_like(out) for i, out in enumerate(expected)]
    tensors = [TensorDesc(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in (*inputs, *outputs)]
    pointers = [t.data_ptr() for t in (*inputs, *outputs)]
    assert context.shape_change(tensors, count) == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        assert context.enqueue(tensors, count, pointers, scratch.data_ptr(), stream) == 0
    for _ in range(2):
        for i, output in enumerate(outputs):
            if i not in aliases:
                output.view(torch.uint8).fill_(0xFF)
        for source, ring in rings.items():
            inputs[source].copy_(ring)
        scratch.fill_(0xFF)
        graph.replay()
        torch.cuda.synchronize()
        for output, wanted in zip(outputs, expected, strict=True):
            assert torch.equal(bits(output), bits(wanted))
