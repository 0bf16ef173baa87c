"""What tests/run_sanitizer.sh selects: no operation is left out, and no line selects nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from dspark_trt.plugins.registry import ALL_OPS

TESTS = Path(__file__).resolve().parents[1]


def selections() -> list[list[str]]:
    """Operations, test file and expression of each line."""
    block = re.search(r"^selections=\(\n(.*?)^\)", (TESTS / "run_sanitizer.sh").read_text(), re.S | re.M)
    assert block
    return [line.strip().strip('"').split("|") for line in block[1].splitlines()]


@pytest.fixture(scope="module")
def collected() -> list[str]:
    """All tests for one GPU, in a process of its own: pytest does not collect inside itself."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    done = subprocess.run([*command, TESTS / "gpu"], capture_output=True, text=True, cwd=TESTS.parent, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_every_operation_is_watched() -> None:
    assert {op for ops, *_ in selections() for op in ops.split()} == set(ALL_OPS)


@pytest.mark.parametrize("selection", selections(), ids=lambda s: f"{s[1]}: {s[2]}")
def test_every_line_selects_tests_of_its_operations(selection: list[str], collected: list[str]) -> None:
    ops, name, expression = selection
    file = TESTS / "gpu" / f"test_{name}.py"
    tests = [test.split("::")[1] for test in collected if f"/{file.name}::" in test]
    for alternative in expression.split(" or "):
        words = alternative.split(" and ")
        assert any(all(word in test for word in words) for test in tests), alternative
    text = file.read_text()
    text += "".join((TESTS / "gpu" / f"{m}.py").read_text() for m in re.findall(r"from tests\.gpu\.(\w+) import", text))
    for op in ops.split():
        constant = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", op).upper()
        assert re.search(rf'\b{constant}\b|"{op}"', text), op
