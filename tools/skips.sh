#!/bin/sh
# Prints the tests that were skipped and why, as the test run wrote them.
set -eu
[ -s "$1" ] || exit 0
echo "skipped on this machine:"
sort -u "$1" | sed 's/^/  /'
