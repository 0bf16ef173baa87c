"""What the compiled kernels compute addresses with, and instructions that they must not have; no GPU is needed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests import compiler_report
from tests.ptx import KERNELS, Line, compile_ptx, cut_products

ROW = "within a row of at most 2^20 channels"
SHARED = "within shared memory"
CALL = "rows or requests of one launch, at most 1024"
BOUNDED = {
    ("activation_records.cuh", "block % blocks * kQuantizeThreads"): ROW,
    ("attention_float_kernel.cuh", "i % p.format.pairs"): "the quotient of a remainder",
    ("attention_float_kernel.cuh", "own + (i - keys.window) * dim"): SHARED,
    ("attention_kernel.cuh", "first_channel = blockIdx.x * slices * kSpan"): ROW,
    ("attention_kernel.cuh", "row_of_thread - step * p.heads"): "the quotient of a remainder, below the heads",
    ("attention_kernel.cuh", "piece_row * pitch"): SHARED,
    ("attention_kernel.cuh", "start += layout.chunk"): "rows of a ring, at most 2^30",
    ("attention_wide_kernel.cuh", "row - step * p.heads"): "the quotient of a remainder, below the heads",
    ("attention_wide_kernel.cuh", "piece - own * slices"): "the quotient of a remainder, below a head's slices",
    ("markov_kernel.cuh", "warp = threadIdx.x / kWarp"): CALL,
    ("markov_kernel.cuh", "warp + stayed * workers"): "tiles of 16 rows of a vocabulary of 31 bits",
    ("markov_kernel.cuh", "static_cast<int64_t>(step) * p.requests + request"): CALL,
    (
        "mhc_all_reduce.cu",
        "block * blockDim.x + threadIdx.x; i < last",
    ): "the quotient of a remainder, below a row's words",
    ("mhc_all_reduce.cu", "(blockIdx.x * blockDim.x + threadIdx.x) * kPack"): ROW,
    ("mhc_coefficients.cu", "begin = blockIdx.y * block_rows"): CALL,
    ("quantized_linear.cu", "first = blockIdx.x * p.groups * kGroup"): CALL,
    ("quantized_linear.cu", "static_cast<int64_t>(first + row) * p.weight_rows"): CALL,
    ("routed_experts.cu", "kWarps * P::ring_bytes(p.groups)"): SHARED,
    ("weight_product.cuh", "warp_ + i * warps_"): ROW,
}
"""File and text of each line whose product of two run-time values in 32 bits may be part of an address, and why it is
small."""
SAMPLE = """
#include <stdint.h>
extern "C" __global__ void sample(const int* table, int* out, int row, int width) {{
  out[threadIdx.x] = table[{offset} + threadIdx.x];
}}
"""


@pytest.fixture(scope="module")
def nvcc() -> Path:
    wanted = compiler_report.Table.load().compiler
    found = compiler_report.nvcc_of(wanted)
    if found is None or shutil.which("g++", path=compiler_report.tools_path()) is None:
        pytest.skip(f"what is looked for is known of nvcc {wanted}, which needs g++; pip install '.[nvcc]' brings nvcc")
    return found


@pytest.fixture(scope="module")
def compiled(nvcc: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """File name -> PTX of every file of kernels."""
    folder = tmp_path_factory.mktemp("ptx")
    return {source.name: compile_ptx(nvcc, source, folder) for source in sorted(KERNELS.glob("*.cu"))}


@pytest.mark.parametrize(
    ("offset", "lines"),
    [
        ("row * width", {4}),
        ("(int64_t)(row * width)", {4}),
        ("(int64_t)(row * width + 7) * 3", {4}),
        ("(int64_t)row * width", set()),
        ("row * (int64_t)width", set()),
        ("row * 5120", set()),
    ],
)
def test_a_product_that_is_widened_too_late_is_found(offset: str, lines: set[int], nvcc: Path, tmp_path: Path) -> None:
    """Put in on purpose: the analysis sees it, and only it."""
    source = tmp_path / "sample.cu"
    source.write_text(SAMPLE.format(offset=offset))
    assert cut_products(compile_ptx(nvcc, source, tmp_path)) == {Line("sample.cu", line) for line in lines}


def test_offsets_are_64_bit(compiled: dict[str, str]) -> None:
    """GR-7: experts of more than 4 GB, caches and logits of more than 2^31 bytes. No kernel multiplies two run-time
    values in 32 bits on the way to an address, but for those that are small for a reason."""
    found = sorted({line for ptx in compiled.values() for line in cut_products(ptx)})
    known = {line: [key for key in BOUNDED if key[0] == line.file and key[1] in line.text] for line in found}
    unknown = [f"{line.file}:{line.number}: {line.text}" for line, keys in known.items() if not keys]
    assert not unknown, "multiply in int64_t, or say in BOUNDED why the product is small:\n" + "\n".join(unknown)
    unused = BOUNDED.keys() - {key for keys in known.values() for key in keys}
    assert not unused, "these products are gone"


def test_no_kernel_needs_multicast_of_the_switches(compiled: dict[str, str]) -> None:
    """TP-13: peers are reached by plain stores. Neither the compiled kernels nor the sources use NVLink's multicast
    objects."""
    assert len(compiled) > 5 and all(".entry" in ptx for name, ptx in compiled.items() if name != "library.cu")
    assert not [name for name, ptx in compiled.items() if "multimem" in ptx]


def test_no_source_asks_for_multicast_of_the_switches() -> None:
    """TP-13, where nothing can be compiled."""
    root = KERNELS.parents[1]
    files = [f for folder in ("cpp_plugins", "plugins", "builder", "runtime_py") for f in (root / folder).rglob("*.*")]
    sources = [f for f in files if f.suffix in (".cu", ".cuh", ".cpp", ".h", ".inc", ".py")]
    assert len(sources) > 50
    pattern = re.compile(r"multimem|cuMulticast|CU_MULTICAST|nvls_(?!enable)", re.IGNORECASE)
    assert not [f.name for f in sources if pattern.search(f.read_text())]
