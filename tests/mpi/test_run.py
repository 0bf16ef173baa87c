"""examples/run.py as a job: text on one and two ranks, wrong launches, requests that are refused."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dspark_trt.runtime_py import verification
from dspark_trt.runtime_py.communicator import SingleProcess
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.host_step import LockstepError
from dspark_trt.runtime_py.requests import Completion, FinishReason
from dspark_trt.runtime_py.verification import Verdict

from tests.example_scripts import EXAMPLES, load_example
from tests.mpi_jobs import error_lines, run_example, run_job

Engines = Callable[[int], Path]
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

PROMPTS = (
    "It was",
    "She had been so much",
    # Longer than the window: its prefill takes two calls.
    "The family of Dashwood had long been settled in Sussex. Their estate was large, and their residence was at "
    "Norland Park, in the centre of their property, where,",
)
"""One more than the engines have cache slots."""


def write_prompts(path: Path, *prompts: str) -> Path:
    path.write_text("\n".join(prompts) + "\n")
    return path


# ----------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("tp_size", [1, 2])
def test_speculative_text_is_the_targets(engines: Engines, tp_size: int, tmp_path: Path) -> None:
    """Several prompts of different lengths, more than there are slots; every rank decides alike."""
    prompts = write_prompts(tmp_path / "prompts.txt", *PROMPTS)
    job = run_example(
        tp_size,
        engines(tp_size),
        *("--prompts-file", prompts, "--max-output-len", "24", "--compare-target-only", "--check-lockstep"),
        *("--stats-json", tmp_path / "out" / "stats.json", "--plot", tmp_path / "out" / "accepted.png"),
    )
    assert job.status == 0, job.err
    assert job.out.count("executor: torch session on the CPU (") == 1, "one rank speaks"
    assert "token ids are identical to target-only decoding" in job.out
    stats = json.loads((tmp_path / "out" / "stats.json").read_text())
    assert (stats["world_size"], stats["identical_to_target_only"]) == (tp_size, True)
    proposed, accepted = stats["proposed_per_position"], stats["accepted_per_position"]
    assert proposed == [stats["steps"]] * 5
    assert accepted == sorted(accepted, reverse=True), "a draft is accepted only after accepted ones"
    assert stats["tokens"] == 23 * len(PROMPTS)
    # Trained drafts: held-out text gives 3 to 4; without drafts it would be 1.
    assert stats["tokens_per_step"] == stats["tokens"] / stats["steps"] > 2
    assert [c["prompt_tokens"] for c in stats["completions"]] == [len(p) + 1 for p in PROMPTS], "BOS and bytes"
    assert all(len(c["token_ids"]) == 24 for c in stats["completions"])
    assert (tmp_path / "out" / "accepted.png").read_bytes().startswith(b"\x89PNG")


def test_a_launcher_changes_nothing_for_one_rank(engines: Engines, tmp_path: Path) -> None:
    outputs = []
    for ranks in (None, 1):
        stats = tmp_path / f"{ranks}.json"
        job = run_example(
            ranks, engines(1), "--prompt", *PROMPTS[:2], "--max-output-len", "16", "--stats-json", stats, "--stream"
        )
        assert job.status == 0, job.err
        assert len(re.findall(r"^[01]: '", job.out, re.MULTILINE)) >= 4, "a line per step and prompt"
        outputs.append(json.loads(stats.read_text()))
    assert outputs[0]["completions"] == outputs[1]["completions"]
    assert outputs[0]["identical_to_target_only"] is None


def test_sampling_and_scheduling_on_two_ranks(engines: Engines, tmp_path: Path) -> None:
    """Sampled text by block verification, as many drafts as pay for themselves; both ranks go by rank 0's costs,
    which are shown once."""
    job = run_example(
        2,
        engines(2),
        *("--prompt", *PROMPTS[:2], "--max-output-len", "12", "--check-lockstep", "--temperature", "0.8"),
        *("--top-p", "0.95", "--seed", "5", "--rejection-sample-method", "block", "--stop", "never said"),
        *("--scheduler", "early-stop", "--profile-costs", "--confidence-temperatures", *"11111"),
        *("--stats-json", tmp_path / "stats.json"),
    )
    assert job.status == 0, job.err
    assert job.out.count("costs, ms") == 1
    assert job.out.count("drafts are greedy, built without --sampling") == 1
    report = json.loads((tmp_path / "stats.json").read_text())
    assert max(map(int, report["costs"]["draft_seconds"])) == 2
    assert max(map(int, report["costs"]["verify_seconds"])) == 12
    assert report["sampling"]["top_p"] == 0.95 and report["sampling"]["stop"] == ["never said"]
    assert report["verification"]["rejection_sample_method"] == "block"
    assert report["tokens_per_step"] > 1


def test_where_the_time_goes(engines: Engines, tmp_path: Path) -> None:
    """--profile and --trace: phases of a step, and one timeline in which both ranks do the same."""
    trace = tmp_path / "deep" / "trace.json.gz"
    job = run_example(2, engines(2), "--prompt", PROMPTS[0], "--max-output-len", "8", "--profile", "--trace", trace)
    assert job.status == 0, job.err
    phases = re.findall(r"│ (target|verify|draft|host gap) +│ ([0-9.-]+) +│ (-?[0-9]+)% +│", job.out)
    assert [name for name, _, _ in phases] == ["target", "verify", "draft", "host gap"]
    assert all(float(ms) > 0 for _, ms, _ in phases[:3])
    assert 95 <= sum(int(share) for _, _, share in phases) <= 105
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    spans = [event for event in events if event["name"] in ("target", "verify", "draft") and event["ph"] == "X"]
    by_rank = {pid: [e["name"] for e in spans if e["pid"] == pid] for pid in {e["pid"] for e in spans}}
    assert len(by_rank) == 2
    first, second = by_rank.values()
    assert first == second
    assert {"target", "verify", "draft"} == set(first)


def test_without_drafts(engines: Engines, tmp_path: Path) -> None:
    """Target-only decoding makes a token per step and has nothing to accept."""
    job = run_example(
        None,
        engines(1),
        *("--prompt", PROMPTS[0], "--max-output-len", "8", "--no-speculative", "--stream", "--run-profiling"),
        *("--stats-json", tmp_path / "stats.json"),
    )
    assert job.status == 0, job.err
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert (stats["tokens_per_step"], stats["accepted_per_position"], stats["draft_calls"]) == (1.0, [], 0)
    assert (stats["decode_calls"], stats["target_calls"]) == (7, 8), "the first token is the prefill's"
    assert len(stats["profiling"]) == 3
    assert "accepted drafts by position" not in job.out


OF_ANOTHER_JOB = """
import os, sys
from run import main
directory = sys.argv[1 + int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])]
sys.exit(main(["--engine-dir", directory, "--prompt", "It was"]))
"""


def test_ranks_with_other_engines_are_refused_together(engines: Engines, tmp_path: Path) -> None:
    """A stale directory on one node: a rank that ended alone would leave the others waiting for it."""
    (tmp_path / "job.py").write_text(OF_ANOTHER_JOB)
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("tiny", ".*"))
    job = run_job(2, tmp_path / "job.py", engines(2), engines(1), timeout=60)
    assert job.status == 2
    lines = error_lines(job.err)
    assert len(lines) == 2, job.err
    assert all(
        "those of rank 0 were built for 2, those of rank 1 were built for 1; give every" in line for line in lines
    )


STOPPING = """
import json, sys
from dspark_trt.builder.engine_dir import EngineDir
from dspark_trt.runtime_py.communicator import connect, fail_together
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.host_step import LockstepError
from dspark_trt.runtime_py.requests import SamplingParams

