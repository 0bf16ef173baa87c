"""dspark-convert, dspark-build and dspark-inspect, called as functions with their arguments."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dspark_trt.builder import cli, network, onnx_export
from dspark_trt.builder.checkpoint import index, loading
from dspark_trt.builder.config import ConfigError
from dspark_trt.builder.engine_dir import EngineDir, EngineDirError
from dspark_trt.builder.tables import readable_size
from dspark_trt.plugins import tensorrt_api

from tests.one_op_models import stand_in_export
from tests.placeholder_engines import make_engines
from tests.released import tiny_config, write_checkpoint


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "released"
    write_checkpoint(path, tiny_config("v4.1"))
    return path


@pytest.fixture(scope="module")
def shards(released: Path) -> Path:
    output = released.parent / "shards"
    assert cli.convert(["--checkpoint", str(released), "--output", str(output)]) == 0
    return output


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables with one line per row, whatever terminal runs the tests."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(found := tensorrt_api.probe("tensorrt_rtx"), str):
        pytest.skip(f"TensorRT-RTX is not installed ({found})")
    monkeypatch.setattr(network, "load_network", lambda *source, **options: source)
    monkeypatch.setattr(onnx_export, "export_network", stand_in_export)


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_convert_prints_its_plan_and_the_next_step(
    released: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "shards"
    assert cli.convert(["--checkpoint", str(released), "--output", str(output), "--tp-size", "2"]) == 0
    printed = one_line(capsys.readouterr().out)
    assert (output / "rank1.safetensors").is_file()
    assert "written │ 2 x " in printed and "peak memory" in printed
    assert f"next: dspark-build --checkpoint {output}" in printed


def test_a_dry_conversion_writes_nothing(released: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "shards"
    assert cli.convert(["--checkpoint", str(released), "--output", str(output), "--dry-run"]) == 0
    assert not output.exists()
    assert "time │ " in one_line(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp-size", "3"], "tensor parallel size 3 is not possible"),
        (["--checkpoint", "/nowhere"], "/nowhere: not a directory"),
    ],
)
def test_an_error_is_one_message_and_status_2(
    released: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    common = ["--checkpoint", str(released), "--output", str(tmp_path / "o")]
    assert cli.convert([*common, *arguments]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {message}") or message in errors
    assert "Traceback" not in errors


def test_the_traceback_is_there_at_log_level_debug(released: Path, tmp_path: Path) -> None:
    common = ["--checkpoint", str(released), "--output", str(tmp_path / "o"), "--tp-size", "3"]
    with pytest.raises(ConfigError):
        cli.convert([*common, "--log-level", "debug"])


def test_a_programming_error_keeps_its_traceback(released: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "plan_conversion", broken)
    with pytest.raises(ZeroDivisionError):
        cli.convert(["--checkpoint", str(released), "--output", "o"])


@pytest.mark.usefixtures("exporter")
def test_build_writes_engines_and_the_next_step(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "engines"
    arguments = ["--checkpoint", str(shards), "--output", str(output), "--compute-capabilities", "8.9"]
    assert cli.build([*arguments, "--max-batch-size", "3"]) == 0
    printed = one_line(capsys.readouterr().out)
    assert f"next: mpirun -n 1 python examples/run.py --engine-dir {output}" in printed
    header = json.loads((output / "config.json").read_text())
    assert header["build"]["max_batch_size"] == 3 and header["compute_capabilities"] == ["8.9"]
    assert cli.inspect([str(output)]) == 0
    printed = one_line(capsys.readouterr().out)
    for part in (
        "TensorRT │ tensorrt_rtx 1.",
        "GPUs │ 8.9",
        "HcCollapse 1",
        "max_batch_size │ 3",
        "draft/rank0.engine",
    ):
        assert part in printed
    assert "anchor_ids │ int32 │ 1 to 3 │ 1 to 3" in printed


@pytest.mark.usefixtures("exporter")
def test_headers_are_read_once(released: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a released checkpoint are many and large; what is printed and what is done come of one reading."""
    read: list[Path] = []

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(path: Path, *rest: Any, **options: Any) -> Any:
            read.append(path)
            return function(path, *rest, **options)

        return counted

    monkeypatch.setattr(index, "read_header", counting(index.read_header))
    assert cli.convert(["--checkpoint", str(released), "--output", str(tmp_path / "shards")]) == 0
    assert sorted(read) == sorted({*read}) == sorted(released.glob("*.safetensors"))
    monkeypatch.setattr(loading, "read_dir_header", counting(loading.read_dir_header))
    assert cli.build(["--checkpoint", str(shards), "--output", str(tmp_path / "o"), "--product", "tensorrt_rtx"]) == 0
    assert read.count(shards) == 1


