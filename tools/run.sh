#!/bin/sh
# Runs a tool pinned in tools/go.mod: tools/run.sh NAME ARGS. Built once and kept under the user's cache, so that a
# fresh clone with the same pins does not build it again (cold builds of all take minutes).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
name=$1
shift
pins=$(cat "$here/go.mod" "$here/go.sum" | sha256sum | cut -c1-16)
dir=${XDG_CACHE_HOME:-$HOME/.cache}/sandsea/tools-$pins
if [ ! -x "$dir/$name" ]; then
	mkdir -p "$dir"
	package=$(sed -n "s#^\(tool \)\{0,1\}[[:space:]]*\([^ ]*/$name\)\$#\2#p" "$here/go.mod" | head -1)
	[ -n "$package" ] || {
		echo "tools/run.sh: no tool $name in tools/go.mod" >&2
		exit 2
	}
	echo "tools: building $name" >&2
	(cd "$here" && GOFLAGS=-buildvcs=false go build -o "$dir/.$name.$$" "$package" && mv "$dir/.$name.$$" "$dir/$name")
fi
PATH="$dir:$PATH" exec "$dir/$name" "$@"