communicator = connect(2)
with fail_together(communicator):
    prompts = [[256, *text.encode()] for text in ("It was", "She had been so much", "He could not")]
    params = SamplingParams(max_tokens=64, stop_token_ids=[ord("s")])
    report = {}
    for speculative in (True, False):
        decoder = Decoder.from_dir(sys.argv[1], communicator=communicator, speculative=speculative, check_lockstep=True)
        completions, stats = decoder.generate(prompts, params)
        report[str(speculative)] = {
            "ids": [c.token_ids for c in completions],
            "reasons": [c.finish_reason.value for c in completions],
            "dropped": sum(stats.accepted_per_position) + stats.steps - stats.tokens,
        }
    everyone = communicator.all_gather_object(report)
    if communicator.rank == 0:
        print(json.dumps(everyone))
"""


def test_a_stop_token_inside_accepted_drafts(engines: Engines, tmp_path: Path) -> None:
    """What an accepted prefix holds after a stop token is dropped, on both ranks."""
    script = tmp_path / "stopping.py"
    script.write_text(STOPPING)
    job = run_job(2, script, engines(2))
    assert job.status == 0, job.err
    first, second = json.loads(job.out.splitlines()[-1])
    assert first == second
    speculative, plain = first["True"], first["False"]
    assert speculative["ids"] == plain["ids"]
    assert speculative["reasons"] == plain["reasons"] == ["stop"] * 3
    assert all(ord("s") not in ids for ids in speculative["ids"])
    # The stop token itself is dropped in either case; more is dropped only from inside a prefix.
    assert plain["dropped"] == 3 < speculative["dropped"]


# -------------------------------------------------------------------------------- what must not pass


def accept_everything(draft_tokens: Any, target_logits: Any) -> Verdict:
    count = draft_tokens.shape[1]
    return Verdict([count] * len(draft_tokens), target_logits[:, count].argmax(-1).tolist())


def test_text_that_is_not_the_targets_is_reported(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A verification that accepts every draft: exit status 1, with the prompt and the first position."""
    monkeypatch.setattr(verification, "verify_greedy", accept_everything)
    arguments = ["--engine-dir", str(engines(1)), "--prompt", *PROMPTS[:2], "--max-output-len", "24"]
    assert load_example("run").main([*arguments, "--compare-target-only"]) == 1
    assert re.search(
        r"prompt [01] differs from target-only decoding at output position \d+: token \d+ \('.+'\) with drafts, "
        r"token \d+ \('.+'\) without",
        capsys.readouterr().out,
    )


