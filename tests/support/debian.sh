#!/usr/bin/env bash
# Runs a command in a fresh Debian, on a copy of this checkout: debian.sh RELEASE COMMAND …
# Needs root and debootstrap. The system stays in build/debian-RELEASE for the next run.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/../.."

declare -rA SUITES=([12]=bookworm [13]=trixie [14]=forky)
readonly RELEASE=$1 SUITE=${SUITES[$1]:-}
readonly ROOT=$PWD/build/debian-$RELEASE
readonly BUNDLE=/etc/ssl/certs/ca-certificates.crt
[[ -n $SUITE ]] || {
  echo "There is no Debian '$RELEASE' here: choose one of ${!SUITES[*]}." >&2
  exit 2
}

install_system() {
  echo "Installing Debian $RELEASE into ${ROOT#"$PWD"/} …" >&2
  rm -rf "$ROOT"
  mkdir -p "${ROOT%/*}"
  # With the script of sid, which is that of every release: an older debootstrap does not know a newer name.
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv "$SUITE" "$ROOT" "" sid >"$ROOT.log" ||
    { tail "$ROOT.log" >&2 && exit 1; }
}

[[ -x $ROOT/usr/bin/python3 ]] || install_system
mkdir -p "$ROOT/src" # keeps its .venv
find "$ROOT/src" -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} +
git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from=- | tar --extract --directory "$ROOT/src"
cp /etc/resolv.conf /etc/hosts "$ROOT/etc/"
[[ ! -f $BUNDLE ]] || cp "$BUNDLE" "$ROOT$BUNDLE" # as this machine trusts: a proxy may have its own authority

COMMIT=$(git rev-parse --short=7 HEAD)

# The root is a mount of its own, so that programs find "/" in the list of mounts.
unshare --mount --propagation private -- bash -euc '
  ROOT=$0
  mount --bind "$ROOT" "$ROOT"
  mount --types proc proc "$ROOT/proc"
  mount --rbind /dev "$ROOT/dev"
  mount --rbind /sys "$ROOT/sys"
  mount --types tmpfs tmpfs "$ROOT/tmp"
  exec chroot "$ROOT" env --chdir=/src HOME=/root "$@"
' "$ROOT" "COMPATIBILITY_COMMIT=$COMMIT" "${@:2}" || status=$?
cp "$ROOT/src/docs/compatibility.json" docs/ # if the tests recorded their run
exit "${status:-0}"
