#!/usr/bin/env bash
# Installs the Debian packages that building and testing oscar need. Asks nothing; works as root or
# with sudo; does nothing when everything is there. With --build only what the program itself needs;
# with --dev also the tools for formatting, linting, fuzzing and packaging, and the browser that
# tests the page.
set -euo pipefail

packages=(
  g++ cmake ninja-build pkg-config ccache
  libeigen3-dev nlohmann-json3-dev libfmt-dev libspdlog-dev libcli11-dev libexpected-dev
  libzip-dev libpcre2-dev libutf8proc-dev libxxhash-dev libhwy-dev libcpp-httplib-dev libssl-dev
  libboost1.81-dev
  zlib1g-dev
)
test_packages=(
  libgtest-dev libgmock-dev libbenchmark-dev xz-utils curl openssl
  python3 python3-pytest python3-httpx python3-prometheus-client
)
case "${1:-}" in
  --build) ;;
  "") packages+=("${test_packages[@]}") ;;
  --dev)
    packages+=("${test_packages[@]}" clang clang-format clang-tidy libclang-rt-14-dev python3-jinja2
      chromium dpkg-dev file lintian debootstrap) ;;
  *)
    echo "usage: scripts/setup.sh [--build | --dev]" >&2
    exit 2 ;;
esac

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
