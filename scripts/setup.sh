#!/usr/bin/env bash
# Installs the Debian packages that building and testing oscar need. Asks nothing; works as root or
# with sudo; does nothing when everything is there. With --dev also the tools for formatting,
# linting and fuzzing, and the browser that tests the page.
set -euo pipefail

packages=(
  g++ cmake ninja-build ccache pkg-config
  libeigen3-dev nlohmann-json3-dev libfmt-dev libspdlog-dev libcli11-dev libexpected-dev
  libzip-dev libpcre2-dev libutf8proc-dev libxxhash-dev libhwy-dev libcpp-httplib-dev libssl-dev
  zlib1g-dev
  libgtest-dev libgmock-dev libbenchmark-dev xz-utils
  python3 python3-pytest python3-httpx python3-prometheus-client
)
if [[ "${1:-}" == "--dev" ]]; then
  packages+=(clang clang-format clang-tidy libclang-rt-14-dev python3-jinja2 chromium)
elif [[ $# -gt 0 ]]; then
  echo "usage: scripts/setup.sh [--dev]" >&2
  exit 2
fi

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q '^install ok installed$' || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  echo "setup: all ${#packages[@]} Debian packages are installed"
  exit 0
fi

as_root=()
if [[ $(id -u) -ne 0 ]]; then
  command -v sudo >/dev/null || { echo "setup: run as root or install sudo; missing packages: ${missing[*]}" >&2; exit 1; }
  as_root=(sudo)
fi
echo "setup: installing ${#missing[@]} Debian packages: ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
run() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive "$@" >"$log" 2>&1 || { cat "$log" >&2; echo "setup: failed: $*" >&2; exit 1; }; }
run apt-get update
run apt-get install -y --no-install-recommends "${missing[@]}"
echo "setup: done"
