#!/bin/sh
# Names a Python of 3.12 or later, which Harbor needs; without one the system's, and Harbor's tests are skipped.
for p in python3.12 python3.13 python3.14 "$HOME"/.pyenv/versions/3.1[2-9]*/bin/python3 python3; do
	if "$p" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
		echo "$p"
		exit 0
	fi
done
echo python3
