#!/bin/sh
# Makes the generated code anew: Go from the protobuf files, the OpenAPI file, the Python models. With --check: fails when
# what is committed differs.
set -eu
cd "$(dirname "$0")/.."
tools/run.sh protoc-gen-go --version >/dev/null
tools/run.sh protoc-gen-connect-go --version >/dev/null

paths="api/sandsea/v1 api/node/v1 api/openapi/openapi.json sdk/python/src/sandsea/_models.py sdk/python/src/sandsea/sync"
before=""
if [ "${1:-}" = --check ]; then
	before=$(find $paths -type f -exec sha256sum {} + | sort)
fi
(cd api && ../tools/run.sh buf generate)
go run ./api/openapi/gen
python3 tools/pymodels.py
python3 tools/pysync.py
if [ "${1:-}" = --check ] && [ "$before" != "$(find $paths -type f -exec sha256sum {} + | sort)" ]; then
	echo "generated code is stale: make generate" >&2
	exit 1
fi
