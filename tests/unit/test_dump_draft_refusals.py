"""Prompts, features and outputs that examples/dump_draft.py refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.example_scripts import CHECKPOINT, load_example

dump_draft = load_example("dump_draft")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a request without tokens"),
        ("[]", "a request without tokens"),
        ("[[1], []]", "a request without tokens"),
        ("[1, 2]", "expected token ids, one request a line, or a JSON list of lists of integers"),
        ("[[1, true]]", "something that is not a token id"),
        ("[[1, 2", "expected token ids"),
        ("1 2\nthree", "invalid literal for int() with base 10: 'three'"),
        ("1 2\n264 -1", "request 1 has token ids [264, -1], expected 0..263"),
        (" ".join(["1"] * 4092), "request 0 has 4092 tokens, expected at most 4091"),
    ],
)
def test_prompts_that_cannot_be_used(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_text(text)
    arguments = ["--checkpoint", str(CHECKPOINT), "--prompt-ids", str(tmp_path / "prompts")]
    assert dump_draft.main([*arguments, "--output", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and message in printed
    assert not (tmp_path / "out").exists()


GOOD = {
    "anchor_ids": torch.tensor([5, 6]),
    "context_features": torch.zeros(3, 768),
    "context_positions": torch.tensor([0, 1, 0]),
    "context_request": torch.tensor([0, 0, 1]),
}
NO_REQUESTS = {name: tensor[:0] for name, tensor in GOOD.items()}
TOO_MANY = {"anchor_ids": torch.ones(65, dtype=torch.int32), "context_features": torch.zeros(65, 768)}
TOO_MANY |= {"context_positions": torch.zeros(65, dtype=torch.int32), "context_request": torch.arange(65)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"anchor_ids": None, "context_request": None}, "anchor_ids, context_request missing; expected anchor_ids,"),
        ({"context_features": torch.zeros(3, 767)}, "context_features has shape [3, 767], expected [rows, 768]"),
        ({"context_positions": torch.tensor([0, 1])}, "context_positions has shape [2], expected [3]"),
        ({"context_request": torch.tensor([0, 0, 2])}, "context_request names [0, 2], expected each of 0..1"),
        ({"context_request": torch.tensor([0, 0, 0])}, "context_request names [0], expected each of 0..1"),
        ({"anchor_ids": torch.tensor([5, 264])}, "anchor_ids is [5, 264], expected ids of 0..263"),
        ({"anchor_ids": torch.tensor([5, 2**32])}, "anchor_ids is [5, 4294967296], expected ids of 0..263"),
        ({"anchor_ids": torch.tensor(5)}, "anchor_ids has shape [], expected [requests]"),
        ({"context_features": torch.tensor(5.0)}, "context_features has shape [], expected [rows, 768]"),
        ({"context_positions": torch.tensor(5)}, "context_positions has shape [], expected [3]"),
        ({"context_positions": torch.tensor([0, -1, 0])}, "context_positions has [-1], expected 0..4090"),
        ({"context_positions": torch.tensor([0, 4091, 2**32])}, "context_positions has [4091, 4294967296], expected"),
        ({"context_positions": torch.tensor([0, 0.5, 0])}, "context_positions is float32, expected int32 or int64"),
        ({"context_features": torch.zeros(3, 768).int()}, "context_features is int32, expected a floating-point type"),
        (NO_REQUESTS, "there are 0 requests, expected 1 to 64, which a draft step takes"),
        (TOO_MANY, "there are 65 requests, expected 1 to 64, which a draft step takes"),
    ],
)
def test_features_that_cannot_be_used(
    change: dict[str, Tensor | None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({k: v for k, v in {**GOOD, **change}.items() if v is not None}, tmp_path / "features")
    arguments = ["--checkpoint", str(CHECKPOINT), "--features", str(tmp_path / "features")]
    assert dump_draft.main([*arguments, "--output", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1


def test_the_last_position_with_room_for_a_block(tmp_path: Path) -> None:
    """As prompts may be 4091 long and no longer."""
    save_file({**GOOD, "context_positions": torch.tensor([0, 4090, 0])}, tmp_path / "features")
    arguments = ["--checkpoint", str(CHECKPOINT), "--features", str(tmp_path / "features")]
    assert dump_draft.main([*arguments, "--output", str(tmp_path / "out")]) == 0
    assert load_file(tmp_path / "out")["positions"][0].tolist() == list(range(4091, 4096))


def test_outputs_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the checkpoint is converted."""
    monkeypatch.setattr(dump_draft, "convert_checkpoint", None)
    (tmp_path / "file").write_text("x")
    (prompts := tmp_path / "prompts.txt").write_text("256 1")
    arguments = ["--checkpoint", str(CHECKPOINT), "--prompt-ids", str(prompts)]
    for output, message in (
        (tmp_path, "is a directory"),
        (tmp_path / "file" / "x", "is not a directory, expected one"),
    ):
        assert dump_draft.main([*arguments, "--output", str(output)]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith(f"error: --output {output}: ") and message in printed


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        (
            "--dtype float16",
            "1",
            "released numerics are bfloat16, --dtype is float16; add --mode dequantized, or leave --dtype out",
        ),
        (
            "--dtype bfloat16",
            "2",
            "a launcher started 2 ranks, which would write the same file; start it without mpirun",
        ),
        ("", "x", "OMPI_COMM_WORLD_SIZE is 'x', expected a number of ranks"),
    ],
)
def test_what_would_be_passed_over(
    flags: str,
    ranks: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything is read."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", ranks)
    arguments = ["--checkpoint", "absent", "--prompt-ids", str(tmp_path / "absent"), "--output", str(tmp_path / "out")]
    (tmp_path / "absent").write_text("1")
    assert dump_draft.main([*arguments, *flags.split()]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {message}") and printed.count("\n") == 1


def test_a_file_without_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(GOOD, tmp_path / "features")
    (tmp_path / "out").symlink_to("/dev/full")
    arguments = ["--checkpoint", str(CHECKPOINT), "--features", str(tmp_path / "features")]
    assert dump_draft.main([*arguments, "--output", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {tmp_path}/out: No space left on device") and printed.err.count("\n") == 1


def test_other_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--checkpoint", str(CHECKPOINT), "--output", str(tmp_path / "out")]
    assert dump_draft.main(arguments) == 2
    assert "neither of --prompt-ids and --features was given, expected one; pass either" in capsys.readouterr().err
    (tmp_path / "text").write_text("not a safetensors file")
    assert dump_draft.main([*arguments, "--features", str(tmp_path / "text")]) == 2
    assert "not a safetensors file" in capsys.readouterr().err
    assert dump_draft.main([*arguments, "--prompt-ids", str(tmp_path / "absent")]) == 2
    assert "absent: No such file or directory; pass a file with token ids" in capsys.readouterr().err
    (tmp_path / "latin1").write_bytes(b"1 2 \xff")
    assert dump_draft.main([*arguments, "--prompt-ids", str(tmp_path / "latin1")]) == 2
    assert "latin1: byte 4 is 0xff, which is not UTF-8; pass a file with token ids" in capsys.readouterr().err
    (many := tmp_path / "many").write_text("1\n" * 65)
    assert dump_draft.main([*arguments, "--prompt-ids", str(many)]) == 2
    assert "error: there are 65 requests, expected 1 to 64" in capsys.readouterr().err
