#!/usr/bin/env bash
# install_test.sh BUILD_DIR: installs into a prefix, builds the examples against it by CMake and by
# pkg-config, and runs them; links and calls every function that the public headers declare.
set -euo pipefail
build=$(realpath "$1")
source=$(realpath "$(dirname "$0")/../..")
prefix=$(mktemp -d)
trap 'rm -rf "$prefix"' EXIT

cmake --install "$build" --prefix "$prefix" >/dev/null
libdir=$(dirname "$(find "$prefix/lib" -name liboscar.so)")
for file in bin/oscar share/man/man1/oscar.1.gz share/bash-completion/completions/oscar \
  share/zsh/vendor-completions/_oscar share/fish/vendor_completions.d/oscar.fish \
  lib/systemd/system/oscar.service include/oscar/language_model.h include/oscar/engine.h \
  share/oscar/models/demo/config.json share/oscar/models/demo/eval/multikey_14k.jsonl; do
  test -s "$prefix/$file" || { echo "missing: $file" >&2; exit 1; }
done
# Whole paths only: a source folder such as /oscar is part of many names.
! grep -rnP "(?<![a-z0-9_.}/-])(\Q$source\E|\Q$build\E)(?![\w.-])" "$libdir/cmake" "$libdir/pkgconfig" || { echo "paths of the build tree were installed" >&2; exit 1; }

# The installed program finds the installed model.
answer=$("$prefix/bin/oscar" generate --prompt 'Sort these numbers: 3 1 2' --max-tokens 8 2>/dev/null || true)
test -n "$answer"

demo=$prefix/share/oscar/models/demo
# One program built one way or the other. No LD_LIBRARY_PATH: it must find the library by itself.
expect_embed() {
  local out
  out=$("$1" "$demo")
  grep -qx '2117' <<<"$out" && grep -q 'tokens cached' <<<"$out" || { echo "wrong answer: $out" >&2; exit 1; }
}
expect_streams() {
  local out
  out=$("$1" "$demo")
  grep -q '^answer 0 (stop, .*): 2117$' <<<"$out" && grep -q '^answer 1 (stop, .*): 139 169 205 599 702 972$' <<<"$out" ||
    { echo "wrong answers: $out" >&2; exit 1; }
  # At once: the short answer ends while the long one is still being thought about.
  test "$(grep -n '^answer 1' <<<"$out" | cut -d: -f1)" -lt "$(grep -n '^0 says' <<<"$out" | head -1 | cut -d: -f1)" ||
    { echo "one after the other: $out" >&2; exit 1; }
}
PKG_CONFIG_PATH=$libdir/pkgconfig
export PKG_CONFIG_PATH
for example in embed streams; do
  cmake -G Ninja -S "$source/examples/$example" -B "$prefix/$example-by-cmake" -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
  cmake --build "$prefix/$example-by-cmake" >/dev/null
  "expect_$example" "$prefix/$example-by-cmake/$example"
  # shellcheck disable=SC2046
  g++ -std=c++20 "$source/examples/$example/main.cc" $(pkg-config --cflags --libs oscar) -o "$prefix/$example-by-pkg-config"
  "expect_$example" "$prefix/$example-by-pkg-config"
done

# Every declared function links and works, and none that is exported is missing from the program that shows it.
# shellcheck disable=SC2046
g++ -std=c++20 "$source/tests/install/every_symbol.cc" $(pkg-config --cflags --libs oscar) -o "$prefix/every_symbol"
"$prefix/every_symbol" "$demo"
functions() { nm -DC "$@" | grep -oE ' [TU] oscar::.*' | cut -c4- | sort -u; }
missing=$(comm -23 <(functions --defined-only "$libdir/liboscar.so") <(functions --undefined-only "$prefix/every_symbol"))
test -z "$missing" || { echo "exported but not called by every_symbol.cc: $missing" >&2; exit 1; }

# A model that is not there is an error with a name, across the library's border too.
if "$prefix/embed-by-pkg-config" "$prefix/nowhere" 2>"$prefix/error"; then exit 1; fi
grep -q "$prefix/nowhere" "$prefix/error"
# Nothing but the public names leaves the library.
hidden=$(nm -DC --defined-only "$libdir/liboscar.so" | grep -E ' oscar::(Scheduler|KvPlan|Tokenizer|SequenceCache|PagePool)' || true)
test -z "$hidden" || { echo "inner names are exported: $hidden" >&2; exit 1; }
echo "install: prefix complete, examples built by CMake and by pkg-config and answered, every symbol linked"
