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

# Operations, test file, and which of its tests: every operation's kernels, few enough cases for tools that slow them down
# a hundredfold. tests/unit/test_sanitizer_selections.py holds that no operation and no line is empty.
selections=(
  "DraftAttention|attention_kernels|draft_against_float64 or slots_outside"
  "DraftAttention|attention_kernels|batches_against_float64 and [4-v4.1 or batches_against_float64 and [64-v4.1-b"
  "TargetAttention|attention_kernels|target_against_float64"
  "ContextKvInsert|cache_kernels|insert_against or accepted"
  "QuantizedLinear|linear_kernels|small_products"
  "RoutedExperts|linear_kernels|nan_in_an_expert or clamp_acts or ascending"
  "MhcCoefficients|mhc_kernels|coefficients"
  "MhcAllReduce MhcAllReduceResidualOnly HcCollapse|mhc_kernels|boundary"
  "MhcAllReduce|mhc_mxfp8|special_values or refusals"
  "MarkovSampling|sampling_kernels|block_sizes or float64_noise_decides"
  "MarkovSamplingSharded|sampling_split|equals_whole and 264-32-1- or equals_whole and 1000-128-1-"
)

check() {
  local tool=$1 ops file tests only=(--kernel-regex kns=dspark)
  IFS='|' read -r ops file tests <<<"$2"
  # Which memory was written is known only if torch's kernels are watched too.
  [[ $tool == initcheck ]] && only=()
  local log="$logs/$tool-$file-${tests//[^a-z0-9]/_}.log" status=0
  compute-sanitizer --tool "$tool" "${only[@]}" --error-exitcode 9 --print-limit 5 \
    python3 -m pytest -p no:cacheprovider -q -x -m gpu "tests/gpu/test_$file.py" -k "$tests" >"$log" 2>&1 || status=$?
  echo "$tool $ops ($file: $tests): status $status; $(grep -E '(passed|failed)' "$log" | tail -1); $(grep SUMMARY "$log" | tail -1)"
  return "$status"
}
export -f check
export logs

for tool in racecheck memcheck initcheck; do
  for selection in "${selections[@]}"; do printf '%s\0%s\0' "$tool" "$selection"; done
done | xargs -0 -n 2 -P 8 bash -c 'check "$@" || exit 1' check
