#!/usr/bin/env bash
# Checks formatting (clang-format) and runs clang-tidy over every C++ source that the release build
# compiles. Needs scripts/setup.sh --dev. With arguments, only those files.
set -euo pipefail
cd "$(dirname "$0")/.."

cmake --preset release >/dev/null
mapfile -t sources < <(git ls-files '*.cc' '*.h' '*.cu' '*.cuh')
echo "lint: formatting of ${#sources[@]} files"
clang-format --dry-run -Werror "${sources[@]}"

if (($#)); then
  units=("$@")
else
  # What the release build compiles here (src/backend/cuda only where CUDA is found); fuzz targets and CUDA
  # kernels are compiled by other presets.
  mapfile -t units < <(git ls-files 'src/*.cc' 'bench/*.cc' | grep -v '^src/backend/cuda/' |
    while read -r file; do grep -qF "/$file\"" build/release/compile_commands.json && echo "$file"; done)
fi
echo "lint: clang-tidy on ${#units[@]} files"
# g++ knows warnings that clang does not.
printf '%s\n' "${units[@]}" | xargs -P "$(nproc)" -n 4 clang-tidy -p build/release --quiet \
  --extra-arg=-Wno-unknown-warning-option 2>/dev/null ||
  { echo "lint: not clean; where no finding is printed above, clang-tidy itself ended early" >&2; exit 1; }
echo "lint: clean"
