#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
#
# Run the tests that need a GPU, on patched trees that this machine already has:
#
#     bash ci/gpu.sh --sglang SITE --megatron SITE --megatron-bridge SITE
#
# SITE is a checkout or the site-packages that `python apply.py` patched. PYTHON names the interpreter with torch, CUDA,
# pytest and what the targets import (default python3). Nothing is installed or downloaded.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"

if [ $# -eq 0 ]; then
    sed -n '5,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
if ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "ci/gpu.sh: $python sees no CUDA device (or has no torch); next: run it where a GPU is, or set PYTHON" >&2
    exit 2
fi
if ! "$python" -c 'import pytest' 2>/dev/null; then
    echo "ci/gpu.sh: $python has no pytest; next: $python -m pip install pytest" >&2
    exit 2
fi
"$python" -c 'import torch; print("gpu:", torch.cuda.device_count(), "x", torch.cuda.get_device_name(0), "torch", torch.__version__)'
python3 apply.py status "$@"
exec "$python" ci/trees.py --python "$python" --lane gpu -m "gpu or multigpu" "$@"
