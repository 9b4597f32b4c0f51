#!/usr/bin/env bash
# scripts/package-test.sh FILE.deb: installs the package in a bare Debian 12 (debootstrap, in a temporary folder), uses it, builds
# the example against it, purges it and looks for what it left behind. Needs root and a Debian mirror (MIRROR).
set -euo pipefail
cd "$(dirname "$0")/.."
deb=${1:?usage: scripts/package-test.sh FILE.deb}
[[ $(id -u) -eq 0 ]] || { echo "package-test: must be root to make a chroot" >&2; exit 1; }

mirror=${MIRROR:-http://deb.debian.org/debian}
root=$(mktemp -d -t oscar-package.XXXXXX)
chmod 755 "$root"  # apt reads as a user of its own
clean() {
  if mountpoint -q "$root/proc"; then umount "$root/proc"; fi
  if grep -q " $root/" /proc/mounts; then echo "package-test: $root is still in use and stays" >&2; return; fi
  rm -rf --one-file-system "$root"
}
trap clean EXIT
trap 'echo "package-test: failed in line $LINENO" >&2' ERR
echo "package-test: a bare Debian 12 in $root"
debootstrap --variant=minbase bookworm "$root" "$mirror" >"$root.log" 2>&1 || { tail -5 "$root.log" >&2; exit 1; }
rm -f "$root.log"
mount -t proc proc "$root/proc"
cp /etc/resolv.conf "$root/etc/resolv.conf"
cp "$deb" "$root/tmp/package.deb"
mkdir "$root/tmp/embed" && cp examples/embed/* "$root/tmp/embed"
inside() { chroot "$root" /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive bash -euo pipefail -c "$1"; }

# What building the example needs comes first, so that the comparison below sees the package alone.
inside 'apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ cmake make pkg-config libexpected-dev >/dev/null 2>&1'
inside 'apt-get install -y -qq --no-install-recommends $(dpkg-deb -f /tmp/package.deb Depends | sed "s/([^)]*)//g; s/,/ /g; s/|[^ ]*//g") >/dev/null'
list='find / -xdev \( -path /proc -o -path /tmp -o -path /var/log -o -path /var/lib/dpkg -o -path /var/cache -o -path /var/lib/apt \) -prune -o -print | sort'
inside "$list" >"$root/tmp/before"
inside 'apt-get install -y -qq /tmp/package.deb >/dev/null'
echo "package-test: installed: $(inside 'dpkg-query -W oscar && dpkg -L oscar | wc -l' | tr '\n' ' ')files"
inside 'oscar --version && test -s /usr/share/man/man1/oscar.1.gz && test -f /etc/default/oscar && grep -qx "ExecStart=/usr/bin/oscar serve" /lib/systemd/system/oscar.service'
echo '[{"role": "user", "content": "Add these numbers: 170 710 302 122 813"}]' >"$root/tmp/messages.json"
answer=$(inside 'oscar generate --messages /tmp/messages.json 2>/dev/null' | tail -1)
[[ $answer == *2117 ]] || { echo "package-test: wrong answer: $answer" >&2; exit 1; }
echo "package-test: the installed program answers"
inside 'cd /tmp/embed && cmake -B build >/dev/null && cmake --build build >/dev/null && build/embed /usr/share/oscar/models/demo | grep -x 2117'
inside 'cd /tmp/embed && g++ -std=c++20 main.cc $(pkg-config --cflags --libs oscar) -o by-pkg-config && ./by-pkg-config /usr/share/oscar/models/demo | grep -x 2117'
echo "package-test: the example builds against it, by CMake and by pkg-config, and answers"
mkdir -p "$root/var/lib/oscar" && touch "$root/var/lib/oscar/prefix"
inside 'apt-get purge -y -qq oscar >/dev/null'
inside "$list" >"$root/tmp/after"
if ! diff "$root/tmp/before" "$root/tmp/after"; then echo "package-test: the purge left or took files" >&2; exit 1; fi
echo "package-test: purged; nothing is left"
