#!/bin/sh
# Runs govulncheck against the database that the pinned module golang.org/x/vulndb carries: no internet needed.
set -eu
cd "$(dirname "$0")/.."
version=$(cd tools && go list -m -f '{{.Version}}' golang.org/x/vulndb)
db=${XDG_CACHE_HOME:-$HOME/.cache}/sandsea/vulndb-$version
if [ ! -f "$db/index/db.json" ] && [ ! -f "$db/index/db.json.gz" ]; then
	(cd tools && go mod download golang.org/x/vulndb)
	dir=$(cd tools && go list -m -f '{{.Dir}}' golang.org/x/vulndb)
	rm -rf "$db"
	mkdir -p "$db"
	tools/run.sh indexdb -vulns "$dir/data/osv" -out "$db"
fi
tools/run.sh govulncheck -db "file://$db" ./...
