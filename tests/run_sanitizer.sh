#!/usr/bin/env bash
# Runs tests of every kernel under compute-sanitizer, with the python3 of a machine that tests/run_gpu.sh runs on:
# racecheck (shared memory), memcheck (accesses out of bounds) and initcheck (reads of what nobody wrote). Eight
# processes at a time on one GPU; a line for each, and exit status 1 if one found something. Ranks that wait for each
# other are left out: under the tools kernels run one after the other.
#   bash tests/run_sanitizer.sh [DIRECTORY FOR LOGS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
logs=${1:-$(mktemp -d)}
mkdir -p "$logs"

source tests/link_packages.sh
export OMP_NUM_THREADS=2

# Test file, and which of its tests: enough for every kernel, few enough for tools that slow them down a hundredfold.
selections=(
  "attention_kernels|draft_against_float64 or slots_outside"
  "attention_kernels|target_against_float64"
  "cache_kernels|insert_against or accepted"
  "linear_kernels|small_products"
  "linear_kernels|nan_in_an_expert or clamp_acts or ascending"
  "mhc_kernels|boundary or coefficients"
  "mhc_mxfp8|special_values or refusals"
  "sampling_kernels|block_sizes or float64_noise_decides"
)

check() {
  local tool=$1 file=${2%%|*} tests=${2#*|} only=(--kernel-regex kns=dspark)
  # Which memory was written is known only if torch's kernels are watched too.
  [[ $tool == initcheck ]] && only=()
  local log=$logs/$tool-$file-${tests%% *}.log status=0
  compute-sanitizer --tool "$tool" "${only[@]}" --error-exitcode 9 --print-limit 5 \
    python3 -m pytest -p no:cacheprovider -q -x -m gpu "tests/gpu/test_$file.py" -k "$tests" >"$log" 2>&1 || status=$?
  echo "$tool $file ($tests): status $status; $(grep -E '(passed|failed)' "$log" | tail -1); $(grep SUMMARY "$log" | tail -1)"
  return "$status"
}
export -f check
export logs

for tool in racecheck memcheck initcheck; do
  for selection in "${selections[@]}"; do printf '%s\0%s\0' "$tool" "$selection"; done
done | xargs -0 -n 2 -P 8 bash -c 'check "$@" || exit 1' check
