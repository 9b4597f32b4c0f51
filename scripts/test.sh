#!/usr/bin/env bash
# Installs what is missing, builds the release preset and runs every test labelled fast or slow.
# Tests labelled gpu or soak run on demand: ctest --test-dir build/release -L gpu
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
echo "test: building"
# scripts/demo.sh may have left tests, CUDA and structured output out.
cmake --preset release -DOSCAR_CUDA=AUTO -DOSCAR_XGRAMMAR=ON -DBUILD_TESTING=ON -DOSCAR_BUILD_BENCHMARKS=ON -DOSCAR_JOIN_SOURCES=ON
cmake --build --preset release
echo "test: running"
ctest --preset release
