#!/usr/bin/env bash
# Proves that the README's two commands work where nothing was installed: makes a bare Debian 12 in
# a temporary folder, copies a clean clone of HEAD into it, runs the commands inside, timed, and
# removes the folder. Needs root, debootstrap and a Debian mirror (MIRROR, default deb.debian.org).
#   scripts/fresh-machine.sh [--demo-only]
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in
  "") commands=(scripts/demo.sh scripts/test.sh) ;;
  --demo-only) commands=(scripts/demo.sh) ;;
  *) echo "usage: scripts/fresh-machine.sh [--demo-only]" >&2; exit 2 ;;
esac
[[ $(id -u) -eq 0 ]] || { echo "fresh-machine: must be root to make a chroot" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "fresh-machine: install debootstrap" >&2; exit 1; }

mirror=${MIRROR:-http://deb.debian.org/debian}
root=$(mktemp -d -t oscar-fresh.XXXXXX)
chmod 755 "$root"  # apt reads as a user of its own
clean() {
  for place in proc dev/shm dev/pts; do mountpoint -q "$root/$place" && umount "$root/$place"; done
  # A mount that is still there would take the host's files with it.
  if grep -q " $root/" /proc/mounts; then echo "fresh-machine: $root is still in use and stays" >&2; return; fi
  rm -rf --one-file-system "$root"
}
trap clean EXIT

echo "fresh-machine: a bare Debian 12 from $mirror in $root"
debootstrap --variant=minbase bookworm "$root" "$mirror" >"$root.log" 2>&1 || { tail -5 "$root.log" >&2; exit 1; }
rm -f "$root.log"
# pts makes terminals possible, shm what some tests of threads use.
mount -t proc proc "$root/proc"
mkdir -p "$root/dev/shm" && mount -t tmpfs tmpfs "$root/dev/shm"
mount -t devpts devpts "$root/dev/pts" -o newinstance,ptmxmode=0666,mode=0620 && ln -sf pts/ptmx "$root/dev/ptmx"
cp /etc/resolv.conf "$root/etc/resolv.conf"
git clone -q --no-hardlinks . "$root/oscar"

for command in "${commands[@]}"; do
  echo "fresh-machine: $command"
  start=$(date +%s)
  chroot "$root" /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 bash -c "cd /oscar && $command"
  echo "fresh-machine: $command took $(($(date +%s) - start)) s, exit code 0"
done
