"""What tests on a GPU share: they skip, saying why, where there is none, and build the kernels where they can."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dspark_trt.builder.engine_dir import EngineDir, build_engine_dir
from dspark_trt.plugins import tensorrt_api
from dspark_trt.plugins.library import TRT_LIBRARY_NAME, find_library, load_library
from dspark_trt.plugins.tensorrt_api import TensorRT

from tests.gpu.engine_calls import Open, build_config, convert_tiny

CPP_PLUGINS = Path(__file__).resolve().parents[2] / "cpp_plugins"


def pytest_configure() -> None:
    # Ranks played by streams of one GPU wait for each other, so no two streams may share a hardware queue.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        gpus, wanted = torch.cuda.device_count(), 2 if item.get_closest_marker("gpu2") else 1
        if gpus < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} NVIDIA GPU(s) that torch can use, found {gpus}"))


@pytest.fixture(scope="session", autouse=True)
def library() -> Path:
    """Path of the loaded kernel library, built for the present GPU if there is none yet."""
    path = find_library()
    if path is None:
        missing = [tool for tool in ("cmake", "nvcc") if shutil.which(tool) is None]
        if missing:
            pytest.skip(f"no kernel library, and no {' or '.join(missing)} to build one")
        major, minor = torch.cuda.get_device_capability()
        build = CPP_PLUGINS / "build"
        for command in (
            ["cmake", "-S", CPP_PLUGINS, "-B", build, f"-DCMAKE_CUDA_ARCHITECTURES={major}{minor}"],
            ["cmake", "--build", build, "-j", str(os.cpu_count())],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                pytest.fail(f"{' '.join(map(str, command))} failed:\n{(done.stdout + done.stderr)[-4000:]}")
        path = find_library()
    load_library()
    assert path is not None
    return path


@pytest.fixture
def seed() -> int:
    """A fresh seed for a test's random inputs; shown with the test's output when it fails."""
    value = int.from_bytes(os.urandom(4), "little")
    print(f"seed {value}")
    return value


@pytest.fixture(scope="session")
def api() -> TensorRT:
    found = tensorrt_api.probe("tensorrt")
    if isinstance(found, str):
        pytest.skip(f"needs enterprise TensorRT 8.6 or later, which is not here ({found})")
    if found.is_8 and find_library(TRT_LIBRARY_NAME) is None:
        pytest.skip(f"{found} takes plugins from {TRT_LIBRARY_NAME}: build cpp_plugins with -DTENSORRT_INCLUDE_DIR=...")
    print(f"{found} on {torch.cuda.get_device_name()}")
    return found


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The trained tiny models, converted for a number of ranks."""
    root = tmp_path_factory.mktemp("shards")
    return lambda ranks: convert_tiny(root, ranks)


@pytest.fixture(scope="session")
def tensorrt_engines(api: TensorRT, shards: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Open:
    """The engines of an activation type and number of ranks, both networks in the plugin lowering."""
    root = tmp_path_factory.mktemp("engines")
    made: dict[tuple[str, int], EngineDir] = {}

    def build(dtype: str, ranks: int) -> EngineDir:
        if (dtype, ranks) not in made:
            output = root / f"{dtype}_{ranks}"
            made[dtype, ranks] = build_engine_dir(shards(ranks), output, build_config(dtype), api=api, workers=4)
        return made[dtype, ranks]

    return build
