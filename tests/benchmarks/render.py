"""Renders the committed results as the README's tables.

python tests/benchmarks/render.py            print the tables
python tests/benchmarks/render.py README.md  replace what stands between the README's markers, of those it has
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROWS = (5, 6, 40, 48, 80, 1024)
"""Of one request and of eight, for the draft and for the target; 80 rows, and a prefill."""


def measurements() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each result with its file, newest file first."""
    for path in sorted(RESULTS.glob("*.json"), reverse=True):
        run = json.loads(path.read_text())
        for result in run.get("results", []):
            yield run, result


def table() -> str:
    """Cold-cache medians of the newest run of each measurement, in Markdown."""
    lines = [
        "| operation | rows | GPUs | H | us | byte floor | best peer, us | date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    seen = set()
    for run, result in measurements():
        key = tuple(result.get(k) for k in ("name", "rows", "ranks", "hidden", "streams"))
        if result["cache"] != "cold" or result["rows"] not in ROWS or key in seen:
            continue
        seen.add(key)
        name = result["name"] + (", two streams" if result.get("streams") == 2 else "")
        peers = sorted(result["peers"].items(), key=lambda peer: peer[1])
        best = f"{peers[0][1]:.1f} ({peers[0][0]})" if peers else "-"
        took, floor = result["median_us"], result["floor_us"]
        sizes = f"{result['rows']} | {result['ranks']} | {result.get('hidden', '-')}"
        share = f"{floor:.2f} ({100 * floor / took:.0f} %)"
        lines.append(f"| `{name}` | {sizes} | {took:.2f} | {share} | {best} | {run['date']} |")
    return "\n".join(lines)


def acceptance() -> str:
    """The newest run of examples/measure_acceptance.py, in Markdown."""
    run = json.loads(max(RESULTS.glob("*-acceptance.json")).read_text())
    rows, positions = run["acceptance"], range(1, 1 + len(run["acceptance"][0]["kept"]))
    lines = [
        f"| temperature | method | tokens per step | {' | '.join(f'{i}' for i in positions)} |",
        "|---" * (3 + len(positions)) + "|",
    ]
    for row in rows:
        tokens = row["tokens_per_step"]
        shares = [
            f"{100 * kept['mean']:.0f}" + (f" ({100 * given['mean']:.0f})" if given else "")
            for kept, given in zip(row["kept"], row["kept_given_before"], strict=True)
        ]
        mean = f"{tokens['mean']:.2f} ({tokens['low']:.2f} to {tokens['high']:.2f})"
        lines.append(f"| {row['temperature']:g} | {row['method']} | {mean} | {' | '.join(shares)} |")
    return "\n".join(lines)


SECTIONS = {"benchmarks": table, "acceptance": acceptance}


def main() -> None:
    if len(sys.argv) == 1:
        print("\n\n".join(render() for render in SECTIONS.values()))
        return
    path = Path(sys.argv[1])
    text = path.read_text()
    for name, render in SECTIONS.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin in text:
            before, rest = text.split(begin)
            text = f"{before}{begin}\n{render()}\n{end}{rest.split(end)[1]}"
    path.write_text(text)


if __name__ == "__main__":
    main()
