"""Models lowered to opset 17 for TensorRT 8: the same numbers, and everything refused that it has no form for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx.parser
import onnxruntime
import pytest
from dspark_trt.builder import engine
from dspark_trt.builder.build_config import BuildConfig, Kind, Lowering
from dspark_trt.builder.checkpoint import convert_checkpoint, read_shard_config
from dspark_trt.builder.config import Numerics
from dspark_trt.builder.engine import build_engine
from dspark_trt.builder.network import load_network
from dspark_trt.builder.onnx_export import ExportedModel, export_network
from dspark_trt.builder.onnx_lowering import add_activations, lower_to_opset17
from dspark_trt.plugins.abi import ACTIVATIONS
from dspark_trt.plugins.op import DOMAIN
from dspark_trt.plugins.tensorrt_api import EngineBuildError, EngineOptions, TensorRT
from onnx import TensorProto, helper, numpy_helper

from tests.example_scripts import CHECKPOINT
from tests.one_op_models import one_op_model, profile_of, save

Exported = Callable[[Kind, str], tuple[ExportedModel, BuildConfig]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The trained tiny models, dequantized."""
    root = tmp_path_factory.mktemp("lowering")
    convert_checkpoint(CHECKPOINT, root / "shards", tp_size=1)
    made: dict[tuple[str, str], tuple[ExportedModel, BuildConfig]] = {}

    def make(kind: Kind, dtype: str) -> tuple[ExportedModel, BuildConfig]:
        if (kind, dtype) not in made:
            options: dict[str, Any] = {"numerics": Numerics.DEQUANTIZED, "dtype": dtype, "max_batch_size": 2}
            build = BuildConfig(**options, max_input_len=64, max_seq_len=256)
            build = build.checked(read_shard_config(root / "shards").draft)
            network = load_network(kind, root / "shards", 0, build)
            made[kind, dtype] = export_network(network, root / f"{kind}_{dtype}.onnx"), build
        return made[kind, dtype]

    return make


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def feeds_for(model: onnx.ModelProto, seed: int) -> dict[str, np.ndarray]:
    """Random inputs of two requests and seven rows: one of five rows and one of two."""
    generator = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.input:
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        dims = [{"R": 2, "T": 7}.get(d.dim_param, d.dim_value) for d in value.type.tensor_type.shape.dim]
        values = generator.integers(0, 200, dims) if kind == np.int32 else generator.standard_normal(dims)
        feeds[value.name] = values.astype(kind)
    rows = {"slots": [0] * 5 + [1] * 2, "positions": [9, 10, 11, 12, 13, 4, 5]}
    draft = "anchor_ids" in feeds
    for name, values in rows.items():
        feeds[f"feature_{name}" if draft else name] = np.array(values, np.int32)
    if draft:
        feeds["slots"], feeds["positions"] = np.array([0, 1], np.int32), np.array([14, 6], np.int32)
    return feeds


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", ["draft", "target"])
def test_the_lowered_network_computes_the_same_bits(exported: Exported, kind: Kind, dtype: str) -> None:
    """Native lowering of the trained tiny models in ONNX Runtime: the rewriting changes no arithmetic."""
    model = onnx.inliner.inline_local_functions(onnx.load(exported(kind, dtype)[0].path))
    before = model.SerializeToString()
    lowered = lower_to_opset17(model)
    assert model.SerializeToString() == before
    onnx.checker.check_model(lowered, full_check=True)
    assert [(o.domain, o.version) for o in lowered.opset_import] == [("", 17)]
    assert lowered.ir_version == 8
    for seed in range(2):
        feeds = feeds_for(model, seed)
        wanted, found = run(model, feeds), run(lowered, feeds)
        assert all(np.isfinite(w).all() and w.size for w in wanted)
        for name, w, f in zip([o.name for o in model.graph.output], wanted, found, strict=True):
            assert w.dtype == f.dtype and np.array_equal(w, f), name


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", ["draft", "target"])
def test_plugin_nodes_pass_unchanged_and_the_rest_is_readable(exported: Exported, kind: Kind, dtype: str) -> None:
    """Axes are attributes or initializers, no Constant node is left, the operations keep inputs and attributes."""
    model = onnx.load(exported(kind, dtype)[0].path)
    engine._name_plugins(model, engine._check_operations(model, Path("x")))
    lowered = lower_to_opset17(model)
    onnx.checker.check_model(lowered)

    def ours(graph: onnx.GraphProto) -> list[bytes]:
        return [node.SerializeToString(deterministic=True) for node in graph.node if node.domain == DOMAIN]

    assert ours(lowered.graph) == ours(model.graph) and ours(lowered.graph)
    before, after = (Counter(n.op_type for n in m.graph.node) for m in (model, lowered))
    before.pop("Constant", None)
    assert before == after
    initializers = {tensor.name for tensor in lowered.graph.initializer}
    for node in lowered.graph.node:
        attributes = {a.name for a in node.attribute}
        if node.op_type == "ReduceMean":
            assert len(node.input) == 1 and "axes" in attributes
        if node.op_type in ("ReduceSum", "Squeeze", "Unsqueeze", "Split", "TopK"):
            assert node.input[1] in initializers
    kinds = {v.type.tensor_type.elem_type for v in (*lowered.graph.input, *lowered.graph.output)}
    assert kinds <= {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT32}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", ["draft", "target"])
