"""Compares the executors of a network output by output, with Polygraphy.

    python examples/compare_accuracy.py --checkpoint examples/tiny/checkpoint
    mpirun -n 2 python examples/compare_accuracy.py --engine-dir ENGINES

The runners, each against the first:

* ``torch``: the torch session, the reference;
* ``plugin-references``: the exported ONNX graph, node by node. Nodes of domain ``dspark`` call the
  operation's reference, standard nodes the evaluator that the ``onnx`` package ships. (Polygraphy's own
  PluginRefRunner knows three standard operators, and no network is made of those.) It shows that the graph
  and the attributes of its nodes are the network's;
* ``onnxruntime``: the exported model with its local functions, that is, every operation spelled in standard
  ONNX. It wants dequantized numerics in float32 or float16 and one rank: on a CPU, ONNX Runtime has neither
  bfloat16 nor collectives.

Their inputs are those of a real decode: prompts go through target and draft, and what the sessions were
given, prefill and steps, is given to every runner. So ids are in the vocabulary, positions and slots belong
together, and features and caches are the target's.

Equal means: :mod:`_comparison`, with the limits of :data:`LIMITS`. The exit status is 1 if anything differs
and 2 if nothing could be compared. ``--save DIR`` keeps models, inputs and reference outputs for
``polygraphy run``.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnxruntime
import torch
import tyro
from _common import Text, read_prompts
from _comparison import OutputResult, compare_results
from dspark_trt.builder.checkpoint import ShardConfig, convert_checkpoint, read_shard_config
from dspark_trt.builder.cli import USER_ERRORS
from dspark_trt.builder.config import Numerics
from dspark_trt.builder.engine import BuildConfig
from dspark_trt.builder.engine_dir import WEIGHTS, EngineDir
from dspark_trt.builder.network import Kind, NetworkIO, load_network
from dspark_trt.builder.onnx_export import export_network
from dspark_trt.plugins.collective import collective_scope
from dspark_trt.plugins.op import DOMAIN, Op, decode_attributes
from dspark_trt.plugins.registry import ALL_OPS
from dspark_trt.runtime_py.communicator import Communicator, LaunchError, connect, fail_together
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.requests import RequestError, SamplingParams
from dspark_trt.runtime_py.session import Session, TorchSession
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.common import TensorMetadata
from polygraphy.comparator import Comparator, RunResults
from polygraphy.json import save_json
from polygraphy.logger import G_LOGGER
from rich.console import Console
from rich.table import Table
from torch import Tensor

Feed = OrderedDict[str, Any]
"""Input name -> numpy array, or torch tensor for bfloat16, which numpy has not."""
REFERENCE, PLUGIN_REFERENCES, ONNXRUNTIME = "torch", "plugin-references", "onnxruntime"
LIMITS = {"float32": 2e-5, "float16": 2e-2, "bfloat16": 1e-1}
CALLS = 6
"""Calls of each network that are compared; the first ones of the decode, prefill among them."""
TOKENS = 24
"""Tokens a prompt: enough for that many calls."""


PROMPTS = Path(__file__).with_name("prompts.txt")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare the executors of draft and target output by output."""

    checkpoint: Path | None = None
    """Released checkpoint; converted for one rank."""
    engine_dir: Path | None = None
    """Or an engine directory; start it with mpirun if it is for several ranks."""
    numerics: Literal["released", "dequantized"] | None = None
    """Left out: those that the engine directory was built with, or both, of a checkpoint."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Activation type of dequantized numerics."""
    prompts_file: Path = PROMPTS
    """One text a line, whose decode gives the inputs."""
    num_prompts: int = 3
    """Leading prompts of that file to take."""
    save: Path | None = None
    """Keep {network}.onnx, {network}_inputs.json and {network}_outputs.json in this directory."""


# ------------------------------------------------------------------------------------------- inputs


class RecordingSession:
    """A session that keeps copies of the inputs of its first calls."""

    def __init__(self, session: Session):
        self.session, self.io = session, session.io
        self.infer_shapes = session.infer_shapes
        self.feeds: list[Feed] = []

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        if len(self.feeds) < CALLS:
            # A mailbox is the session's own; the references gather without it, but the graph names it.
            empty = {i.name: torch.zeros(i.shape, dtype=i.dtype) for i in self.io.inputs if i.name == "mailbox"}
            self.feeds.append(OrderedDict((n, to_feed(t.clone())) for n, t in {**inputs, **empty}.items()))
        self.session.run(inputs, outputs)


def to_feed(tensor: Tensor) -> Any:
    return tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()


