#!/bin/bash
# Runs every fuzz target of the tree for FUZZTIME (default 10s) each, in turn; with arguments only those whose
# package/target contains one of them. What is found lies in the package's testdata/fuzz, to be kept as a regression test.
set -uo pipefail
cd "$(dirname "$0")/.."
export GOTOOLCHAIN="${GOTOOLCHAIN:-go1.27.3}" GOFLAGS="${GOFLAGS:--buildvcs=false}" CGO_ENABLED=0
time=${FUZZTIME:-10s}

# Only packages whose test files speak of fuzzing are built in order to be asked for their targets.
packages=$(go list -f '{{$p := .}}{{range .TestGoFiles}}{{$p.ImportPath}} {{$p.Dir}}/{{.}}{{"\n"}}{{end}}{{range .XTestGoFiles}}{{$p.ImportPath}} {{$p.Dir}}/{{.}}{{"\n"}}{{end}}' ./... |
	while read -r package file; do
		if [ -n "$file" ] && grep -q '^func Fuzz' "$file"; then echo "$package"; fi
	done | sort -u)
[ -n "$packages" ] || { echo "fuzz: no package has a target" >&2; exit 1; }

ran=0 failed=()
for package in $packages; do
	short=${package#github.com/sandsea/sandsea/}
	if ! list=$(go test -list '^Fuzz' "$package"); then
		echo "fuzz: $short does not build" >&2
		failed+=("$short")
		continue
	fi
	for target in $(grep '^Fuzz' <<<"$list"); do
		name=$short/$target
		if [ $# -gt 0 ]; then
			wanted=
			for word in "$@"; do case $name in *"$word"*) wanted=1 ;; esac done
			[ -n "$wanted" ] || continue
		fi
		ran=$((ran + 1))
		if out=$(go test -run '^$' -fuzz "^$target\$" -fuzztime "$time" "$package" 2>&1); then
			execs=$(grep -o 'execs: [0-9]*' <<<"$out" | tail -1 | grep -o '[0-9]*')
			printf 'fuzz: %-64s %10s executions\n' "$name" "${execs:-0}"
		else
			printf 'fuzz: %-64s FAILED\n%s\n' "$name" "$out"
			failed+=("$name")
		fi
	done
done
if [ ${#failed[@]} -gt 0 ]; then
	echo "fuzz: failed: ${failed[*]}"
	exit 1
fi
[ $ran -gt 0 ] || { echo "fuzz: no target matches $*" >&2; exit 1; }
echo "fuzz: ok, $ran targets, $time each"