def test_every_plugin_node_tells_its_activation_type(exported: Exported, kind: Kind, dtype: str) -> None:
    """TensorRT 8 takes a plugin's types for free to choose; a boundary in float32 does not fit a float16 mailbox."""
    model = onnx.load(exported(kind, dtype)[0].path)
    add_activations(model)
    nodes = [node for node in model.graph.node if node.domain == DOMAIN]
    told = [a.i for node in nodes for a in node.attribute if a.name == "activation"]
    assert nodes and told == [ACTIVATIONS[dtype]] * len(nodes)


def test_an_activation_type_that_tensorrt_8_lacks_is_named() -> None:
    model = one_op_model("HcCollapse", "bfloat16")
    with pytest.raises(EngineBuildError, match=r"HcCollapse the_HcCollapse: its activations are bfloat16, expected"):
        add_activations(model)
    model = one_op_model("HcCollapse", "float16")
    model.graph.node[0].input[0] = "computed"
    with pytest.raises(EngineBuildError, match="its activations are undefined"):
        add_activations(model)


@pytest.mark.parametrize("lowering", list(Lowering))
def test_another_parser_reads_the_lowered_model(
    exported: Exported, api: TensorRT, tmp_path: Path, lowering: Lowering
) -> None:
    """TensorRT-RTX builds it with ``onnx_opset=17``, every operation a plugin layer or none."""
    model = one_op_model("MarkovSampling") if lowering is Lowering.NATIVE else None
    found, build = exported("draft", "float16")
    options = EngineOptions(compute_capabilities=("8.9",), onnx_opset=17)
    parsed: list[list[tuple[str, int]]] = []
    with pytest.MonkeyPatch.context() as patch:
        parse = TensorRT.parse

        def spy(self: TensorRT, data: bytes, path: Path) -> Any:
            opsets = onnx.load_model_from_string(data).opset_import
            parsed.append(sorted((o.domain, o.version) for o in opsets))
            return parse(self, data, path)

        patch.setattr(TensorRT, "parse", spy)
        if model is not None:  # the whole draft takes half a minute
            path, profiles, counts = save(model, tmp_path / "m.onnx"), [profile_of(model)], {}
        else:
            ranges = engine.dimension_ranges("draft", exported_config(exported), build)
            path, profiles, counts = found.path, engine.profiles_for(found.inputs, ranges), found.plugin_counts
        plan = build_engine(
            path, api=api, lowering=lowering, profiles=profiles, expected_plugin_layers=counts, options=options
        )
    assert len(plan) > 1000
    assert parsed == [[("", 17)] if lowering is Lowering.NATIVE else [("", 17), (DOMAIN, 1)]]


