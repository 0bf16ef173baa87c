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
  ONNX. It wants dequantized numerics in float32 and one rank: on a CPU, ONNX Runtime has neither bfloat16 nor
  collectives, and in float16 it rounds elsewhere, which can send a row to another expert;
* ``tensorrt``: the engines of ``--engine-dir`` on the GPUs of the ranks, in the numerics that they were built for;
  ``--backend torch`` leaves them out.

A runner that can't run is left out, with the reason.

Their inputs are those of a real decode: prompts go through target and draft, and what the sessions were
given, prefill and steps, is given to every runner. So ids are in the vocabulary, positions and slots belong
together, and features and caches are the target's.

What counts as equal is told in ``_comparison.py``, with the limits of ``LIMITS`` and, for engines,
``ENGINE_LIMITS`` in this script. In 16 bits an engine, which sums in another order, can turn a near tie: a row
goes to another expert, or gets another token and other drafts after it. Limits are not widened to hide that, or
they would hide broken kernels too: such an output is FAILED, with the number of rows beyond the limit. A tie moves
single rows, a broken kernel many.

The exit status is 1 if anything differs, nothing was compared or a rank failed, and 2 if options, prompts, directory
or number of ranks are wrong. With a checkpoint, both numerics are compared, each within itself, and their distance
from each other is printed. ``--save DIR`` keeps models, inputs and reference outputs for ``polygraphy run``.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from _common import REFUSALS, Output, Text, check_output, open_engine_dir, parse_options, read_prompts, watched
from _comparison import OutputResult, as_numpy, compare_results
from dspark_trt.builder.build_config import BuildConfig, Lowering
from dspark_trt.builder.checkpoint import ShardConfig, convert_checkpoint, rank_file_name, read_shard_config
from dspark_trt.builder.cli import USER_ERRORS
from dspark_trt.builder.config import Numerics
from dspark_trt.builder.engine_dir import WEIGHTS, EngineDir
from dspark_trt.builder.network import Kind, load_network
from dspark_trt.builder.onnx_export import export_network
from dspark_trt.plugins.markov_sampling_sharded import MAX_REQUESTS
from dspark_trt.runtime_py.boundary import FUSED_MHC_MAX_ROWS
from dspark_trt.runtime_py.communicator import Communicator, connect
from dspark_trt.runtime_py.decoder import Decoder, Execution
from dspark_trt.runtime_py.output_files import writing
from dspark_trt.runtime_py.requests import RequestError, SamplingParams
from dspark_trt.runtime_py.session import Session, TorchSession
from dspark_trt.runtime_py.watchdog import DEFAULT_TIMEOUT_S, Progress
from rich.table import Table

try:
    import onnxruntime
    from _engines import TENSORRT, Engines, open_engines
    from _runners import Feed, PluginReferenceRunner, RecordingSession, SessionRunner, to_feed, to_tensor
    from polygraphy.backend.base import BaseRunner
    from polygraphy.backend.onnxrt import OnnxrtRunner
    from polygraphy.comparator import Comparator, RunResults
    from polygraphy.json import save_json
    from polygraphy.logger import G_LOGGER
except ModuleNotFoundError as error:
    package = str(error.name).partition(".")[0]
    if __name__ != "__main__" or package not in ("onnxruntime", "polygraphy"):
        raise
    advice = "install it with: pip install '.[compare]' in the repository"
    print(f"error: the comparison needs {package}; {advice}", file=sys.stderr)
    sys.exit(2)

