"""Finds 32-bit products in compiled kernels that become part of an address.

A kernel's offset is a 64-bit number made of sizes that are only known at run time. Where two of them are multiplied in
32 bits and the product is widened afterwards, it is already cut off for tables of more than 2^31 bytes. PTX shows
that: a ``mul.lo`` or ``mad.lo`` of two 32-bit registers, and further on a ``mul.wide`` or ``cvt`` to 64 bits of what
came of it; a multiplication that is widened before is a ``mul.wide`` or a ``mul.lo.s64`` of its own. Products
with constants don't count: they are steps within a row. What is found is told by the line of the source that has the
product; those whose value is small for a reason are for the caller to know.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.compiler_report import ROOT

KERNELS = ROOT / "cpp_plugins" / "kernels"
_INSTRUCTION = re.compile(r"^(?:@!?%p\d+ )?([a-z0-9_.]+)\s+(%[a-z]+\d+), ?(.*);$")
_PRODUCT = re.compile(r"(mul|mad)\.lo\.[su]32$")
_WIDENS = re.compile(r"((mul|mad)\.wide|cvt\.[su]64)\.[su]32$")
_PASSES_ON = ("add.", "sub.", "mad.", "mul.", "shl.", "shr.", "div.", "mov.", "selp.", "or.", "xor.", "neg.", "min.")
"""A remainder, a mask or a maximum does not carry a cut product on as it is; a minimum may."""
_REGISTER = re.compile(r"%r\d+")


@dataclass(frozen=True, order=True)
class Line:
    """A line of a kernel's source."""

    file: str
    number: int

    @property
    def text(self) -> str:
        return (KERNELS / self.file).read_text().splitlines()[self.number - 1].strip()


def compile_ptx(nvcc: Path, source: Path, folder: Path) -> str:
    """The PTX of one file of kernels, with the lines of the source.

    Raises:
        RuntimeError: the compiler refused; the message has what it printed.
    """
    output = folder / f"{source.stem}.ptx"
    flags = ["-ptx", "-arch=sm_90", "-std=c++17", "-lineinfo", "--expt-relaxed-constexpr"]
    command: list[str | Path] = [
        nvcc,
        *flags,
        f"-I{ROOT / 'cpp_plugins' / 'include'}",
        f"-I{KERNELS}",
        source,
        "-o",
        output,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{source.name} does not compile:\n{done.stdout[-4000:]}")
    return output.read_text()


def cut_products(ptx: str) -> set[Line]:
    """Lines whose product of two 32-bit run-time values becomes part of a 64-bit number."""
    files = {number: Path(name).name for number, name in re.findall(r'^\s*\.file\s+(\d+) "([^"]+)"', ptx, re.M)}
    found: set[Line] = set()
    for body in re.split(r"^(?:\.visible |\.weak )*\.(?:entry|func)\b", ptx, flags=re.M)[1:]:
        found |= _of_function(list(_instructions(body, files)))
    return found


def _instructions(body: str, files: dict[str, str]) -> Iterator[tuple[str, str, list[str], Line | None]]:
    """Operation, destination, source registers of 32 bits, and line; of a product the factors alone come first."""
    line = None
    for text in map(str.strip, body.splitlines()):
        if (match := re.match(r"\.loc\s+(\d+) (\d+)", text)) and match[2] != "0":
            line = Line(files[match[1]], int(match[2]))
        elif match := _INSTRUCTION.match(text):
            yield match[1], match[2], [part.strip() for part in match[3].split(",")], line


def _of_function(instructions: list[tuple[str, str, list[str], Line | None]]) -> set[Line]:
    cut: dict[str, set[Line]] = {}
    found: set[Line] = set()
    before = -1
    # Until nothing is added: the end of a loop feeds its beginning.
    while before != (before := sum(map(len, cut.values()))):
        for operation, target, sources, line in instructions:
            registers = [s for s in sources if _REGISTER.fullmatch(s)]
            origins = set().union(*(cut.get(r, set()) for r in registers))
            if _WIDENS.match(operation):
                found |= origins
                continue
            if _PRODUCT.match(operation) and line and all(_REGISTER.fullmatch(s) for s in sources[:2]):
                origins = {line}
            elif not operation.startswith(_PASSES_ON):
                continue
            if origins and _REGISTER.fullmatch(target):
                cut.setdefault(target, set()).update(origins)
    return found