def to_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    array = np.array(value)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: Tensor) -> np.ndarray:
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def record_feeds(
    sessions: Mapping[Kind, Session],
    source: ShardConfig,
    build: BuildConfig,
    communicator: Communicator,
    prompts: list[list[int]],
) -> dict[Kind, list[Feed]]:
    """The inputs of the first calls of each network while ``prompts`` are decoded."""
    assert source.target is not None
    recording = {kind: RecordingSession(session) for kind, session in sessions.items()}
    decoder = Decoder(
        recording["target"],
        recording["draft"],
        target_config=source.target,
        draft_config=source.draft,
        build=build,
        communicator=communicator,
    )
    decoder.generate(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    return {kind: session.feeds for kind, session in recording.items()}


# ------------------------------------------------------------------------------------------ runners


class SessionRunner(BaseRunner):
    """A session of the runtime as a Polygraphy runner; its caches are copied, not updated in place."""

    def __init__(self, session: Session, name: str):
        super().__init__(name=name)
        self.session = session

    def get_input_metadata_impl(self) -> TensorMetadata:
        return input_metadata(self.session.io)

    def infer_impl(self, feed_dict: Mapping[str, Any]) -> dict[str, Any]:
        io = self.session.io
        inputs = {name: to_tensor(value).clone() for name, value in feed_dict.items()}
        shapes = self.session.infer_shapes({name: tuple(t.shape) for name, t in inputs.items()})
        outputs = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in shapes.items()}
        outputs |= {output: inputs[source] for output, source in io.aliases.items()}
        started = time.perf_counter()
        self.session.run(inputs, outputs)
        self.inference_time = time.perf_counter() - started
        return OrderedDict((info.name, to_feed(outputs[info.name])) for info in io.outputs)


class PluginReferenceRunner(BaseRunner):
    """Evaluates an exported model node by node, ``dspark`` nodes by the references of ``ops``."""

    def __init__(self, path: Path, io: NetworkIO, communicator: Communicator, ops: Iterable[Op] | None = None):
        super().__init__(name=PLUGIN_REFERENCES)
        self.io, self.communicator = io, communicator
        references = [reference_class(op) for op in (ALL_OPS.values() if ops is None else ops)]
        self.evaluator = ReferenceEvaluator(str(path), new_ops=[*references, GatherElements, MatMul])

    def get_input_metadata_impl(self) -> TensorMetadata:
        return input_metadata(self.io)

    def infer_impl(self, feed_dict: Mapping[str, Any]) -> dict[str, Any]:
        started = time.perf_counter()
        with torch.inference_mode(), collective_scope(self.communicator.all_gather):
            outputs = self.evaluator.run(None, {name: to_numpy(to_tensor(v)) for name, v in feed_dict.items()})
        self.inference_time = time.perf_counter() - started
        return OrderedDict((o.name, to_feed(to_tensor(v))) for o, v in zip(self.io.outputs, outputs, strict=True))


def reference_class(op: Op) -> type[OpRun]:
    """``op`` as a class that ``onnx.reference`` instantiates for its nodes."""

    def _run(self: OpRun, *inputs: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        # The evaluator hands floats over as numpy scalars.
        plain = {name: v.item() if isinstance(v, np.generic) else v for name, v in attributes.items()}
        results = op.reference(decode_attributes(op, plain), *map(to_tensor, inputs))
        return tuple(map(to_numpy, results if isinstance(results, tuple) else (results,)))

    return type(op.name, (OpRun,), {"op_domain": DOMAIN, "_run": _run})


class GatherElements(OpRun):
    """In place of the evaluator's own, which takes no negative axis."""

    op_domain = ""

    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int = 0) -> tuple[np.ndarray]:
        return (np.take_along_axis(data, indices, axis),)


class MatMul(OpRun):
    """In place of the evaluator's own, which rounds after each term of a 16-bit product."""

    op_domain = ""

    def _run(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray]:
        wide = np.float32 if a.dtype == np.float32 else np.float64
        return (np.matmul(a.astype(wide), b.astype(wide)).astype(a.dtype),)


def input_metadata(io: NetworkIO) -> TensorMetadata:
    metadata = TensorMetadata()
    for info in io.inputs:
        metadata.add(info.name, info.dtype, [d if isinstance(d, int) else None for d in info.shape])
    return metadata


# ---------------------------------------------------------------------------------------- comparing


def make_runners(
    kind: Kind, session: TorchSession, model: Path, build: BuildConfig, communicator: Communicator
) -> tuple[list[BaseRunner], dict[str, str]]:
    """The runners that can run this network, the reference first, and why the others can't."""
    io = session.io
    runners = [SessionRunner(session, REFERENCE), PluginReferenceRunner(model, io, communicator)]
    if build.dtype == "bfloat16":
        return runners, {ONNXRUNTIME: "has no bfloat16 on a CPU; pass --numerics dequantized"}
    if communicator.size > 1:
        return runners, {ONNXRUNTIME: "has no collectives; use engines or a checkpoint for one rank"}

    def load() -> onnxruntime.InferenceSession:
        return onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])

    return [*runners, OnnxrtRunner(load, name=ONNXRUNTIME)], {}


