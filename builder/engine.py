"""From an exported ONNX model to a TensorRT plan.

What TensorRT makes of an operation of domain ``dspark`` depends on what it finds: a registered creator, a
function of that name in the model, and whether the node names the plugin's namespace. So nothing is left
to it: the plugin lowering registers the creators, names version and namespace and drops the functions; the
native lowering inlines the functions and registers nothing. Both compare the number of plugin layers in the parsed
network with what was meant.

Plans have two profiles: ``decode`` (a few rows per request, the captured step) and ``context`` (many rows).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import onnx.inliner

from ..plugins.op import DOMAIN, OPSET, OpError, decode_attributes, encode_attributes, node_attributes
from ..plugins.profiles import Profile, Shape
from ..plugins.registry import ALL_OPS
from ..plugins.tensorrt_api import EngineBuildError, EngineOptions, ParsedNetwork, TensorRT
from ..plugins.trt_plugin import PluginFailures, registered_creators
from .build_config import BuildConfig, Kind, Lowering
from .config import ConfigError, ModelConfig
from .onnx_lowering import OPSET as OPSET_OF_TENSORRT_8
from .onnx_lowering import add_activations, float_types, lower_to_opset17

if TYPE_CHECKING:
    from .network import TensorInfo

logger = logging.getLogger(__name__)


def dimension_ranges(kind: Kind, config: ModelConfig, build: BuildConfig) -> dict[str, dict[str, tuple[int, int, int]]]:
    """Profile name -> dynamic dimension (R requests, T rows of a call) -> (smallest, optimal, largest).

    A decode call of the draft takes N + 1 context rows per request, one of the target the anchor and N
    drafts; a context call takes any number of rows, of the draft no more than its windows hold.

    Raises:
        ConfigError: ``build`` has no draft length, because it did not pass through :meth:`BuildConfig.checked`.
    """
    if build.num_draft_tokens is None:
        raise ConfigError("the build configuration has no draft length; pass it through BuildConfig.checked() first")
    batch, step = build.max_batch_size, build.num_draft_tokens + 1
    decode_rows = (step if kind == "draft" else 1, step, step * batch)
    most = max(build.max_input_len, step)
    if kind == "draft":
        most = max(step, min(most, batch * config.sliding_window))
    context_rows = (1, max(1, most // 2), most)
    return {
        "decode": {"R": (1, 1, batch), "T": decode_rows},
        "context": {"R": (1, 1, batch), "T": context_rows},
    }


def profiles_for(
    inputs: Iterable[TensorInfo], ranges: Mapping[str, Mapping[str, tuple[int, int, int]]]
) -> list[dict[str, tuple[Shape, Shape, Shape]]]:
    """One profile an entry of ``ranges``, with the (smallest, optimal, largest) shape of every input."""

    def shape(info: TensorInfo, sizes: Mapping[str, tuple[int, int, int]], i: int) -> Shape:
        return tuple(dim if isinstance(dim, int) else sizes[dim][i] for dim in info.shape)

    inputs = tuple(inputs)
    return [{t.name: (shape(t, r, 0), shape(t, r, 1), shape(t, r, 2)) for t in inputs} for r in ranges.values()]


def build_engine(
    onnx_path: Path,
    *,
    api: TensorRT,
    lowering: Lowering | str,
    profiles: Sequence[Profile],
    expected_plugin_layers: Mapping[str, int],
    options: EngineOptions | None = None,
) -> bytes:
    """The plan of an exported model.

    Args:
        expected_plugin_layers: operation -> nodes in the model. The plugin lowering must yield exactly
            these plugin layers, the native lowering none.

    Raises:
        EngineBuildError: the model's operations aren't this package's, TensorRT refused, a plugin
            reported a fault, or the plugin layers are not those expected.
    """
    lowering, options = Lowering(lowering), options or EngineOptions()
    started = time.perf_counter()
    model = onnx.load(onnx_path, load_external_data=False)
    versions = _check_operations(model, onnx_path)
    plugin = lowering is Lowering.PLUGIN
    if plugin:
        _name_plugins(model, versions)
        if api.is_8:
            add_activations(model)
    else:
        # Inlined here because TensorRT ignores overloads: of two functions of one name it takes the first.
        model = onnx.inliner.inline_local_functions(model)
        model.opset_import.append(onnx.helper.make_opsetid("trt", 1))
    types = float_types(model) if api.is_8 else {}
    if (options.onnx_opset or (OPSET_OF_TENSORRT_8 if api.is_8 else OPSET)) == OPSET_OF_TENSORRT_8:
        model = lower_to_opset17(model)
    with registered_creators(api, ALL_OPS.values()) if plugin else nullcontext(PluginFailures()) as failures:
        try:
            network = api.parse(model.SerializeToString(), onnx_path)
            del model
            _check_plugin_layers(network, expected_plugin_layers if plugin else {}, onnx_path)
            parsed = time.perf_counter()
            plan = network.build(profiles, options, types)
        except EngineBuildError as error:
            if detail := failures.text():
                raise EngineBuildError(f"{error}\n{detail}") from error
            raise
        if failures.errors:
            raise EngineBuildError(f"plugins of {onnx_path} failed while the engine was built:\n{failures.text()}")
    logger.info(
        "%s: %s lowering, %d layers of which %d plugins, %.1f MB; parse %.1f s, build %.1f s",
        onnx_path.name,
        lowering.value,
        network.network.num_layers,
        sum(network.plugin_layers().values()),
        len(plan) / 1e6,
        parsed - started,
        time.perf_counter() - parsed,
    )
    return plan


def _check_operations(model: onnx.ModelProto, path: Path) -> dict[str, int]:
    """Operation -> version of the model's ``dspark`` nodes; raises unless all are this package's.

    TensorRT drops an attribute it doesn't know, cuts a large integer and passes a wrong type on, all
    without a message, so the attributes are checked here.
    """
    versions: dict[str, int] = {}
    problems = []
    for node in model.graph.node:
        if node.domain != DOMAIN:
            continue
        values = node_attributes(node)
        version, namespace = values.pop("plugin_version", "1"), values.pop("plugin_namespace", DOMAIN)
        op = ALL_OPS.get(node.op_type)
        if op is None or str(op.version) != version or namespace != DOMAIN:
            known = ", ".join(f"{o.name} {o.version}" for o in ALL_OPS.values())
            problems.append(
                f"node {node.name}: {namespace}.{node.op_type} version {version} is not an operation of this package "
                f"(namespace {DOMAIN}: {known})"
            )
            continue
        versions[op.name] = op.version
        try:
            encode_attributes(decode_attributes(op, values))
        except OpError as error:
            problems.append(f"node {node.name}: {error}")
    if problems:
        raise EngineBuildError(f"{path}:\n" + "\n".join(problems))
    return versions


def _name_plugins(model: onnx.ModelProto, versions: Mapping[str, int]) -> None:
    """Leave plugins as the only reading of the operations: version and namespace said, functions dropped."""
    for node in model.graph.node:
        if node.domain == DOMAIN:
            wanted = {"plugin_version": str(versions[node.op_type]), "plugin_namespace": DOMAIN}
            present = {a.name for a in node.attribute}
            node.attribute.extend(onnx.helper.make_attribute(k, v) for k, v in wanted.items() if k not in present)
    kept = [f for f in model.functions if f.domain != DOMAIN]
    del model.functions[:]
    model.functions.extend(kept)


def _check_plugin_layers(network: ParsedNetwork, expected: Mapping[str, int], path: Path) -> None:
    found = network.plugin_layers()
    if found != Counter(expected):
        names = sorted(found.keys() | expected.keys())
        pairs = {name: (found.get(name, 0), expected.get(name, 0)) for name in names}
        wrong = [f"{name} {have} (expected {want})" for name, (have, want) in pairs.items() if have != want]
        raise EngineBuildError(
            f"{path} gave other plugin layers than meant: {', '.join(wrong)}. A missing one was imported as ordinary "
            "layers because no creator was registered for it; a surplus one found a creator of a loaded library"
        )
