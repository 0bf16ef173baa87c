"""Packaging: maps the repository's folders into the ``dspark_trt`` namespace, and compiles the CUDA kernels.

Where nvcc and CMake are found, the wheel carries ``libdspark_plugins.so`` and the tag of its platform; elsewhere it is
pure Python and runs on CPUs. Editable installs compile nothing: there the library is looked for where
``cmake -S cpp_plugins -B cpp_plugins/build`` leaves it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDERS = {
    "dspark_trt.builder": "builder",
    "dspark_trt.builder.checkpoint": "builder/checkpoint",
    "dspark_trt.builder.model": "builder/model",
    "dspark_trt.plugins": "plugins",
    "dspark_trt.runtime_py": "runtime_py",
}
SOURCE = Path(__file__).resolve().parent / "cpp_plugins"


def find_nvcc() -> str | None:
    """Path of nvcc: ``CUDACXX`` alone where it is set (empty: none), else the first that is found.

    Searched are ``CUDA_HOME``, ``CUDA_PATH``, PATH and the usual folder, in this order.
    """
    if "CUDACXX" in os.environ:
        return shutil.which(os.environ["CUDACXX"])
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))
    places = [f"{home}/bin/nvcc" for home in homes if home] + ["nvcc", "/usr/local/cuda/bin/nvcc"]
    return next(filter(None, map(shutil.which, places)), None)


NVCC, CMAKE = find_nvcc(), shutil.which("cmake")


def say(what: str) -> None:
    print(f"dspark-trt: {what}", file=sys.stderr, flush=True)


class Wheel(bdist_wheel):
    """A wheel for one platform when it carries the library, which is the same for every Python."""

    def run(self) -> None:
        if NVCC is None:
            say(
                "nvcc was not found, so the CUDA kernels are left out (CPU only); set CUDACXX to its path, which for "
                "the nvcc extra is nvidia/cu13/bin/nvcc in site-packages"
            )
        elif CMAKE is None:
            say(f"found {NVCC} but no cmake, so the CUDA kernels are left out (CPU only); pip install cmake")
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


class Kernels(build_ext):
    """Runs CMake, which reads ``CUDAARCHS``, ``CUDAFLAGS`` and ``CMAKE_GENERATOR`` itself, with ``CMAKE_ARGS``."""

    def run(self) -> None:
        if self.inplace or self.editable_mode:
            say("an editable install compiles no CUDA kernels; cpp_plugins/README.md has the two commands that do")
            return
        assert NVCC is not None and CMAKE is not None
        # Without PYTHONPATH: it belongs to pip's build environment, and a cmake from pip is a script of another one.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"CUDACXX": NVCC}
        environment.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count()))
        if shutil.which("ninja"):
            environment.setdefault("CMAKE_GENERATOR", "Ninja")
        arguments = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_INSTALL_LIBDIR=."]
        arguments += shlex.split(environment.get("CMAKE_ARGS", ""))
        package = Path(self.build_lib).resolve() / "dspark_trt" / "plugins"
        say(f"compiling the CUDA kernels with {NVCC}")
        with tempfile.TemporaryDirectory() as build:
            for command in (
                [CMAKE, "-S", str(SOURCE), "-B", build, *arguments],
                [CMAKE, "--build", build],
                [CMAKE, "--install", build, "--prefix", str(package)],
            ):
                if subprocess.run(command, env=environment).returncode:
                    sys.exit(
                        f"dspark-trt: {shlex.join(command)} failed, see above; to install without the CUDA kernels, "
                        "set CUDACXX to nothing (CUDACXX= pip install ...)"
                    )
        say(f"compiled {', '.join(sorted(path.name for path in package.glob('*.so')))}")

    def get_source_files(self) -> list[str]:
        return []

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


setup(
    packages=list(FOLDERS),
    package_dir=FOLDERS,
    package_data={"": ["README.md", "py.typed"]},
    ext_modules=[Extension("dspark_trt.plugins.dspark_plugins", [])] if NVCC and CMAKE else [],
    cmdclass={"bdist_wheel": Wheel, "build_ext": Kernels},
)
