#!/bin/sh
# Installs what this machine lacks to build, test and run Sandsea: Debian packages, and a Go command that can fetch the
# pinned toolchain. Says what it does; does nothing when nothing is missing.
set -eu

packages="ca-certificates gcc make git musl-tools btrfs-progs mmdebstrap uidmap crun busybox-static
debian-archive-keyring python3 python3-venv xz-utils zstd procps"

missing=""
for p in $packages; do
	dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null | grep -qx installed || missing="$missing $p"
done
if [ -n "$missing" ]; then
	echo "setup: installing Debian packages:$missing"
	if [ "$(id -u)" != 0 ]; then
		echo "setup: run as root once, or: sudo apt-get install$missing" >&2
		exit 1
	fi
	DEBIAN_FRONTEND=noninteractive apt-get -qq update
	# shellcheck disable=SC2086 # a list of names
	DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $missing >/dev/null
fi

# A registry for the tests, taken out of Debian's package so that no service of it is started on this machine. A
# distribution without it runs the tests that need it not at all.
registry=docker-registry
cache=${XDG_CACHE_HOME:-$HOME/.cache}/sandsea/test
if [ ! -x "$cache/$registry" ] && apt-cache show "$registry" >/dev/null 2>&1; then
	echo "setup: fetching $registry for tests"
	scratch=$(mktemp -d)
	if (cd "$scratch" && apt-get -qq download "$registry" 2>/dev/null && dpkg-deb -x "$registry"_*.deb .); then
		mkdir -p "$cache"
		mv "$scratch/usr/bin/$registry" "$cache/$registry"
	fi
	rm -rf "$scratch"
fi

# A Go command since 1.21 fetches the toolchain named by GOTOOLCHAIN by itself. Debian 12's is 1.19: it can still
# download that toolchain as the module it is published as.
version=${GOTOOLCHAIN:?set by the Makefile}
have=$(GOTOOLCHAIN=local go env GOVERSION 2>/dev/null || true)
case $have in
go1.2[1-9]* | go1.[3-9][0-9]* | go[2-9]*) exit 0 ;;
esac
home=${XDG_CACHE_HOME:-$HOME/.cache}/sandsea/$version
if [ ! -x "$home/bin/go" ]; then
	echo "setup: fetching $version"
	if [ -z "$have" ]; then
		DEBIAN_FRONTEND=noninteractive apt-get -qq update
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends golang-go >/dev/null
	fi
	arch=$(dpkg --print-architecture)
	module=golang.org/toolchain@v0.0.1-$version.linux-$arch
	scratch=$(mktemp -d)
	(cd "$scratch" && printf 'module fetch\n' >go.mod &&
		env -u GOTOOLCHAIN -u GOFLAGS GOMODCACHE="$scratch/mod" go mod download "$module")
	mkdir -p "$(dirname "$home")"
	cp -r "$scratch/mod/$module" "$home"
	chmod -R u+w "$scratch" && rm -rf "$scratch"
	chmod -R u+w "$home"
	chmod +x "$home"/bin/* "$home"/pkg/tool/*/*
fi