def exported_config(exported: Exported) -> Any:
    return read_shard_config(exported("draft", "float16")[0].path.parent / "shards").draft


def parse(body: str, inputs: str = "float[n,4] x", outputs: str = "float[n,4] y", opset: int = 19) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}, "dspark": 1]> g ({inputs}) => ({outputs}) {{ {body} }}'
    )


REDUCTIONS = ["ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSumExp"]


@pytest.mark.parametrize("operator", [*REDUCTIONS, "ReduceSum", "ReduceSumSquare", "ReduceLogSum"])
@pytest.mark.parametrize(
    ("attributes", "axes", "shape"),
    [
        ("", "{1}", "[n, 1]"),
        ("<keepdims=0>", "{-1}", "[n]"),
        ("<keepdims=0>", "{0, 1}", "[]"),
        ("", None, "[1, 1]"),
        ("", "{}", "[1, 1]"),
    ],
)
def test_reductions_keep_their_meaning(operator: str, attributes: str, axes: str | None, shape: str) -> None:
    """Axes as an input; none at all, or an empty list of them, which are all."""
    if axes is None:
        body = f"y = {operator}{attributes}(x)"
    else:
        size = axes.count(",") + 1 if axes != "{}" else 0
        body = f"a = Constant<value = int64[{size}] {axes}>() y = {operator}{attributes}(x, a)"
    model = parse(body, outputs=f"float{shape if shape != '[]' else ''} y")
    lowered = lower_to_opset17(model)
    onnx.checker.check_model(lowered, full_check=True)
    x = np.random.default_rng(0).uniform(0.5, 2, (3, 4)).astype(np.float32)
    np.testing.assert_array_equal(run(model, {"x": x})[0], run(lowered, {"x": x})[0])


@pytest.mark.parametrize(
    "body",
    [
        "h = Cast<to=10>(x) y = CastLike(h, x)",
        "h = Cast<to=10>(x) z = Neg(h) w = CastLike(x, z) y = Cast<to=1>(w)",
        "s = Constant<value_ints = [0]>() e = Constant<value = int64[1] {9223372036854775807}>() "
        "a = Constant<value = int64[1] {1}>() z = Slice(x, s, e, a) f = Constant<value_float = 2.0>() y = Mul(z, f)",
        "p = Constant<value_ints = [1, 3]>() b, c = Split<axis=1>(x, p) y = Concat<axis=1>(b, c)",
        "a = Constant<value_ints = [0]>() z = Unsqueeze(x, a) y = Squeeze(z, a)",
    ],
)
def test_what_opset_17_says_otherwise_is_said_so(body: str) -> None:
    model = parse(body)
    lowered = lower_to_opset17(model)
    onnx.checker.check_model(lowered, full_check=True)
    kinds = {node.op_type for node in lowered.graph.node}
    assert not kinds & {"Constant", "CastLike"}
    used = {name for node in lowered.graph.node for name in node.input}
    for tensor in lowered.graph.initializer:
        assert tensor.name in used
        if tensor.data_type == TensorProto.INT64:
            assert abs(numpy_helper.to_array(tensor)).max() < 2**31
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    np.testing.assert_array_equal(run(model, {"x": x})[0], run(lowered, {"x": x})[0])