def test_where_completions_part(engines: Engines) -> None:
    """A shorter output, and one that ended for another reason, are differences too."""
    run = load_example("run")
    text = load_example("_common").Text(engines(1), 256)
    long, short = Completion([1], [65, 66], FinishReason.LENGTH), Completion([1], [65], FinishReason.LENGTH)
    stopped = Completion([1], [65], FinishReason.STOP)
    assert run.first_difference([long], [long], text) is None
    assert "prompt 1 differs from target-only decoding at output position 1: token 66 ('B') with drafts, the end" in (
        run.first_difference([long, long], [long, short], text)
    )
    assert run.first_difference([stopped], [short], text) == "prompt 0 finished by stop, without drafts length"


def test_ranks_with_different_tokens() -> None:
    class Disagreeing(SingleProcess):
        def all_gather_object(self, value: Any) -> list[Any]:
            return [value, [[*value[0][:-1], 7]]]

    with pytest.raises(LockstepError, match="rank 1 produced other tokens than rank 0"):
        load_example("run").check_ranks([Completion([1], [2, 3], FinishReason.LENGTH)], Disagreeing())


@pytest.mark.parametrize(
    ("tp_size", "ranks", "message"),
    [
        (2, None, r"error: the engines were built for 2 ranks .*without an MPI launcher\. .*mpirun -n 2 python"),
        (2, 1, r"error: rank 0: the engines were built for 2 ranks, this job has 1\. .*mpirun -n 2 python"),
        (2, 3, r"error: rank \d: the engines were built for 2 ranks, this job has 3\. .*mpirun -n 2 python"),
        (1, 2, r"error: rank \d: the engines were built for 1 ranks, this job has 2\. .*mpirun -n 1 python"),
    ],
)
def test_the_wrong_number_of_ranks(engines: Engines, tp_size: int, ranks: int | None, message: str) -> None:
    """TP-10: what the engines want, what was found, and the command to use."""
    job = run_example(ranks, engines(tp_size), "--prompt", "It")
    assert job.status == 2
    lines = error_lines(job.err)
    assert lines and all(re.match(message, line) for line in lines), job.err
    assert "Traceback" not in job.err