REFERENCE, ONNXRUNTIME = "torch", "onnxruntime"
LIMITS = {
    (Numerics.RELEASED, "bfloat16"): 1e-5,
    (Numerics.DEQUANTIZED, "float32"): 2e-5,
    (Numerics.DEQUANTIZED, "float16"): 1e-2,
    (Numerics.DEQUANTIZED, "bfloat16"): 5e-2,
}
"""Largest difference, as a share of the reference's largest magnitude: about ten times the largest that was
measured on the tiny checkpoint over 4 to 11 calls of both networks (6e-7, 2.5e-6, 1.0e-3, 5.4e-3). In released
numerics the runners share every rounding: caches and features were equal to the bit."""
ENGINE_LIMITS = {
    **LIMITS,
    # Engines sum in another order and do not share every rounding; bfloat16 rounds both numerics alike.
    (Numerics.RELEASED, "bfloat16"): LIMITS[Numerics.DEQUANTIZED, "bfloat16"],
}
"""Those of engines. On an H200, rows of TensorRT 8.6 engines were 8e-7 (float32) and 1.7e-3 (float16) of their length
from torch with the same kernels, three quarters of them nearer; single ones were off by 4e-6, and in float16 by 0.2
where an expert had changed. Engines in bfloat16 were not measured."""
CALLS = 4
"""Calls of each network that are compared, the first ones of the decode; of a prefill in parts, all parts are one."""
TOKENS = 16
"""Tokens per prompt: enough for that many calls."""
SLOWEST_BYTES_PER_SECOND = 5e6
"""Of a rank's weights, in whatever is done with them: the slowest is a call of references on a busy CPU."""
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
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Activation type of dequantized numerics. Left out: that of the engine directory, if it has them, or float32."""
    backend: Literal["auto", "torch"] = "auto"
    """torch leaves the engines of the directory out, auto runs them where they run on every rank."""
    networks: tuple[Kind, ...] = ("draft", "target")
    """What to compare."""
    prompts_file: Annotated[Path, tyro.conf.arg(help_behavior_hint="(default: examples/prompts.txt)")] = PROMPTS
    """One text a line, whose decode gives the inputs."""
    num_prompts: int = 3
    """Leading prompts of that file to take."""
    save: Path | None = None
    """Directory to keep NUMERICS/NETWORK_rankN.onnx in, with _inputs.json and _outputs.json beside it."""
    timeout: float = DEFAULT_TIMEOUT_S
    """Seconds after which a part of the work (which has more, by the size of the weights) is taken for stuck; the job
    ends then."""

    def problems(self) -> list[str]:
        """What can't be compared, a sentence each."""
        problems = []
        if (self.checkpoint is None) == (self.engine_dir is None):
            given = "both" if self.checkpoint else "neither"
            problems.append(f"{given} of --checkpoint and --engine-dir was given, expected one; pass either")
        if self.num_prompts < 1:
            problems.append(f"--num-prompts is {self.num_prompts}, expected at least 1; pass more")
        if self.checkpoint and self.num_prompts > MAX_REQUESTS:
            problems.append(
                f"--num-prompts is {self.num_prompts}, expected at most {MAX_REQUESTS}, which are decoded at once; "
                "pass fewer"
            )
        if self.numerics == "released":
            problems += self.dtype_problems("released numerics")
        return problems

    def dtype_problems(self, what: str) -> list[str]:
        """Why ``what``, which is in released numerics, does not take the ``--dtype``."""
        if self.dtype in (None, "bfloat16"):
            return []
        return [
            f"{what} are bfloat16, --dtype is {self.dtype}; add --numerics dequantized (in place of released), or "
            "leave --dtype out"
        ]


def record_feeds(
    sessions: Mapping[Kind, Session],
    source: ShardConfig,
    build: BuildConfig,
    communicator: Communicator,
    prompts: list[list[int]],
) -> dict[Kind, list[Feed]]:
    """The inputs of the first calls of each network while ``prompts`` are decoded."""
    assert source.target is not None
    # Engines of several ranks take no more rows, so nobody is given more.
    most = min(build.max_input_len, FUSED_MHC_MAX_ROWS if communicator.size > 1 else build.max_input_len)
    prefills = -(-sum(map(len, prompts[: build.max_batch_size])) // most)
    recording = {kind: RecordingSession(session, CALLS - 1 + prefills) for kind, session in sessions.items()}
    decoder = Decoder(
        recording["target"],
        recording["draft"],
        target_config=source.target,
        draft_config=source.draft,
        build=build,
        communicator=communicator,
        execution=Execution(max_rows=most),
    )
    decoder.generate(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    return {kind: session.feeds for kind, session in recording.items()}


def make_runners(
    session: TorchSession,
    kind: Kind,
    model: Path,
    build: BuildConfig,
    communicator: Communicator,
    engines: Engines | str | None,
) -> tuple[list[BaseRunner], dict[str, str]]:
    """The runners that can run this network, the reference first, and why the others can't."""
    runners = [SessionRunner(session, REFERENCE), PluginReferenceRunner(model, session.io, communicator)]
    left_out = {}

    def load() -> onnxruntime.InferenceSession:
        return onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])

    if build.dtype != "float32":
        left_out[ONNXRUNTIME] = f"it does not compute {build.dtype} as torch does, only float32"
    elif communicator.size > 1:
        left_out[ONNXRUNTIME] = "it has no collectives; it takes engines for one rank, or a checkpoint"
    else:
        runners.append(OnnxrtRunner(load, name=ONNXRUNTIME))
    if isinstance(engines, Engines):
        runners.append(engines.runner(kind))
    elif engines:
        left_out[TENSORRT] = engines
    return runners, left_out


