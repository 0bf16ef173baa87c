#!/usr/bin/env bash
# Runs the tests marked gpu (one NVIDIA GPU) and gpu2 (two) with the python3 of the machine, which
# needs torch with CUDA, mpi4py and pytest. Extra arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/link_packages.sh
python3 -m pytest -q -m "gpu or gpu2" tests/gpu "$@"
