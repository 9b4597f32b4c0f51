#!/usr/bin/env bash
# Installs the Debian packages that building and testing oscar need, and fetches the source of
# xgrammar (structured output), which Debian does not have, into the user's cache. Asks nothing;
# works as root or with sudo; does nothing when everything is there. With --build only what the
# program itself needs, without structured output; with --dev also the tools for formatting, linting,
# fuzzing and packaging, and the browser that tests the page.
set -euo pipefail

packages=(
  g++ cmake ninja-build pkg-config ccache
  libeigen3-dev nlohmann-json3-dev libfmt-dev libspdlog-dev libcli11-dev libexpected-dev
  libzip-dev libpcre2-dev libutf8proc-dev libxxhash-dev libhwy-dev libcpp-httplib-dev libssl-dev
  libboost1.81-dev
  zlib1g-dev
)
test_packages=(
  libgtest-dev libgmock-dev libbenchmark-dev xz-utils curl ca-certificates openssl
  python3 python3-pytest python3-httpx python3-prometheus-client python3-jsonschema
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
install_missing() {
  local as_root=() log
  if [[ $(id -u) -ne 0 ]]; then
    command -v sudo >/dev/null || { echo "setup: run as root or install sudo; missing packages: ${missing[*]}" >&2; exit 1; }
    as_root=(sudo)
  fi
  echo "setup: installing ${#missing[@]} Debian packages: ${missing[*]}"
  log=$(mktemp)
  run() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive "$@" >"$log" 2>&1 || { cat "$log" >&2; rm -f "$log"; echo "setup: failed: $*" >&2; exit 1; }; }
  run apt-get update
  run apt-get install -y --no-install-recommends "${missing[@]}"
  rm -f "$log"
}

# The version is that of cmake/OscarXgrammar.cmake; PyPI has its source, and nothing of it is run.
xgrammar_version=0.2.8
xgrammar_sha256=8305646fd2b319d6c3003f51a1665e54cbbe9cba1fb636bc41d0b46434ccbb80
xgrammar_url=https://files.pythonhosted.org/packages/03/0f/29f521535729be740779c2c98b630ef6607cf28be9b669895dd2b821ff63/xgrammar-$xgrammar_version.tar.gz

fetch_xgrammar() {
  local folder=${OSCAR_XGRAMMAR_SOURCE:-${XDG_CACHE_HOME:-$HOME/.cache}/oscar/xgrammar-$xgrammar_version}
  if [[ -f $folder/include/xgrammar/xgrammar.h ]]; then
    echo "setup: xgrammar $xgrammar_version is in $folder"
    return
  fi
  local work archive
  mkdir -p "$(dirname "$folder")"
  work=$(mktemp -d "$(dirname "$folder")/fetch.XXXXXX")
  archive=$work/xgrammar-$xgrammar_version.tar.gz
  echo "setup: fetching xgrammar $xgrammar_version (2.7 MB)"
  if ! curl -fsSL --retry 3 --max-time 300 -o "$archive" "$xgrammar_url"; then
    rm -rf "$work"
    echo "setup: could not fetch $xgrammar_url" >&2
    echo "setup: unpack that file to $folder by hand, or build without structured output (-DOSCAR_XGRAMMAR=OFF)" >&2
    exit 1
  fi
  if ! echo "$xgrammar_sha256  $archive" | sha256sum --check --status; then
    rm -rf "$work"
    echo "setup: $xgrammar_url is not the file that was expected (sha256 differs)" >&2
    exit 1
  fi
  # Only what is compiled, and its terms. Moved into place whole: two runs at once do not meet.
  tar -xzf "$archive" -C "$work" --no-same-owner --strip-components=1 "xgrammar-$xgrammar_version"/{LICENSE,NOTICE,include,cpp} \
    "xgrammar-$xgrammar_version"/3rdparty/{dlpack/include,dlpack/LICENSE,picojson}
  rm -f "$archive"
  chmod 755 "$work"
  if ! mv -T "$work" "$folder" 2>/dev/null; then
    rm -rf "$work"
    [[ -f $folder/include/xgrammar/xgrammar.h ]] || { echo "setup: $folder is in the way: remove it" >&2; exit 1; }
  fi
}

if ((${#missing[@]})); then
  install_missing
else
  echo "setup: all ${#packages[@]} Debian packages are installed"
fi
if [[ ${1:-} != --build ]]; then fetch_xgrammar; fi
echo "setup: done"
