#!/usr/bin/env bash
# install_test.sh BUILD_DIR: installs into a prefix, builds the example against it both ways, runs it.
set -euo pipefail
build=$(realpath "$1")
source=$(realpath "$(dirname "$0")/../..")
prefix=$(mktemp -d)
trap 'rm -rf "$prefix"' EXIT

cmake --install "$build" --prefix "$prefix" >/dev/null
libdir=$(dirname "$(find "$prefix/lib" -name liboscar.so)")
for file in bin/oscar share/man/man1/oscar.1.gz share/bash-completion/completions/oscar \
  share/zsh/vendor-completions/_oscar share/fish/vendor_completions.d/oscar.fish \
  lib/systemd/system/oscar.service include/oscar/language_model.h \
  share/oscar/models/demo/config.json share/oscar/models/demo/eval/multikey_14k.jsonl; do
  test -s "$prefix/$file" || { echo "missing: $file" >&2; exit 1; }
done
# Whole paths only: a source folder such as /oscar is part of many names.
! grep -rnP "(?<![a-z0-9_.}/-])(\Q$source\E|\Q$build\E)(?![\w.-])" "$libdir/cmake" "$libdir/pkgconfig" || { echo "paths of the build tree were installed" >&2; exit 1; }

# The installed program finds the installed model.
answer=$("$prefix/bin/oscar" generate --prompt 'Sort these numbers: 3 1 2' --max-tokens 8 2>/dev/null || true)
test -n "$answer"

expect() { # what the example says, from a program built one way or the other
  local out
  out=$(LD_LIBRARY_PATH=$libdir "$1" "$prefix/share/oscar/models/demo")
  grep -qx '2117' <<<"$out" && grep -q 'tokens cached' <<<"$out" || { echo "wrong answer: $out" >&2; exit 1; }
}
cmake -G Ninja -S "$source/examples/embed" -B "$prefix/by-cmake" -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
cmake --build "$prefix/by-cmake" >/dev/null
expect "$prefix/by-cmake/embed"
PKG_CONFIG_PATH=$libdir/pkgconfig
export PKG_CONFIG_PATH
# shellcheck disable=SC2046
g++ -std=c++20 "$source/examples/embed/main.cc" $(pkg-config --cflags --libs oscar) -o "$prefix/by-pkg-config"
expect "$prefix/by-pkg-config"

# A model that is not there is an error with a name, across the library's border too.
if LD_LIBRARY_PATH=$libdir "$prefix/by-pkg-config" "$prefix/nowhere" 2>"$prefix/error"; then exit 1; fi
grep -q "$prefix/nowhere" "$prefix/error"
# Nothing but the public names leaves the library.
hidden=$(nm -DC --defined-only "$libdir/liboscar.so" | grep -E ' oscar::(Scheduler|KvPlan|Tokenizer|SequenceCache|PagePool)' || true)
test -z "$hidden" || { echo "inner names are exported: $hidden" >&2; exit 1; }
echo "install: prefix complete, example built by CMake and by pkg-config, and answered"
