"""Renders the committed results as the README's table.

python tests/benchmarks/render.py            print the table
python tests/benchmarks/render.py README.md  replace what stands between the README's markers
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROWS = (1, 5, 20, 80)
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


def measurements() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each result with its file, newest file first."""
    for path in sorted(RESULTS.glob("*.json"), reverse=True):
        run = json.loads(path.read_text())
        for result in run["results"]:
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


def main() -> None:
    if len(sys.argv) == 1:
        print(table())
        return
    path = Path(sys.argv[1])
    text = path.read_text()
    before, rest = text.split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