@pytest.mark.parametrize(
    ("body", "inputs", "message"),
    [
        ("y = Identity(x)", "bfloat16[n,4] x", "input x: TensorRT 8 does not take bfloat16 there, expected float, fl"),
        ("y = Identity(x)", "int64[n,4] x", "input x: TensorRT 8 does not take int64 there"),
        ("y = Identity(x)", "int8[n,4] x", "input x: TensorRT 8 does not take int8 there"),
        ("z = Cast<to=16>(x) y = Cast<to=1>(z)", "", "Cast : bfloat16 is not a type of TensorRT 8"),
        ("z = Cast<to=17>(x) y = Cast<to=1>(z)", "", "Cast : float8e4m3fn is not a type of TensorRT 8"),
        ("c = Constant<value = double {1.0}>() z = Cast<to=1>(c) y = Add(x, z)", "", "initializer c: double is not a"),
        ("y = Mish(x)", "", "Mish : TensorRT 8 does not have this operator"),
        ("y = trt.DistCollective(x)", "", "DistCollective : TensorRT 8 has no operators of domain trt"),
        ("a = Shape<start=0, end=1>(x) y = ReduceMean(x, a)", "", "its axes a are computed, and opset 17 has them as"),
        ("a = Shape<start=0, end=1>(x) y = ReduceSum(x, a)", "", "its input a is computed, and TensorRT 8 must know"),
        ("y = ReduceMax<noop_with_empty_axes=1>(x)", "", "it reduces no axis, which opset 17 can't say"),
        ("y, z = Split<num_outputs=2>(x)", "", "num_outputs came after opset 17; give the sizes of the parts"),
        (
            "c = Constant<value = int64[1] {4294967296}>() z = Cast<to=1>(c) y = Add(x, z)",
            "",
            "Cast : c holds integers beyond 32 bits",
        ),
        (
            "c = Constant<value = int64[1] {4294967296}>() s = Constant<value_ints=[0]>() z = Slice(c, s, c) "
            "w = Cast<to=1>(z) y = Add(x, w)",
            "",
            "Slice : c holds integers beyond 32 bits",
        ),
        ('i = Cast<to=7>(x) y = ScatterND<reduction="add">(x, i, x)', "", "TensorRT 8 scatters without a reduction"),
        ("p = Constant<value_ints=[0,0,0,0]>() y = Pad(x, p)", "", "its form of opset 19 is not lowered to opset 17"),
    ],
)
def test_what_tensorrt_8_cannot_have_is_refused_with_the_reason(body: str, inputs: str, message: str) -> None:
    with pytest.raises(EngineBuildError) as caught:
        lower_to_opset17(parse(body, inputs or "float[n,4] x"))
    assert message in str(caught.value)


def test_casts_lose_what_came_with_fp8() -> None:
    (node,) = lower_to_opset17(parse("y = Cast<to=1, saturate=0>(x)")).graph.node
    assert [(a.name, a.i) for a in node.attribute] == [("to", TensorProto.FLOAT)]


def test_everything_that_is_refused_is_listed() -> None:
    """And a function that was not inlined is among it."""
    model = one_op_model("HcCollapse", "bfloat16")
    model.graph.node.append(helper.make_node("Mish", ["hidden"], ["more"], name="later"))
    with pytest.raises(EngineBuildError) as caught:
        lower_to_opset17(model)
    lines = str(caught.value).splitlines()
    assert lines[0] == "this model is not for TensorRT 8:"
    assert [line.split(":")[0] for line in lines[1:]] == [
        "function dspark.HcCollapse",
        "input streams",
        "output hidden",
        "Mish later",
    ]


def test_tensorrt_8_gets_opset_17_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.fake_tensorrt import fake_api

    model = one_op_model("HcCollapse", "float16")
    save(model, tmp_path / "m.onnx")
    seen: list[int] = []

    def parse(self: TensorRT, data: bytes, path: Path) -> Any:
        seen.append(next(o.version for o in onnx.load_model_from_string(data).opset_import if not o.domain))
        raise EngineBuildError("far enough")

    monkeypatch.setattr(TensorRT, "parse", parse)
    monkeypatch.setattr("dspark_trt.plugins.trt_plugin.load_trt_plugins", lambda major: None)
    for version, opset in (("8.6.0", None), ("8.6.0", 19), ("8.6.0", 17)):
        with pytest.raises(EngineBuildError, match="far enough"):
            build_engine(
                tmp_path / "m.onnx",
                api=fake_api(version),
                lowering="plugin",
                profiles=[profile_of(model)],
                expected_plugin_layers={"HcCollapse": 1},
                options=EngineOptions(onnx_opset=opset),  # type: ignore[arg-type]
            )
    assert seen == [17, 19, 17]
