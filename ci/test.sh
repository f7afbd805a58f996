#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
#
# Run the tests: bash ci/test.sh [lint] [tool] [wheels] [trees]     (no name: all of them, in this order)
# Finds a Python >= 3.11; ci/run.py makes the environments and runs the lanes.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for python in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    if [ -n "$python" ] && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        exec "$python" ci/run.py "$@"
    fi
done
echo "ci/test.sh: no Python >= 3.11 answers; next: PYTHON=/path/to/python3.11 bash ci/test.sh" >&2
exit 2
