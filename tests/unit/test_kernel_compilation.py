"""The kernels are compiled as for a release, and no kernel takes more of an SM than the committed table allows.

What ptxas prints is read by tests/compiler_report.py, which also writes the table: ``python -m tests.compiler_report``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from dspark_trt.plugins import abi
from dspark_trt.plugins.library import PLUGIN_ABI
from dspark_trt.plugins.registry import ALL_OPS

from tests import compiler_report
from tests.compiler_report import ROOT, Reason, Report, Table, compare, parse, unexplained

ARCHITECTURES = {"sm_80", "sm_90", "sm_100", "sm_120"}
LOG = """\
[0/2] Re-checking globbed directories...
[1/3] Building CUDA object CMakeFiles/dspark_plugins.dir/kernels/one.cu.o
ptxas info    : 24 bytes gmem, 8 bytes cmem[4]
ptxas info    : Compiling entry function '_Z1ai' for 'sm_80'
ptxas info    : Function properties for _Z1ai
    32 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 32 bytes cumulative stack size, 1040 bytes smem, 688 bytes cmem[0]
ptxas info    : Compile time = 27.806 ms
ptxas info    : Compiling entry function '_Z1ai' for 'sm_90'
ptxas info    : Function properties for _Z1ai
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 70 registers, used 0 barriers
ptxas info    : Function properties for _Z6calledf
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
[2/3] Building CUDA object CMakeFiles/dspark_plugins.dir/kernels/two.cu.o
ptxas info    : Compiling entry function '_Z1bi' for 'sm_90'
ptxas info    : Function properties for _Z1bi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 16 bytes smem
[3/3] Linking CUDA shared library libdspark_plugins.so
"""
REPORT: Report = {
    "one.cu": {"a": {"sm_80": (64, 32, 4, 8, 1040), "sm_90": (70, 8, 12, 16, 0)}},
    "two.cu": {"b": {"sm_90": (40, 0, 0, 0, 16)}},
}
REASONS = [Reason("a", ("sm_80", "sm_90"), "it is an example")]


def short(symbols: Iterable[str]) -> list[str]:
    return [symbol[3] for symbol in symbols]


@pytest.fixture(scope="module")
def table() -> Table:
    return Table.load()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def log(table: Table, folder: Path) -> str:
    """What a build by the compiler of the table prints; its library lies in ``folder``."""
    nvcc = compiler_report.nvcc_of(table.compiler)
    missing = compiler_report.missing_tools()
    if nvcc is None or missing:
        versions = [f"{compiler_report.version(other)} ({other})" for other in compiler_report.find_nvcc()]
        found = ", ".join(versions) or "none"
        pytest.skip(
            f"the table is for nvcc {table.compiler}, found {found}; missing tools: {', '.join(missing) or 'none'}; "
            "pip install '.[nvcc]' brings all but g++"
        )
    return compiler_report.build(nvcc, folder)


@pytest.mark.timeout(1800)
def test_kernels_take_no_more_than_the_table_allows(log: str, table: Table) -> None:
    """A register too many can halve the warps of an SM, and a spill goes through memory: both come unnoticed."""
    problems = compare(parse(log, compiler_report.demangle), table)
    assert not problems, "\n".join(
        [*problems, "where this is meant: python -m tests.compiler_report --write, and a reason for each spill"]
    )


@pytest.mark.timeout(1800)
def test_library_loads_without_a_gpu_and_has_every_operation(log: str, folder: Path) -> None:
    library = ctypes.CDLL(str(folder / "libdspark_plugins.so"))
    assert library.dspark_plugin_abi() == PLUGIN_ABI
    names = [name for op in ALL_OPS.values() for name in (abi.c_name(op), f"{abi.c_name(op)}_workspace")]
    assert not [name for name in names if not hasattr(library, name)]


def test_table_is_for_the_compiler_that_pip_installs(table: Table) -> None:
    """A pin that is raised without the table would skip the comparison."""
    pins = (ROOT / "pyproject.toml").read_text()
    for package in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm"):
        assert f'"{package}=={table.compiler}"' in pins


def test_table_has_every_architecture_and_a_reason_for_each_spill(table: Table) -> None:
    for source, kernels in table.kernels.items():
        for name, rows in kernels.items():
            assert rows.keys() == ARCHITECTURES, f"{source}: {name}"
    assert not unexplained(table)


def test_every_number_of_the_log_is_read() -> None:
    assert parse(LOG, short) == REPORT


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Used 40 registers", "Took 40 registers", "lacks numbers of _Z1bi for sm_90"),
        ("Compiling entry function", "Compiling", "lacks numbers of every kernel"),
        ("for 'sm_90'", "for 'sm_80'", "reports on _Z1ai for sm_80 twice"),
        ("_Z1ai' for 'sm_90'", "_Z1abb' for 'sm_80'", "one.cu has two kernels that are called a"),
    ],
)
def test_a_log_of_another_form_is_refused(old: str, new: str, message: str) -> None:
    """Another ptxas may print otherwise; nothing found must not pass for nothing wrong."""
    with pytest.raises(ValueError, match=message):
        parse(LOG.replace(old, new), short)


@pytest.mark.parametrize("column", range(5))
def test_one_more_than_allowed_is_found(column: int) -> None:
    table = Table("13.0.88", REPORT, REASONS)
    assert compare(REPORT, table) == []
    row = [*REPORT["two.cu"]["b"]["sm_90"]]
    row[column] += 1
    more: Report = {**REPORT, "two.cu": {"b": {"sm_90": tuple(row)}}}
    name = compiler_report.COLUMNS[column]
    assert compare(more, table) == [f"two.cu: b, sm_90: {name} {row[column]}, at most {row[column] - 1} expected"]
    assert compare(REPORT, replace(table, kernels=more)) == []


def test_kernels_and_architectures_must_be_those_of_the_table() -> None:
    less: Report = {"one.cu": {"a": {"sm_80": REPORT["one.cu"]["a"]["sm_80"]}}}
    names = ["one.cu: a, sm_90", "two.cu: b, sm_90"]
    assert compare(REPORT, Table("13.0.88", less)) == [f"{name}: not in the table" for name in names]
    assert compare(less, Table("13.0.88", REPORT)) == [f"{name}: in the table, but not compiled" for name in names]


@pytest.mark.parametrize(
    ("reasons", "wanted"),
    [
        (REASONS, []),
        ([Reason("*", ("sm_90",), "why")], ["one.cu: a spills on sm_80, and the table gives no reason"]),
        ([*REASONS, Reason("a", ("sm_90",), " ")], ['the reason for spills of "a" on sm_90']),
        ([*REASONS, Reason("b", ("sm_90",), "why")], ['the reason for spills of "b" on sm_90']),
    ],
)
def test_a_spill_needs_a_reason_and_a_reason_a_spill(reasons: list[Reason], wanted: list[str]) -> None:
    problems = unexplained(Table("13.0.88", REPORT, reasons))
    assert len(problems) == len(wanted) and all(p.startswith(w) for p, w in zip(problems, wanted, strict=True))


def test_a_written_table_reads_back(tmp_path: Path) -> None:
    for reasons in ([], REASONS, REASONS * 2):
        table = Table("13.0.88", REPORT, reasons)
        (tmp_path / "table.json").write_text(table.dump())
        assert Table.load(tmp_path / "table.json") == table
