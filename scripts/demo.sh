#!/usr/bin/env bash
# Installs what is missing, builds the oscar binary and shows it at work: a number hidden in 14,000
# tokens, asked of the demo model on a BF16 cache and on a 2-bit one.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
echo "demo: building build/release/oscar"
cmake --preset release -DBUILD_TESTING=ON >/dev/null
cmake --build --preset release --target oscar

for kv in bf16 naive oscar+; do
  echo
  echo "demo: $kv cache"
  build/release/oscar generate --messages examples/needle-14k.json --kv "$kv" --stats
done
