#!/usr/bin/env bash
# Installs what is missing, builds the release preset and runs every test labelled fast or slow.
# Tests labelled gpu or soak run on demand: ctest --test-dir build/release -L gpu
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
echo "test: building"
cmake --preset release
cmake --build --preset release
echo "test: running"
ctest --preset release
