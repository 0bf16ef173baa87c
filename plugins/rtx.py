"""What only TensorRT-RTX needs: a library under its unversioned name, and a cache of kernels that it compiles.

At the first plugin node its ONNX parser opens the unversioned ``libtensorrt_rtx.so``, which the wheels don't
ship, and ends the process when it fails. A library that is already loaded under that SONAME satisfies the loader, so if
needed, one is loaded before a parse: a few hundred bytes of ELF without code, whose SONAME is the missing name and
whose only dependency is the versioned library. It is made here, in memory, because neither a compiler nor a writable
site-packages can be taken for granted, and because (unlike a directory on LD_LIBRARY_PATH) it works in a process that
has already started, in whatever order the libraries were imported.

TensorRT-RTX compiles kernels for the GPU that it finds when contexts are made. The cache keeps them in a file
from one run to the next.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def unversioned_library_problem(version: str) -> str:
    """Make ``libtensorrt_rtx.so`` loadable for TensorRT-RTX ``version``; why that failed and what helps, or ""."""
    name, versioned = "libtensorrt_rtx.so", f"libtensorrt_rtx.so.{version.split('.')[0]}"
    try:
        try:
            found = ctypes.CDLL(name)
        except OSError:
            memory = os.memfd_create(name)
            try:
                os.write(memory, _alias_library(name, versioned))
                ctypes.CDLL(f"/proc/self/fd/{memory}")
            finally:
                os.close(memory)
            found = ctypes.CDLL(name)
        wanted = ctypes.CDLL(versioned)
        addresses = {ctypes.cast(lib.getInferLibVersion, ctypes.c_void_p).value for lib in (found, wanted)}
        problem = f"{name} is another library than the {versioned} that Python uses" if len(addresses) > 1 else ""
    except (OSError, AttributeError) as error:
        problem = f"{name} can't be loaded ({error})"
    return problem and (
        f"{problem}, and the ONNX parser of tensorrt_rtx {version} would end this process at the first plugin node. "
        f"Either put a directory with a link {name} -> {versioned} on LD_LIBRARY_PATH before Python starts, or preload "
        f"a shared object with SONAME {name} that is linked (--no-as-needed) to {versioned}"
    )


def _alias_library(soname: str, needed: str) -> bytes:
    """An ELF shared object without code: ``soname``, depending on ``needed``, for this machine."""
    with Path("/proc/self/exe").open("rb") as file:
        ident, _, machine = struct.unpack("<16sHH", file.read(20))
    header_bytes, segment_bytes, segments = 64, 56, 3
    symbols = header_bytes + segments * segment_bytes
    strings = symbols + 24  # after one empty symbol
    names = b"\0" + soname.encode() + b"\0" + needed.encode() + b"\0"
    names = names.ljust(-(-len(names) // 8) * 8, b"\0")
    dynamic = strings + len(names)
    # DT_SONAME, DT_NEEDED, DT_STRTAB, DT_STRSZ, DT_SYMTAB, DT_SYMENT, DT_NULL
    entries = ((14, 1), (1, 2 + len(soname)), (5, strings), (10, len(names)), (6, symbols), (11, 24), (0, 0))
    table = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    total = dynamic + len(table)

    def segment(kind: int, offset: int, size: int, align: int) -> bytes:
        return struct.pack("<IIQQQQQQ", kind, 6, offset, offset, offset, size, size, align)  # 6: readable, writable

    header = struct.pack("<16sHHIQQQIHHHHHH", ident, 3, machine, 1, 0, header_bytes, 0, 0, 64, 56, segments, 64, 0, 0)
    # PT_LOAD, PT_DYNAMIC, and PT_GNU_STACK, without which the loader asks for an executable stack.
    load = segment(1, 0, total, 0x10000) + segment(2, dynamic, len(table), 8) + segment(0x6474E551, 0, 0, 16)
    return (header + load).ljust(strings, b"\0") + names + table


class RuntimeCache:
    """Kernels compiled for this GPU, read from ``path`` if they are there, and the configuration that uses them."""

    def __init__(self, module: Any, engine: Any, path: Path):
        self._path = path
        self.config = engine.create_runtime_config()
        # Kernels that are replaced in the background would change the last bits of calls, but not of captured graphs.
        self.config.dynamic_shapes_kernel_specialization_strategy = (
            module.DynamicShapesKernelSpecializationStrategy.EAGER
        )
        self._cache = self.config.create_runtime_cache()
        if path.is_file() and not self._cache.deserialize(path.read_bytes()):
            logger.warning("%s: made on another GPU, driver or TensorRT-RTX; kernels are compiled again", path)
        self.config.set_runtime_cache(self._cache)

    def save(self) -> None:
        """Write what was compiled beside the engine, whole or not at all; where that can't be done, say so."""
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            partial.write_bytes(bytes(self._cache.serialize()))
            partial.replace(self._path)
        except OSError as error:
            logger.warning("compiled kernels are not kept, the next start takes as long as this one: %s", error)