@dataclass(frozen=True)
class Run:
    """What the runners of one network made of the same inputs."""

    kind: Kind
    reference: BaseRunner
    feeds: list[Feed]
    results: RunResults
    left_out: dict[str, str]


def run_build(
    options: Options,
    shards: Path,
    build: BuildConfig,
    prompts: list[list[int]],
    models: Path,
    communicator: Communicator,
    progress: Progress,
) -> Iterator[Run]:
    """Run every runner of each network over the same recorded inputs.

    Args:
        models: directory that receives the exported models, and with ``--save`` inputs and reference outputs.
    """
    source, rank = read_shard_config(shards), communicator.rank
    build = build.checked(source.draft)
    kinds: tuple[Kind, ...] = ("draft", "target")
    pass_s = (shards / rank_file_name(rank)).stat().st_size / SLOWEST_BYTES_PER_SECOND

    def operation(name: str, passes: int = 1) -> AbstractContextManager[None]:
        """What goes over the weights so many times."""
        return progress.operation(name, extra_s=passes * pass_s)

    with operation("loading of the weights", len(kinds)):
        # One file has both networks, and is checked once.
        networks = {kind: load_network(kind, shards, rank, build, check_bytes=kind == kinds[0]) for kind in kinds}
    sessions = {kind: TorchSession(network, communicator) for kind, network in networks.items()}
    # Every token may take a step, and prompts that find no slot come one after the other.
    with operation("decode that the inputs are of", 2 * TOKENS * len(prompts)):
        feeds = record_feeds(sessions, source, build, communicator, prompts)
    directory = EngineDir.open(options.engine_dir) if options.engine_dir else None
    opened = open_engines(directory, build, communicator, options.backend) if directory else nullcontext()
    with operation("opening and running of the engines", 0), opened as engines:
        for kind in dict.fromkeys(options.networks):
            stem = models / f"{kind}_rank{rank}"
            with operation(f"export of the {kind}"):
                model = export_network(networks[kind], stem.with_suffix(".onnx"))
            with operation(f"preparation of the runners of the {kind}", 2):
                runners, left_out = make_runners(sessions[kind], kind, model.path, build, communicator, engines)
            results = RunResults()
            for runner in runners:
                with operation(f"{runner.name} of the {kind}", 1 + len(feeds[kind])):
                    results.extend(Comparator.run([runner], data_loader=feeds[kind]))
            with operation(f"saving and comparison of the {kind}", 2 + len(feeds[kind])):
                if options.save:
                    with writing(Path(f"{stem}_inputs.json")):
                        save_json(feeds[kind], f"{stem}_inputs.json")
                    with writing(Path(f"{stem}_outputs.json")):
                        RunResults(list(results)[:1]).save(f"{stem}_outputs.json")
                yield Run(kind, runners[0], feeds[kind], results, left_out)


def compare(
    options: Options, shards: Path, builds: list[BuildConfig], communicator: Communicator, progress: Progress
) -> int:
    """Compare under every build configuration and print; returns the exit status."""
    console = Output(communicator.rank, soft_wrap=True)
    source = read_shard_config(shards)
    if source.target is None:
        raise RequestError(f"{shards}: holds a draft without its target; the inputs come from a decode with both")
    text = Text(shards if (shards / "tokenizer.json").is_file() else shards.parent, source.target.bos_token_id)
    prompts = [text.encode(prompt) for prompt in read_prompts(options.prompts_file)[: options.num_prompts]]
    compared, failed, first = 0, 0, dict[Kind, Run]()
    with tempfile.TemporaryDirectory() as scratch:
        for build in builds:
            models = (options.save or Path(scratch)) / build.numerics.value
            title = f"{build.numerics.value} numerics, {build.dtype}, {communicator.size} rank(s)"
            for run in run_build(options, shards, build, prompts, models, communicator, progress):
                limits = dict.fromkeys((name for name, _ in run.results), LIMITS[build.numerics, build.dtype])
                limits[TENSORRT] = ENGINE_LIMITS[build.numerics, build.dtype]
                rows = compare_results(run.results, limits)
                compared, failed = compared + len(rows), failed + sum(not row.passed for row in rows)
                console.print(result_table(f"{run.kind}: {title}, {len(run.feeds)} calls, against {REFERENCE}", rows))
                for name, reason in run.left_out.items():
                    console.print(f"{name} left out: {reason}")
                if (other := first.setdefault(run.kind, run)) is not run:
                    console.print(distance_table(other, run, f"{run.kind}: from released to {build.dtype}, not judged"))
    status, said = verdict(communicator.all_gather_object((compared, failed)))
    console.print(said)
    return status


