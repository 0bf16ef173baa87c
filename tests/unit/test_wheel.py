"""A wheel built from the repository installs into an empty environment and works there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from dspark_trt.plugins.library import LIBRARY_NAME, PLUGIN_ABI

from tests import compiler_report

ROOT = Path(__file__).parents[2]
LIBRARY = f"dspark_trt/plugins/{LIBRARY_NAME}"


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


def build_wheel(source: Path, out: Path, **environment: str) -> tuple[Path | None, str]:
    """The wheel, or None if the build failed, and what was printed."""
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", out, source],
        cwd=source.parent,
        env={k: v for k, v in os.environ.items() if k not in ("CUDAARCHS", "CUDAFLAGS", "CMAKE_ARGS")} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wheels = list(out.glob("*.whl"))
    assert len(wheels) == (done.returncode == 0), done.stdout
    return wheels[0] if wheels else None, done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the package is made of, without anything that was built."""
    source = tmp_path_factory.mktemp("wheel") / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("builder", "plugins", "runtime_py", "cpp_plugins"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "build", "*.so"))
    return source


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """The wheel of a machine without nvcc."""
    wheel, output = build_wheel(source, source.parent / "pure", CUDACXX="")
    assert wheel is not None and "nvcc was not found, so the CUDA kernels are left out" in output
    return wheel


@pytest.fixture(scope="module")
def kernel_wheel(source: Path) -> Path:
    """A wheel with the kernels, compiled for one architecture."""
    nvcc = next(iter(compiler_report.find_nvcc()), None)
    missing = compiler_report.missing_tools() + ([] if nvcc else ["nvcc"])
    if missing:
        pytest.skip(f"not found: {', '.join(missing)}; pip install '.[nvcc]' brings all but g++")
    wheel, output = build_wheel(
        source,
        source.parent / "kernels",
        PATH=compiler_report.tools_path(),
        CUDACXX=str(nvcc),
        CUDAARCHS="90-real",
        CMAKE_ARGS="-DCMAKE_VERBOSE_MAKEFILE=ON",
    )
    assert wheel is not None, output[-4000:]
    assert f"compiling the CUDA kernels with {nvcc}" in output and f"compiled {LIBRARY_NAME}" in output
    assert "compute_90" in output and "compute_80" not in output, "CUDAARCHS and CMAKE_ARGS must reach CMake"
    return wheel


@pytest.fixture
def failing_nvcc(tmp_path: Path) -> Path:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho this nvcc fails >&2\nexit 1\n")
    nvcc.chmod(0o755)
    return nvcc


def test_wheel_holds_only_its_namespace(wheel: Path) -> None:
    """Nothing called builder or plugins may land at the top of site-packages."""
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name.endswith("-py3-none-any.whl") and not any(".so" in n for n in names)
    assert {n.split("/")[0] for n in names} == {"dspark_trt", f"{wheel.name.split('-py3')[0]}.dist-info"}
    for package in ("builder", "builder/checkpoint", "builder/model", "plugins", "runtime_py"):
        assert f"dspark_trt/{package}/__init__.py" in names
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """The commands run from any directory: a checkpoint is converted, and inspected."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    # The release that these tests run with: another one may be a download of gigabytes.
    release = torch.__version__.split("+")[0]
    run(python, "-m", "pip", "install", "--quiet", f"torch=={release}", cwd=tmp_path)
    run(python, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    binaries = environment / "bin"
    checkpoint = ROOT / "examples" / "tiny" / "checkpoint"
    run(binaries / "dspark-convert", "--checkpoint", checkpoint, "--output", "shards", "--tp-size", "2", cwd=tmp_path)
    assert {p.name for p in (tmp_path / "shards").iterdir()} >= {
        "config.json",
        "rank0.safetensors",
        "rank1.safetensors",
    }
    assert "rank shards" in run(binaries / "dspark-inspect", "shards", cwd=tmp_path)
    assert "torch on the CPU" in run(binaries / "dspark-inspect", cwd=tmp_path)


def test_wheel_with_kernels_loads_them_without_a_gpu(kernel_wheel: Path, tmp_path: Path) -> None:
    """Nothing of torch or of a CUDA toolkit is there: the library brings the CUDA runtime that it needs."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert kernel_wheel.name.endswith(f"-py3-none-{platform}.whl")
    assert [n for n in zipfile.ZipFile(kernel_wheel).namelist() if n.endswith(LIBRARY_NAME)] == [LIBRARY]
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", "site", kernel_wheel, cwd=tmp_path)
    load = (
        "import sys; sys.path.insert(0, 'site'); from dspark_trt.plugins.library import load_library;"
        "library = load_library(); print(library._name, library.dspark_plugin_abi())"
    )
    assert run(sys.executable, "-I", "-S", "-c", load, cwd=tmp_path).split() == [
        str(tmp_path / "site" / LIBRARY),
        str(PLUGIN_ABI),
    ]


def test_nvcc_without_cmake_gives_a_pure_wheel(source: Path, failing_nvcc: Path, tmp_path: Path) -> None:
    wheel, output = build_wheel(source, tmp_path / "out", CUDACXX=str(failing_nvcc), PATH=str(tmp_path))
    assert wheel is not None and wheel.name.endswith("-py3-none-any.whl"), output
    assert f"found {failing_nvcc} but no cmake, so the CUDA kernels are left out" in output


def test_kernels_that_do_not_compile_end_the_installation(source: Path, failing_nvcc: Path, tmp_path: Path) -> None:
    """A package without the kernels that were asked for would run on the CPU, and nobody would know why."""
    if shutil.which("cmake", path=compiler_report.tools_path()) is None:
        pytest.skip("there is no cmake; pip install '.[nvcc]' brings it")
    path = compiler_report.tools_path()
    wheel, output = build_wheel(source, tmp_path / "out", CUDACXX=str(failing_nvcc), PATH=path)
    assert wheel is None and f"compiling the CUDA kernels with {failing_nvcc}" in output
    assert "to install without the CUDA kernels, set CUDACXX to nothing" in output


def test_an_editable_installation_compiles_nothing(source: Path, failing_nvcc: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    done = subprocess.run(
        [environment / "bin" / "python", "-m", "pip", "install", "-v", "--no-deps", "--editable", source],
        env={**os.environ, "CUDACXX": str(failing_nvcc), "PATH": compiler_report.tools_path()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "this nvcc fails" not in done.stdout + done.stderr
    assert "an editable install compiles no CUDA kernels" in done.stdout + done.stderr
