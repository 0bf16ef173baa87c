"""Packaging: maps the repository's folders into the ``dspark_trt`` namespace."""

from setuptools import setup

FOLDERS = {
    "dspark_trt.builder": "builder",
    "dspark_trt.builder.checkpoint": "builder/checkpoint",
    "dspark_trt.builder.model": "builder/model",
    "dspark_trt.plugins": "plugins",
    "dspark_trt.runtime_py": "runtime_py",
}

setup(
    packages=list(FOLDERS),
    package_dir=FOLDERS,
    package_data={"": ["README.md", "py.typed"]},
)
