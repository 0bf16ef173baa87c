"""examples/train_tiny.py: what it refuses, and what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.example_scripts import EXAMPLES, load_example

train_tiny = load_example("train_tiny")
LEAST = ("--target-steps", "1", "--draft-steps", "1", "--batch-size", "1", "--sequence-length", "14", "--anchors", "1")


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``train(*flags)``: the exit status on a machine without a GPU, with a short corpus."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("train", "heldout"):
        text = (EXAMPLES / "tiny" / "corpus" / f"{name}.txt").read_text()[:3000]
        (tmp_path / f"{name}.txt").write_text(text)
    fixed = ["--corpus", str(tmp_path), "--output", str(tmp_path / "out")]
    return lambda *flags: train_tiny.main([*fixed, *LEAST, *flags])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--learning-rate nan", "--learning-rate is nan, expected a number above 0"),
        ("--learning-rate inf", "--learning-rate is inf, expected a number above 0"),
        ("--learning-rate 0", "--learning-rate is 0.0, expected a number above 0"),
        ("--device bogus", "--device is bogus, expected one that torch finds here (cpu)"),
        ("--device cuda", "--device is cuda, expected one that torch finds here (cpu)"),
        ("--batch-size 0", "--batch-size is 0, expected 1 to 214 (sequences in the training text)"),
        ("--batch-size 215", "--batch-size is 215, expected 1 to 214 (sequences"),
        ("--sequence-length 13", "--sequence-length is 13, expected 14 to 3000 (what"),
        ("--sequence-length 100000000", "--sequence-length is 100000000, expected 14 to 3000 (what"),
        ("--anchors 2", "--anchors is 2, expected 1 to 1 (places for a draft block in a sequence)"),
        ("--anchors 0 --sequence-length 15", "--anchors is 0, expected 1 to 2 (places"),
        ("--target-steps 0", "--target-steps is 0, expected 1 to 1000000000 (steps)"),
        ("--draft-steps -1", "--draft-steps is -1, expected 1 to 1000000000 (steps)"),
        ("--seed -1", "--seed is -1, expected 0 to 18446744073709551615 (64 bits)"),
        ("--output /dev/null", "--output /dev/null: /dev/null is not a directory"),
        ("--corpus /absent", "/absent/train.txt: No such file or directory; pass a --corpus with train.txt and"),
    ],
)
def test_what_cannot_be_trained_with(
    flags: str, message: str, train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """One line, before a model is made."""
    monkeypatch.setattr(train_tiny, "TargetModel", None)
    assert train(*flags.split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {message}") and printed.err.count("\n") == 1 and printed.out == ""
    assert not (tmp_path / "out").exists()


def test_the_least_training(train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --device, on the CPU where there is no GPU."""
    assert train() == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "training on the CPU" and len(printed) == 4
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        p.name for p in (EXAMPLES / "tiny" / "checkpoint").iterdir()
    }


def test_a_target_that_comes_apart_is_not_written(train: Any, tmp_path: Path, capsys: Any) -> None:
    """The last step did it, whose loss was of the weights before."""
    assert train("--learning-rate", "1e30") == 1
    wanted = (
        "error: the loss is nan after 1 steps, expected a finite number; nothing was written, lower --learning-rate\n"
    )
    assert capsys.readouterr().err == wanted and not (tmp_path / "out").exists()


def test_a_draft_that_comes_apart_is_not_written(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    loss_of = train_tiny.draft_loss

    def broken_behind_training(*given: Any) -> Any:
        loss, *others = loss_of(*given)
        return loss if torch.is_grad_enabled() else loss * torch.nan, *others

    monkeypatch.setattr(train_tiny, "draft_loss", broken_behind_training)
    assert train() == 1
    assert (
        capsys.readouterr().err.startswith("error: the loss is nan after 1 steps") and not (tmp_path / "out").exists()
    )


def test_a_checkpoint_without_room(train: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "out").mkdir()
    (file := tmp_path / "out" / "model-00001-of-00002.safetensors").symlink_to("/dev/full")
    assert train() == 1
    assert capsys.readouterr().err.startswith(
        f"error: {file}: No space left on device, expected to write the file there"
    )
