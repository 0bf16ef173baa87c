"""The pages in docs/: what code and tests cite is there, and what they link to exists."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUMERICS, FAULTS = ROOT / "docs" / "numerics.md", ROOT / "docs" / "faults.md"
FOLDERS = ("builder", "plugins", "runtime_py", "cpp_plugins", "examples", "tests")
SUFFIXES = {".py", ".cu", ".cuh", ".h", ".cpp", ".inc", ".sh", ".md"}

NUMBER = r"\d+(?:\.\d+)?"
NUMBERS = rf"{NUMBER}(?:(?:,|,? and| to) (?:sections? )?{NUMBER})*"
CITATION = re.compile(
    rf"\b[Ss]pec(?:ification)?,? (?:sections? )?({NUMBERS})|\bsection ({NUMBER}) of the specification"
)
CODE = re.compile(r"\b(?:POS|KV|SMP|GR|TP|HC|ENG|CMP|CK)-\d+\b")
LINK = re.compile(r"\]\(([^()\s]+)\)")


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    """Name and text of each file in the repository's folders, this one left out."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            name = path.relative_to(ROOT)
            built = any(part.startswith("build") for part in name.parts[1:-1])
            if path.suffix in SUFFIXES and path.is_file() and not built and path != Path(__file__).resolve():
                yield str(name), path.read_text(encoding="utf-8")


def cited_sections(text: str) -> list[str]:
    """Numbers of the sections that a source cites, in their order; of a range its ends."""
    text = re.sub(r"\s*\n\s*(?:(?://|#)+\s*)?", " ", text)
    return [n for match in CITATION.finditer(text) for n in re.findall(NUMBER, match[1] or match[2])]


def headings(page: str) -> list[str]:
    return re.findall(rf"^#+ ({NUMBER})\.? ", page, re.MULTILINE)


def fault_table(page: str) -> list[tuple[str, list[str]]]:
    """Code and test files of each row."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    assert {len(row) for row in rows} == {4}
    return [(row[0], re.findall(r"`([^`]+)`", row[3])) for row in rows if CODE.fullmatch(row[0])]


def cited_codes() -> dict[str, set[str]]:
    """The files below tests/ that name each code of a fault."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, text in sources("tests"):
        if not name.endswith(".md"):
            for code in CODE.findall(text):
                found[code].add(name.removeprefix("tests/"))
    return found


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ('"""Rounds (spec 3.0, 3.5).', ["3.0", "3.5"]),
        ("(spec 3.1, 3.4, section 6).", ["3.1", "3.4", "6"]),
        ("(spec sections 3.2 to 5.3)", ["3.2", "5.3"]),
        ("The data flow of spec 3.4 and 5.2 holds", ["3.4", "5.2"]),
        ("(spec section 3.5, step 3)", ["3.5"]),
        ("Spec 8.1: 1, 2, .5, 1, 2^-22", ["8.1"]),
        ("// exchange a row (spec\n  // 7.4).", ["7.4"]),
        ("from section 2 of the specification, not", ["2"]),
        ("spec = 3; specs 4; section 9", []),
    ],
)
def test_citations_are_found(text: str, numbers: list[str]) -> None:
    assert cited_sections(text) == numbers


def test_every_cited_section_exists() -> None:
    known = headings(NUMERICS.read_text(encoding="utf-8"))
    assert [n for n, count in Counter(known).items() if count > 1] == []
    cited = {name: numbers for name, text in sources(*FOLDERS) if (numbers := cited_sections(text))}
    assert {"plugins/numerics.py", "cpp_plugins/kernels/mailbox.cuh", "tests/released.py"} <= cited.keys()
    missing = {name: sorted(set(numbers) - set(known)) for name, numbers in cited.items() if set(numbers) - set(known)}
    assert missing == {}, f"{NUMERICS.name} has no such sections"


def test_fault_table_has_the_codes_of_the_tests() -> None:
    """One row a code, none that no test guards, and each file that a row names does cite the code."""
    table, cited = fault_table(FAULTS.read_text(encoding="utf-8")), cited_codes()
    rows = Counter(code for code, _ in table)
    assert [code for code, count in rows.items() if count > 1] == []
    assert sorted(rows.keys() ^ cited.keys()) == [], "in the table only, or in tests only"
    wrong = [(code, name) for code, names in table for name in names if name not in cited[code]]
    assert wrong == [], f"these don't cite the code, or are gone; {FAULTS.name} wants others"
    assert [code for code, names in table if not names] == []


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_relative_links_resolve(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    files = [link.split("#")[0] for link in links]
    assert [name for name in files if name and not (page.parent / name).exists()] == []


def test_pages_are_linked_from_the_readme() -> None:
    """Who reads "Spec 3.3" or a code in a docstring finds the page from there."""
    links = LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert {"docs/numerics.md", "docs/faults.md"} <= set(links)