def test_a_released_checkpoint_becomes_an_engine(
    released: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The three commands in a row, with the real draft and plugin nodes; nothing but TensorRT-RTX is needed."""
    if isinstance(found := tensorrt_api.probe("tensorrt_rtx"), str):
        pytest.skip(f"TensorRT-RTX is not installed ({found})")
    ranks, engines = str(tmp_path / "shards"), str(tmp_path / "engines")
    assert cli.convert(["--checkpoint", str(released), "--output", ranks, "--draft-only"]) == 0
    assert cli.build(["--checkpoint", ranks, "--output", engines, "--product", "tensorrt_rtx"]) == 0
    assert cli.inspect([engines]) == 0
    printed = one_line(capsys.readouterr().out)
    for name in ("MhcCoefficients 1", "MhcAllReduce 1", "HcCollapse 1", "MarkovSampling 1", "DraftAttention 1"):
        assert name in printed
    assert "target/rank0.engine" not in printed


def test_a_dry_build_prints_shapes_sizes_and_memory(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NVIDIA/TensorRT-LLM#102, #743: memory blow-ups that were not announced."""
    output = tmp_path / "engines"
    assert cli.build(["--checkpoint", str(shards), "--output", str(output), "--dry-run"]) == 0
    printed = one_line(capsys.readouterr().out)
    assert not output.exists()
    for part in ("lowering │ plugin, released numerics, bfloat16", "draft engine │ about ", "peak memory │ about "):
        assert part in printed
    assert "target_features │ bfloat16 │ 6 to 48, 768 │ 1 to 256, 768" in printed
    assert "kv_ring_2 │ bfloat16 │ 8, 32, 64 │ 8, 32, 64" in printed


def test_a_dry_build_refuses_what_the_build_would(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ENG-9: TensorRT 8 and the default numerics; nothing is printed before the error."""

    class TensorRT8:
        is_rtx, is_8 = False, True

        def __str__(self) -> str:
            return "tensorrt 8.6.0"

    monkeypatch.setattr(tensorrt_api, "load", lambda _: TensorRT8())
    assert cli.build(["--checkpoint", str(shards), "--output", str(tmp_path / "engines"), "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "tensorrt 8.6.0 was asked for released numerics in bfloat16" in one_line(printed.err)


def test_a_dry_build_refuses_a_draft_that_engines_have_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config("v4.1")
    config["text_config"]["dspark_markov_head_type"] = "gated"
    write_checkpoint(tmp_path / "released", config)
    common = ["--output", str(tmp_path / "shards")]
    assert cli.convert(["--checkpoint", str(tmp_path / "released"), *common]) == 0
    if isinstance(found := tensorrt_api.probe("tensorrt_rtx"), str):
        pytest.skip(f"TensorRT-RTX is not installed ({found})")
    common = ["--checkpoint", str(tmp_path / "shards"), "--output", str(tmp_path / "o")]
    assert cli.build([*common, "--dry-run"]) == 2
    assert "the draft has a gated Markov head" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("command", [cli.convert, cli.build])
def test_a_dry_run_refuses_an_output_in_use(
    released: Path, shards: Path, capsys: pytest.CaptureFixture[str], command: Callable[[list[str]], int]
) -> None:
    source = released if command is cli.convert else shards
    assert command(["--checkpoint", str(source), "--output", str(shards), "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert "exists already; remove it or pass another --output" in one_line(printed.err) and not printed.out


def test_building_from_a_released_checkpoint_points_to_convert(
    released: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.build(["--checkpoint", str(released), "--output", str(tmp_path / "o")]) == 2
    assert "dspark-convert" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-draft-tokens", "7"], "trained with blocks of 5"),
        (["--lowering", "native"], "add --numerics dequantized"),
        (["--workers", "0"], "--workers is 0, expected at least 1; leave it out for one engine at a time"),
        (["--workers", "-1"], "--workers is -1, expected at least 1"),
        (["--builder-optimization-level", "3"], "has no optimization levels; leave --builder-optimization-level out"),
        (["--output-timing-cache", "x"], "times kernels where the plan runs; leave the timing cache options out"),
        (["--output", "/dev/null/x"], "/dev/null is a file, expected a directory; pass another --output"),
        (["--output", str(Path(__file__).parent)], "exists already; remove it or pass another --output"),
        (["--product", "tensorrt"], "no usable TensorRT (tensorrt: "),
        (["--compute-capabilities", "9.0"], "data-centre GPUs such as 9.0 need enterprise TensorRT"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    if not isinstance(tensorrt_api.probe("tensorrt"), str):
        pytest.skip("enterprise TensorRT is installed, so other requests can be met")
    common = ["--checkpoint", str(shards), "--output", str(tmp_path / "o"), "--dry-run"]
    assert cli.build([*common, *arguments]) == 2
    assert message in one_line(capsys.readouterr().err)


def test_inspect_reads_shards_and_released_checkpoints(
    released: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for directory in (released, shards):
        assert cli.inspect([str(directory)]) == 0
        printed = one_line(capsys.readouterr().out)
        assert "block_size │ 5 │ -" in printed and "hidden_size │ 256 │ 256" in printed
        assert "mtp.0 │ BF16 │ " in printed
    assert cli.inspect([str(released.parent)]) == 2
    assert "holds neither" in capsys.readouterr().err


def test_inspect_without_a_directory_says_what_this_machine_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    """NVIDIA/TensorRT-LLM#2405: which MPI, which TensorRT."""
    assert cli.inspect([]) == 0
    printed = one_line(capsys.readouterr().out)
    for part in (
        "MPI │ ",
        "kernel library │ ",
        "plugins for TensorRT 8 │ ",
        "tensorrt │ ",
        "tensorrt_rtx │ ",
        "torch on the CPU │ yes",
    ):
        assert part in printed


def test_inspect_says_what_is_wrong_with_the_directory_that_it_found(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank shards without their config.json are still rank shards; nothing was downloaded."""
    shutil.copytree(shards, tmp_path / "shards")
    engines = tmp_path / "engines"
    for name in ("draft", "weights"):
        (engines / name).mkdir(parents=True)
    for path, wrong in ((tmp_path / "shards", "run dspark-convert again"), (engines, "build again: dspark-build")):
        for text in (b"", b"\xff\xfe"):
            (path / "config.json").write_bytes(text)
            assert cli.inspect([str(path)]) == 2
            assert f"{path}/config.json: not valid JSON in UTF-8" in (printed := one_line(capsys.readouterr().err))
            assert wrong in printed and "download" not in printed
        (path / "config.json").unlink()
        assert cli.inspect([str(path)]) == 2
        assert f"{path}/config.json: not found; expected a directory that dspark-" in one_line(capsys.readouterr().err)
    assert cli.inspect([str(tmp_path / "nowhere")]) == 2
    assert one_line(capsys.readouterr().err) == (
        f"error: {tmp_path}/nowhere: not found; expected a released checkpoint, rank shards, an engine directory"
    )


def test_a_directory_of_another_kind_is_named_with_the_command_that_takes_it(
    released: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commonest mistake, three directories and commands that look alike."""
    cases = [
        (cli.build, released, "a released checkpoint, expected rank shards; dspark-convert --checkpoint takes it"),
        (cli.convert, shards, "rank shards, expected a released checkpoint; dspark-build --checkpoint takes them"),
    ]
    for command, directory, message in cases:
        assert command(["--checkpoint", str(directory), "--output", str(tmp_path / "o")]) == 2
        assert f"error: {directory}: holds {message}" in one_line(capsys.readouterr().err)
    with pytest.raises(EngineDirError, match="holds rank shards, expected an engine directory; dspark-build"):
        EngineDir.open(shards)
    with pytest.raises(EngineDirError, match="holds a released checkpoint, expected an engine directory; dspark-conv"):
        EngineDir.open(released)
    make_engines(tmp_path, 1)
    for command in (cli.build, cli.convert):
        assert command(["--checkpoint", str(tmp_path / "tp1"), "--output", str(tmp_path / "o")]) == 2
        assert "tp1: holds an engine directory, expected " in (printed := one_line(capsys.readouterr().err))
        assert "examples/run.py --engine-dir takes it" in printed


@pytest.mark.parametrize("size", [0, 999, 1000, 2_500_000, 7e12])
def test_sizes_are_readable(size: float) -> None:
    assert (
        readable_size(size)
        == {0: "0 bytes", 999: "999 bytes", 1000: "1.0 kB", 2.5e6: "2.5 MB", 7e12: "7000.0 GB"}[size]
    )


def test_the_installed_command_returns_the_status() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("dspark-inspect"), "/nowhere"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.startswith("error: /nowhere: not found; expected a released")


def test_brackets_in_names_are_no_markup(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that comes next can be pasted."""
    monkeypatch.chdir(tmp_path)
    for name in ("run[/1]", "run [v2]"):
        assert cli.convert(["--checkpoint", str(released), "--output", name]) == 0
        assert f"next: dspark-build --checkpoint '{name}' --output ENGINES" in capsys.readouterr().out
        assert cli.inspect([name]) == 0
        assert capsys.readouterr().out.startswith(name)


def test_a_reader_that_goes_does_not_end_the_work(released: Path, tmp_path: Path) -> None:
    """As in dspark-convert ... | head -1."""
    code = "from dspark_trt.builder import cli; import sys; sys.exit(cli.convert())"
    command = [sys.executable, "-c", code, "--checkpoint", str(released), "--output", str(tmp_path / "shards")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
    assert cli.inspect([str(tmp_path / "shards")]) == 0


def test_a_disk_that_fills_is_a_failure_and_no_refusal(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cli, "write_shards", full)
    assert cli.convert(["--checkpoint", str(released), "--output", str(tmp_path / "shards")]) == 1
    said = (
        f"error: {tmp_path / 'shards'}: No space left on device; nothing was kept, free space or pass another --output"
    )
    assert capsys.readouterr().err.strip() == said


def test_calls_longer_than_all_positions_are_refused(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--checkpoint", str(shards), "--output", str(tmp_path / "engines"), "--dry-run"]
    assert cli.build([*options, "--max-input-len", "99999999999"]) == 2
    assert "max_input_len is 99999999999, expected 6, a step of one request, to " in capsys.readouterr().err