def test_damaged_weights_are_refused(engines: Engines, tmp_path: Path) -> None:
    """By the rank whose file it is, and not decoded with: the size is right, the bytes are not."""
    copy = tmp_path / "engines"
    shutil.copytree(engines(2), copy)
    file = copy / "weights" / "rank1.safetensors"
    content = file.read_bytes()
    file.unlink()  # it may be a link to the shards
    file.write_bytes(content[:-4096] + bytes(4096))
    job = run_example(2, copy, "--prompt", "It")
    assert job.status == 2
    said = (
        r"rank 1: DamagedWeightsError: .*weights: damaged weights: rank1\.safetensors has sha256 .*; copy it again, or"
    )
    assert [line for line in error_lines(job.err) if re.match(said, line)], job.err


@pytest.mark.parametrize("name", ["target/rank1.engine", "weights/rank1.safetensors", "config.json"])
def test_a_missing_rank_file(engines: Engines, tmp_path: Path, name: str) -> None:
    """TP-10: a file of one rank was not copied."""
    copy = tmp_path / "engines"
    shutil.copytree(engines(2), copy)
    (copy / name).unlink()
    job = run_example(2, copy, "--prompt", "It")
    assert job.status == 2
    assert any(name in line and line.startswith("error: ") for line in error_lines(job.err)), job.err
    assert "Traceback" not in job.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x" * 320], r"prompt 0 needs \d+ positions .* built for --max-seq-len 320"),
        (["--prompt", "It", "--max-output-len", "0"], "max_tokens is 0, expected at least 1"),
        (["--prompt", "It", "--prompts-file", "x.txt"], "--prompt and --prompts-file were both given"),
        (["--prompts-file", "absent.txt"], "absent.txt: No such file or directory"),
        (["--prompt", "It", "--backend", "tensorrt"], "--backend tensorrt: .*Leave the option out"),
        (["--stop", ""], r"stop is \[''\], expected a list of strings that are not empty"),
        (
            ["--top-k", "3", "--max-output-len", "0"],
            "max_tokens is 0, expected .*; temperature is 0, which is greedy: top_k",
        ),
        (["--prompt", "It", "--timeout", "0"], r"--timeout is 0\.0, expected a number of seconds above 0"),
        (["--profile-costs", "--num-draft-tokens", "6"], "--profile-costs measures .*; --num-draft-tokens is 6, the"),
        (["--scheduler", "threshold", "--confidence-threshold", "2"], "a confidence threshold of 2.0, expected a"),
        (["--prompt", "It", "--trace", "/dev/null/trace.json"], "--trace /dev/null/trace.json: /dev/null is not a"),
        (["--prompt", "It", "--plot", "x.foo"], r"--plot x\.foo: ends in none of .*\.png"),
        (["--prompt", "It", "--stats-json", "."], r"--stats-json \.: is a directory, expected the name of a file"),
        (["--prompt", os.fsdecode(b"\xff")], r"prompt '\\udcff': character 0 is U\+DCFF, which is no text"),
    ],
)
def test_requests_that_cannot_be_served(engines: Engines, arguments: list[str], message: str) -> None:
    """One line with the rank, no traceback, and both ranks end, with the status of a refusal."""
    job = run_example(2, engines(2), *arguments)
    assert job.status == 2
    lines = error_lines(job.err)
    assert lines and all(re.match(rf"rank [01]: \w+: {message}", line) for line in lines), job.err
    assert len(lines) == len(set(lines)), "once per rank"
    assert "Traceback" not in job.err and "summary" not in job.out