def compare_build(
    shards: Path, build: BuildConfig, prompts: list[list[int]], models: Path, save: bool, communicator: Communicator
) -> Iterator[tuple[Kind, list[Feed], RunResults, dict[str, str]]]:
    """Run every runner of both networks over the same recorded inputs.

    Args:
        models: directory that receives the exported models, and with ``save`` inputs and outputs.
    """
    source, rank = read_shard_config(shards), communicator.rank
    build = build.checked(source.draft)
    kinds: tuple[Kind, ...] = ("draft", "target")
    networks = {kind: load_network(kind, shards, rank, build) for kind in kinds}
    sessions = {kind: TorchSession(network, communicator) for kind, network in networks.items()}
    feeds = record_feeds(sessions, source, build, communicator, prompts)
    for kind, session in sessions.items():
        stem = models / f"{kind}_rank{rank}"
        model = export_network(networks[kind], stem.with_suffix(".onnx"))
        runners, left_out = make_runners(kind, session, model.path, build, communicator)
        results = Comparator.run(runners, data_loader=feeds[kind])
        if save:
            save_json(feeds[kind], f"{stem}_inputs.json")
            RunResults(list(results)[:1]).save(f"{stem}_outputs.json")
        yield kind, feeds[kind], results, left_out


def compare(options: Options, shards: Path, builds: list[BuildConfig], communicator: Communicator) -> int:
    """Compare under every build configuration and print; returns the exit status."""
    console = Console(quiet=communicator.rank != 0, soft_wrap=True, highlight=False, color_system=None)
    source = read_shard_config(shards)
    if source.target is None:
        raise RequestError(f"{shards}: holds a draft without its target; the inputs come from a decode with both")
    text = Text(shards if (shards / "tokenizer.json").is_file() else shards.parent, source.target.bos_token_id)
    prompts = [text.encode(prompt) for prompt in read_prompts(options.prompts_file)[: options.num_prompts]]
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for build in builds:
            models = (options.save or Path(scratch)) / build.numerics.value
            title = f"{build.numerics.value} numerics, {build.dtype}, {communicator.size} rank(s)"
            runs = compare_build(shards, build, prompts, models, options.save is not None, communicator)
            for kind, feeds, results, left_out in runs:
                rows = compare_results(results, limits_of(build))
                console.print(result_table(f"{kind}: {title}, {len(feeds)} calls, against {REFERENCE}", rows))
                console.print(*(f"{name} left out: it {reason}" for name, reason in left_out.items()), sep="\n")
                failed += sum(not row.passed for row in rows)
    failed = max(communicator.all_gather_object(failed))
    console.print(f"{failed} outputs differ" if failed else "all outputs agree")
    return 1 if failed else 0


def limits_of(build: BuildConfig) -> dict[str, float]:
    return dict.fromkeys((PLUGIN_REFERENCES, ONNXRUNTIME), LIMITS[build.dtype])


def result_table(title: str, rows: Sequence[OutputResult]) -> Table:
    table = Table("runner", "output", "max abs", "max rel", "limit", "", title=title, title_justify="left")
    for row in rows:
        numbers = (f"{value:.1e}" for value in (row.max_absolute, row.max_relative, row.limit))
        table.add_row(row.runner, row.output, *numbers, "ok" if row.passed else f"FAILED: {row.problem}")
    return table


@contextmanager
def shards_of(options: Options) -> Iterator[tuple[Path, list[BuildConfig]]]:
    """A shard directory of what is to be compared, and the build configurations to compare it under."""
    if (options.checkpoint is None) == (options.engine_dir is None):
        raise RequestError("pass either --checkpoint or --engine-dir")
    slots = max(2, options.num_prompts)
    released = BuildConfig(max_batch_size=slots)
    dequantized = BuildConfig(max_batch_size=slots, numerics=Numerics.DEQUANTIZED, dtype=options.dtype)
    chosen = {"released": [released], "dequantized": [dequantized], None: [released, dequantized]}[options.numerics]
    if options.engine_dir:
        directory = EngineDir.open(options.engine_dir)
        yield directory.path / WEIGHTS, chosen if options.numerics else [directory.build]
        return
    assert options.checkpoint is not None
    with tempfile.TemporaryDirectory() as scratch:
        convert_checkpoint(options.checkpoint, Path(scratch) / "shards", tp_size=1)
        yield Path(scratch) / "shards", chosen


def main(arguments: Sequence[str] | None = None) -> int:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    G_LOGGER.module_severity = G_LOGGER.WARNING
    try:
        with shards_of(options) as (shards, builds):
            communicator = connect(read_shard_config(shards).tp_size, "python examples/compare_accuracy.py ...")
            with fail_together(communicator):
                return compare(options, shards, builds, communicator)
    except (*USER_ERRORS, RequestError, LaunchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
