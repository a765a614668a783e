#!/usr/bin/env bash
# Builds the fuzz targets with clang and runs each for SECONDS over its corpus: tests/fuzz/run.sh SECONDS [TARGET...]
# (FUZZ_JOBS of them at a time), or only builds them: tests/fuzz/run.sh build [TARGET...]
# Exits non-zero on a finding; the input that shows it is kept under build/fuzz/findings, and `fuzz_TARGET FILE` replays it.
set -euo pipefail

seconds="${1:?usage: tests/fuzz/run.sh SECONDS|build [TARGET...]}"
shift
targets=("$@")
[[ ${#targets[@]} -gt 0 ]] || targets=(header config server_engine worker_engine hub_frame point_to_point checked rendezvous)

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
build="${FUZZ_BUILD:-$root/build/fuzz}"
compiler="${FUZZ_CXX:-$(command -v clang++-14 || command -v clang++ || true)}"
if [[ -z "$compiler" ]]; then
  echo "fuzzing needs clang++ (apt install clang-14 libclang-rt-14-dev), or set FUZZ_CXX" >&2
  exit 2
fi

cmake -S "$root" -B "$build" -G Ninja -DCMAKE_CXX_COMPILER="$compiler" -DHERRING_FUZZ=ON > /dev/null
jobs="${FUZZ_JOBS:-2}"
ninja -C "$build" -j "$jobs" "${targets[@]/#/fuzz_}"
[[ "$seconds" == build ]] && exit 0

# Of one target; what it printed is in its log.
fuzz() {
  local target="$1"
  # What a run finds new stays in the build folder: the committed corpus is read, never written.
  mkdir -p "$build/corpus/$target" "$build/findings/$target"
  options=(-max_total_time="$seconds" -timeout=20 -rss_limit_mb=1024 -max_len=2048 -print_final_stats=1
           -artifact_prefix="$build/findings/$target/")
  dictionary="$root/tests/fuzz/$target.dict"
  [[ -f "$dictionary" ]] && options+=(-dict="$dictionary")
  "$build/tests/fuzz/fuzz_$target" "${options[@]}" "$build/corpus/$target" "$root/tests/fuzz/corpus/$target" \
    > "$build/$target.log" 2>&1
}

failed=()
for ((first = 0; first < ${#targets[@]}; first += jobs)); do
  together=("${targets[@]:first:jobs}")
  processes=()
  for target in "${together[@]}"; do
    fuzz "$target" &
    processes+=($!)
  done
  for index in "${!together[@]}"; do
    target="${together[index]}"
    echo "== fuzz_$target for $seconds s"
    if ! wait "${processes[index]}"; then
      failed+=("$target")
      tail -n 60 "$build/$target.log"
    else
      grep -E "^(Done|stat::number_of_executed_units)" "$build/$target.log"
    fi
  done
done

if [[ ${#failed[@]} -gt 0 ]]; then
  echo "findings in: ${failed[*]}; inputs in $build/findings" >&2
  exit 1
fi
