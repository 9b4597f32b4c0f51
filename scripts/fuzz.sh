#!/usr/bin/env bash
# Fuzzes every target of tests/fuzz, or those named, with libFuzzer: for the night. Needs
# scripts/setup.sh --dev. The regular tests replay the corpora in seconds instead.
#
#   scripts/fuzz.sh [TARGET...]     OSCAR_FUZZ_RUNS (1000000) inputs each
#
# What is found new stays in build/fuzz/found/TARGET; a failing input is named at the end. Add it to
# tests/fuzz/corpus/TARGET together with the fix.
set -euo pipefail
cd "$(dirname "$0")/.."

runs=${OSCAR_FUZZ_RUNS:-1000000}
if (($#)); then
  targets=("$@")
else
  mapfile -t targets < <(sed -n 's/^oscar_fuzzer(\([a-z_]*\) .*/\1/p' tests/fuzz/CMakeLists.txt)
fi
for target in "${targets[@]}"; do
  [[ -d tests/fuzz/corpus/$target ]] || { echo "fuzz: there is no target $target in tests/fuzz" >&2; exit 2; }
done

cmake --preset fuzz >/dev/null
cmake --build --preset fuzz --target "${targets[@]}"
failed=()
for target in "${targets[@]}"; do
  found=build/fuzz/found/$target
  mkdir -p "$found"
  echo "fuzz: $target, $runs inputs"
  build/fuzz/fuzz/"$target" -runs="$runs" -max_len=16384 -timeout=30 -rss_limit_mb=4096 -print_final_stats=1 \
    -artifact_prefix="$found/failing-" "$found" "tests/fuzz/corpus/$target" >"$found.log" 2>&1 ||
    failed+=("$target")
  grep -E 'stat::number_of_executed_units|SUMMARY|Test unit written' "$found.log" || true
done
((${#failed[@]} == 0)) || { echo "fuzz: failed: ${failed[*]} (build/fuzz/found/TARGET.log)" >&2; exit 1; }
echo "fuzz: ${#targets[@]} targets, nothing found"