def test_decoders_follow_each_other(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has one group of ranks for NCCL, which the decoder that is open holds; profiling is of the first."""
    events: list[str] = []
    from_dir, generate, close = Decoder.from_dir, Decoder.generate, Decoder.close

    def noted_from_dir(*arguments: Any, speculative: bool, **options: Any) -> Decoder:
        decoder = from_dir(*arguments, speculative=speculative, **options)
        events.append(f"open {speculative}")
        return decoder

    def noted_generate(self: Decoder, *arguments: Any) -> Any:
        events.append("generate")
        return generate(self, *arguments)

    def noted_close(self: Decoder) -> None:
        events.append("close")
        close(self)

    monkeypatch.setattr(Decoder, "from_dir", noted_from_dir)
    monkeypatch.setattr(Decoder, "generate", noted_generate)
    monkeypatch.setattr(Decoder, "close", noted_close)
    options = ["--prompt", PROMPTS[0], "--max-output-len", "4", "--run-profiling", "--compare-target-only"]
    assert load_example("run").main(["--engine-dir", str(engines(1)), *options]) == 0
    assert events == ["open True", *["generate"] * 4, "close", "open False", "generate", "close"]


def test_a_plot_of_no_drafts(engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        load_example("run").main(
            ["--engine-dir", str(engines(1)), "--no-speculative", "--plot", str(tmp_path / "x.png")]
        )
    assert "--no-speculative makes no drafts, which --plot asks for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arguments"), [("run", ["--plot", "x.png"]), ("measure_acceptance", ["--output", "out"])]
)
def test_a_plot_without_matplotlib(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    arguments: list[str],
) -> None:
    """Before anything is loaded."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"^2$"):
        load_example(name).main(["--engine-dir", str(engines(1)), *arguments])
    printed = capsys.readouterr()
    assert "RequestError: the plot needs matplotlib" in printed.err and "executor" not in printed.out


def test_an_empty_prompts_file(engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write_prompts(tmp_path / "prompts.txt", "", "  ")
    with pytest.raises(SystemExit, match=r"^2$"):
        load_example("run").main(["--engine-dir", str(engines(1)), "--prompts-file", str(prompts)])
    assert "no prompt in it; expected one per line" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["weights/rank0.safetensors", "config.json", "weights/config.json", "tokenizer.json"])
def test_a_damaged_file(engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Of its size, so that nothing seems to be missing: found before anything is loaded, and named in one line."""
    copy = tmp_path / "engines"
    shutil.copytree(engines(1), copy)
    (copy / name).write_bytes(b"\xff" * (copy / name).stat().st_size)
    assert status_of_run(copy) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line and line.startswith(("error: ", "rank 0: RequestError: "))


def status_of_run(engine_dir: Path, *arguments: str) -> Any:
    try:
        return load_example("run").main(["--engine-dir", str(engine_dir), *(arguments or ("--prompt", "It"))])
    except SystemExit as ended:  # as the job's end is that of its only process
        return ended.code


def test_an_engine_directory_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    assert status_of_run(tmp_path / "file") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "expected a directory that dspark-build wrote" in line


@pytest.mark.parametrize("name", ["config.json", "rank0.safetensors"])
def test_an_engine_directory_that_cannot_be_read(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """As the operating system says; the superuser may read everything."""
    read = Path.open

    def denied(path: Path, *rest: Any, **more: Any) -> Any:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *rest, **more)

    directory = engines(1)
    monkeypatch.setattr(Path, "open", denied)
    monkeypatch.setattr(Path, "read_text", lambda path, **more: denied(path, **more).read())
    assert status_of_run(directory) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and name in line and "Permission denied" in line


def test_prompts_that_are_not_utf8(engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_bytes(b"It was\nSie h\xe4tte\n")
    assert status_of_run(engines(1), "--prompts-file", str(tmp_path / "prompts.txt")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rank 0: RequestError: {tmp_path}/prompts.txt: byte 12 is 0xe4, which is not UTF-8; pass")


def test_engines_without_a_tokenizer(engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "engines"
    shutil.copytree(engines(1), copy)
    header = json.loads((copy / "config.json").read_text())
    del header["files"]["tokenizer.json"]
    (copy / "config.json").write_text(json.dumps(header))
    (copy / "tokenizer.json").unlink()
    with pytest.raises(SystemExit, match=r"^2$"):
        load_example("run").main(["--engine-dir", str(copy), "--prompt", "It"])
    assert "RequestError" in (printed := capsys.readouterr().err)
    assert "tokenizer.json: not found" in printed