def verdict(counts: Sequence[tuple[int, int]]) -> tuple[int, str]:
    """The exit status, and what is said, of how many outputs each rank compared and how many of them differed."""
    if failed := max(failed for _, failed in counts):
        return 1, f"{failed} outputs differ"
    if idle := [rank for rank, (compared, _) in enumerate(counts) if not compared]:
        return 1, f"no output was compared on rank {', '.join(map(str, idle))}, so nothing is known to agree"
    return 0, "all outputs agree"


def distance_table(first: Run, second: Run, title: str) -> Table:
    """How far the reference of ``second`` is from that of ``first`` on the inputs of ``first``."""
    table = Table("output", "distance", title=title, title_justify="left")
    dtypes = {name: to_tensor(value).dtype for name, value in second.feeds[0].items()}
    _, iterations = next(iter(first.results))
    shares: dict[str, list[float]] = {}
    with second.reference as runner:
        for feed, wanted in zip(first.feeds, iterations, strict=True):
            cast = OrderedDict((name, to_feed(to_tensor(v).to(dtypes[name]))) for name, v in feed.items())
            for name, value in runner.infer(cast).items():
                (dtype, ours), (_, theirs) = as_numpy(value), as_numpy(wanted[name])
                if "float" in dtype:
                    share = np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(theirs**2))
                else:
                    share = np.mean(ours != theirs)
                shares.setdefault(f"{name} ({'rms' if 'float' in dtype else 'unequal'})", []).append(float(share))
    for name, values in shares.items():
        table.add_row(name, f"{max(values):.1%}")
    return table


def result_table(title: str, rows: Sequence[OutputResult]) -> Table:
    table = Table("runner", "output", "max abs", "max rel", "limit", "", title=title, title_justify="left")
    for row in rows:
        numbers = (f"{value:.1e}" for value in (row.max_absolute, row.max_relative, row.limit))
        table.add_row(row.runner, row.output, *numbers, "ok" if row.passed else f"FAILED: {row.problem}")
    return table


@contextmanager
def shards_of(options: Options) -> Iterator[tuple[Path, list[BuildConfig]]]:
    """A shard directory of what is to be compared, and the build configurations to compare it under."""
    if options.engine_dir:
        directory = open_engine_dir(options.engine_dir)
        yield directory.path / WEIGHTS, [build_asked_for(options, directory.build)]
        return
    assert options.checkpoint is not None
    slots = max(2, options.num_prompts)
    released = BuildConfig(max_batch_size=slots)
    dequantized = BuildConfig(max_batch_size=slots, numerics=Numerics.DEQUANTIZED, dtype=options.dtype or "float32")
    chosen = {"released": [released], "dequantized": [dequantized], None: [released, dequantized]}[options.numerics]
    with tempfile.TemporaryDirectory() as scratch:
        convert_checkpoint(options.checkpoint, Path(scratch) / "shards", tp_size=1)
        yield Path(scratch) / "shards", chosen


def build_asked_for(options: Options, built: BuildConfig) -> BuildConfig:
    """How an engine directory was built, with the numerics that the options name in place of its own."""
    numerics = Numerics(options.numerics or built.numerics)
    if numerics is Numerics.RELEASED and (problems := options.dtype_problems("the released numerics of the engines")):
        raise RequestError(problems[0])
    dtype = options.dtype or (built.dtype if numerics is built.numerics else "float32")
    dtype = dtype if numerics is Numerics.DEQUANTIZED else "bfloat16"
    # Lowering is a matter of engines; not every one has all numerics.
    return dataclasses.replace(built, numerics=numerics, dtype=dtype, lowering=Lowering.PLUGIN)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(Options, arguments, __doc__)
    G_LOGGER.module_severity = G_LOGGER.WARNING
    try:
        if problems := options.problems():
            raise RequestError("; ".join(problems))
        if options.save:
            check_output(options.save, "--save", directory=True)
        with shards_of(options) as (shards, builds):
            communicator = connect(read_shard_config(shards).tp_size, "python examples/compare_accuracy.py ...")
            with watched(communicator, timeout_s=options.timeout, debug=False) as progress:
                return compare(options, shards, builds, communicator, progress)
    except (*USER_ERRORS, *REFUSALS) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    raise AssertionError("watched() ends the job")


if __name__ == "__main__":
    sys.exit(main())
