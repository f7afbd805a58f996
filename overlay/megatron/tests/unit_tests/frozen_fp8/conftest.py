# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Lets the tests of this folder import its helper module, whatever pytest's import mode."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
