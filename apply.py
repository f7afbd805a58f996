#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Put the fp8-colocate patch set onto SGLang, Megatron-Core and Megatron-Bridge: `python apply.py --help`."""

import sys

if sys.version_info < (3, 11):
    sys.exit(f"apply.py: needs Python >= 3.11, found {sys.version.split()[0]}; next: run it with python3.11 or newer")

try:
    from patchset.cli import main
except ModuleNotFoundError as error:
    sys.exit(f"apply.py: {error}; next: run it from a whole clone, without python -P, -I or PYTHONSAFEPATH")

if __name__ == "__main__":
    sys.exit(main())
