"""What the compiler reports of every kernel, compared with the committed table; ``--write`` makes the table again.

The library is built as for a release, by CMake and with its default architectures, and ``-Xptxas=-v`` added: ptxas
then prints, for each kernel and architecture, registers, stack frame, spills and static shared memory. Dynamic shared
memory is chosen at launch and not in the report. In ``tests/data/kernel_resources.json`` a kernel has one row for each
architecture, with the columns of ``COLUMNS``; a kernel that spills has a reason beside its rows. Numbers hold for one
version of the compiler, which the table names.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).parent / "data" / "kernel_resources.json"
COLUMNS = ("registers", "stack", "spill_stores", "spill_loads", "shared")
"""Registers per thread; the others in bytes, per thread but for shared memory, which is a block's."""
SPILLS = slice(2, 4)

Row = tuple[int, ...]
Report = dict[str, dict[str, dict[str, Row]]]
"""Source file -> kernel -> architecture -> a number for each column."""


@dataclass(frozen=True)
class Reason:
    """Why kernels may spill: those whose name matches the pattern, on one of the architectures."""

    kernels: str
    architectures: tuple[str, ...]
    reason: str

    def covers(self, kernel: str, architecture: str) -> bool:
        return bool(self.reason.strip()) and fnmatchcase(kernel, self.kernels) and architecture in self.architectures


@dataclass(frozen=True)
class Table:
    """The committed numbers."""

    compiler: str
    kernels: Report
    spills: list[Reason] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path = TABLE) -> Table:
        data = json.loads(path.read_text())
        if data["columns"] != list(COLUMNS):
            raise ValueError(f"{path} has columns {data['columns']}, expected {list(COLUMNS)}; write it again")
        kernels = {
            source: {name: {a: tuple(row) for a, row in rows.items()} for name, rows in of_source.items()}
            for source, of_source in data["kernels"].items()
        }
        spills = [Reason(s["kernels"], tuple(s["architectures"]), s["reason"]) for s in data["spills"]]
        return cls(data["compiler"], kernels, spills)

    def dump(self) -> str:
        """The file's text: a line for each kernel, so that a change is one line of a diff."""
        spills = [
            {"kernels": s.kernels, "architectures": list(s.architectures), "reason": s.reason} for s in self.spills
        ]
        sources = [
            f"    {json.dumps(source)}: {{\n"
            + ",\n".join(f"      {json.dumps(name)}: {json.dumps(rows)}" for name, rows in sorted(kernels.items()))
            + "\n    }"
            for source, kernels in sorted(self.kernels.items())
        ]
        return (
            f'{{\n  "compiler": {json.dumps(self.compiler)},\n  "columns": {json.dumps(COLUMNS)},\n'
            f'  "spills": [{",".join(f"{chr(10)}    {json.dumps(s)}" for s in spills)}\n  ],\n'
            '  "kernels": {\n' + ",\n".join(sources) + "\n  }\n}\n"
        )


def spilling(report: Report) -> list[tuple[str, str, str]]:
    """(source, kernel, architecture) of each row with spills."""
    return [
        (source, name, architecture)
        for source, kernels in report.items()
        for name, rows in kernels.items()
        for architecture, row in rows.items()
        if any(row[SPILLS])
    ]


def unexplained(table: Table) -> list[str]:
    """What is wrong with the table's reasons: spills that have none, and reasons that no spill needs."""
    rows = spilling(table.kernels)
    problems = [
        f"{source}: {name} spills on {architecture}, and the table gives no reason"
        for source, name, architecture in rows
        if not any(reason.covers(name, architecture) for reason in table.spills)
    ]
    return problems + [
        f'the reason for spills of "{reason.kernels}" on {architecture} is one for kernels that do not spill'
        for reason in table.spills
        for architecture in reason.architectures
        if not any(a == architecture and reason.covers(name, a) for _, name, a in rows)
    ]


def compare(report: Report, table: Table) -> list[str]:
    """What the report has more of than the table allows, and where the two speak of different kernels."""
    problems = []
    for source in sorted(report.keys() | table.kernels.keys()):
        found, allowed = report.get(source, {}), table.kernels.get(source, {})
        for name in sorted(found.keys() | allowed.keys()):
            rows, limits = found.get(name, {}), allowed.get(name, {})
            for architecture in sorted(rows.keys() | limits.keys()):
                kernel = f"{source}: {name}, {architecture}"
                if architecture not in limits:
                    problems.append(f"{kernel}: not in the table")
                elif architecture not in rows:
                    problems.append(f"{kernel}: in the table, but not compiled")
                else:
                    problems += [
                        f"{kernel}: {column} {number}, at most {limit} expected"
                        for column, number, limit in zip(COLUMNS, rows[architecture], limits[architecture], strict=True)
                        if number > limit
                    ]
    return problems


