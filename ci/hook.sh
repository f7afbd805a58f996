#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
#
# Run a linter of the locked environment (.venv-tool), or the one on PATH where that environment was not made.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv-tool/bin:$PATH"
if ! command -v "$1" >/dev/null; then
    echo "$1 is not installed; next: bash ci/test.sh lint   (makes .venv-tool with every linter)" >&2
    exit 1
fi
exec "$@"
