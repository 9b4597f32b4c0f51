#!/usr/bin/env bash
# Installs what building needs, builds the oscar binary alone (no tests, no CUDA, no xgrammar) and shows it at
# work: numbers hidden in 12,000 tokens, asked for on four caches. Arguments go to `oscar demo`;
# --serve leaves the server running. Doing it again only runs the demo again.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh --build
# A build that was configured before keeps its options.
if [[ ! -f build/release/CMakeCache.txt ]]; then
  echo "demo: configuring build/release"
  cmake --preset release -DBUILD_TESTING=OFF -DOSCAR_BUILD_BENCHMARKS=OFF -DOSCAR_CUDA=OFF -DOSCAR_XGRAMMAR=OFF -DOSCAR_JOIN_SOURCES=ON >/dev/null
fi
if [[ -e /dev/nvidia0 || -e /proc/driver/nvidia/version ]] && grep -q '^OSCAR_CUDA:STRING=OFF' build/release/CMakeCache.txt; then
  echo "demo: this machine has an NVIDIA GPU; the demo is built for the CPU alone."
  echo "demo: to use the GPU: docs/getting-started.md, \"On an NVIDIA GPU\" (nvcc, then cmake --preset release -DOSCAR_CUDA=ON)"
fi
echo "demo: building build/release/oscar (a few minutes the first time)"
cmake --build --preset release --target oscar
echo
exec build/release/oscar demo "$@"
