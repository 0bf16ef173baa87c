"""The README's tables are those of the committed results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.benchmarks import render

README = Path(__file__).resolve().parents[2] / "README.md"


def rendered(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", ["render.py", str(path)])
    render.main()
    return path.read_text()


def test_rendering_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new result, or a number changed by hand, wants ``python tests/benchmarks/render.py README.md``."""
    text = README.read_text()
    for section in render.SECTIONS:
        assert text.count(f"<!-- {section}: begin -->") == text.count(f"<!-- {section}: end -->") == 1
    copy = tmp_path / "README.md"
    copy.write_text(text)
    now, before = rendered(copy, monkeypatch).splitlines(), text.splitlines()
    assert [line for line in now if line not in before] == []
    assert now == before


def test_a_number_changed_by_hand_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering puts each table's numbers back, and leaves what is around the tables alone."""
    copy = tmp_path / "README.md"
    for render_section in render.SECTIONS.values():
        last = render_section().splitlines()[-1]
        copy.write_text(README.read_text().replace(last, "| changed |"))
        assert "| changed |" in copy.read_text()
        assert rendered(copy, monkeypatch) == README.read_text()