OBJECT = re.compile(r"^\[\d+/\d+\] .*/kernels/(\w+\.cu)\.o\b")
KERNEL = re.compile(r"^ptxas info +: Compiling entry function '(\w+)' for '(\w+)'")
FRAME = re.compile(r"^ +(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"^ptxas info +: Used (\d+) registers(?:.*?, (\d+) bytes smem)?")


def parse(log: str, demangle: Callable[[Iterable[str]], list[str]]) -> Report:
    """The report in the log of a build by Ninja, which keeps what is printed for one object together.

    Stack and spills of a function that a kernel calls, and that ptxas reports on after the kernel, are added to the
    kernel's.

    Raises:
        ValueError: the log has no kernel, or one without its numbers, so it is written in another way than this reads.
    """
    rows: dict[tuple[str, str, str], Row] = {}
    source, kernel, frame = "", ("", "", ""), (0, 0, 0)
    for line in log.splitlines():
        if match := OBJECT.match(line):
            source = match[1]
        elif match := KERNEL.match(line):
            kernel, frame = (source, match[1], match[2]), (0, 0, 0)
            if kernel in rows:
                raise ValueError(f"the compiler reports on {kernel[1]} for {kernel[2]} twice")
            rows[kernel] = ()
        elif match := FRAME.match(line):
            frame = (frame[0] + int(match[1]), frame[1] + int(match[2]), frame[2] + int(match[3]))
            if rows.get(kernel):
                rows[kernel] = (rows[kernel][0], *frame, rows[kernel][4])
        elif (match := USED.match(line)) and kernel in rows:
            rows[kernel] = (int(match[1]), *frame, int(match[2] or 0))
    if not rows or not all(rows.values()):
        lacking = ", ".join(f"{name} for {a}" for (_, name, a), row in rows.items() if not row)
        raise ValueError(f"the compiler's report lacks numbers of {lacking or 'every kernel'}")
    report: Report = {}
    for (source, _, architecture), name, row in zip(rows, demangle(key[1] for key in rows), rows.values(), strict=True):
        of_kernel = report.setdefault(source, {}).setdefault(name, {})
        if architecture in of_kernel:
            raise ValueError(f"{source} has two kernels that are called {name}")
        of_kernel[architecture] = row
    return report


def demangle(symbols: Iterable[str]) -> list[str]:
    """C++ names without parameters and namespaces, in the order of the symbols."""
    done = subprocess.run(["c++filt", "-p"], input="\n".join(symbols), capture_output=True, text=True, check=True)
    return [re.sub(r"^void |\bdspark::|\(anonymous namespace\)::", "", name) for name in done.stdout.splitlines()]


def version(nvcc: Path) -> str:
    """As in 13.0.88."""
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"\bV(\d+\.\d+\.\d+)", said)
    if match is None:
        raise ValueError(f"{nvcc} --version tells no version: {said}")
    return match[1]


def find_nvcc() -> list[Path]:
    """The compilers there are: that of the ``nvcc`` extra first, then those of ``CUDA_HOME`` and PATH."""
    places: list[Path] = []
    try:
        files = metadata.files("nvidia-cuda-nvcc") or []
        places += [Path(file.locate()) for file in files if file.name == "nvcc"]
    except metadata.PackageNotFoundError:
        pass
    home, on_path = os.environ.get("CUDA_HOME"), shutil.which("nvcc")
    places += [Path(home) / "bin" / "nvcc"] if home else []
    places += [Path(on_path)] if on_path else []
    return [place for place in places if place.is_file()]


def nvcc_of(wanted: str) -> Path | None:
    """The first compiler of that version."""
    return next((nvcc for nvcc in find_nvcc() if version(nvcc) == wanted), None)


def tools_path() -> str:
    """PATH with this Python's commands in front, among them the cmake and ninja of the ``nvcc`` extra."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def missing_tools() -> list[str]:
    """What is needed beside nvcc and is not there."""
    return [tool for tool in ("cmake", "ninja", "g++", "c++filt") if shutil.which(tool, path=tools_path()) is None]


def build(nvcc: Path, folder: Path) -> str:
    """The log of building the library in a folder.

    Raises:
        RuntimeError: CMake failed; the message has the end of its output.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("CUDAARCHS", "CUDAFLAGS")}
    environment |= {"PATH": tools_path(), "CUDACXX": str(nvcc), "CUDAFLAGS": "-Xptxas=-v"}
    log = ""
    for command in (
        ["cmake", "-S", str(ROOT / "cpp_plugins"), "-B", str(folder), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"],
        ["cmake", "--build", str(folder), "--target", "dspark_plugins", "--parallel", str(os.cpu_count())],
    ):
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}")
        log = done.stdout
    return log


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.compiler_report", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the numbers found into the table")
    parser.add_argument("--nvcc", type=Path, help="a compiler other than the first found")
    options = parser.parse_args()
    nvcc = options.nvcc or next(iter(find_nvcc()), None)
    if nvcc is None or missing_tools():
        parser.error(f"not found: {', '.join([*([] if nvcc else ['nvcc']), *missing_tools()])}")
    with tempfile.TemporaryDirectory() as folder:
        report = parse(build(nvcc, Path(folder)), demangle)
    if not options.write:
        table = Table.load()
        problems = compare(report, table)
        print("\n".join(problems) or f"as in the table, which is for nvcc {table.compiler}; this is {version(nvcc)}")
        sys.exit(bool(problems))
    reasons = Table.load().spills if TABLE.is_file() else []
    table = Table(version(nvcc), report, reasons)
    TABLE.write_text(table.dump())
    print("\n".join([f"{TABLE} written", *unexplained(table)]))


if __name__ == "__main__":
    main()
