# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The three wheels that `python apply.py --fetch dist` leaves, built here when they are not of this revision."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from patchset import manifest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def patched_wheels() -> Path:
    """The folder with the three patched wheels."""
    dist = ROOT / "dist"
    subprocess.run([sys.executable, "apply.py", "--fetch", str(dist), "-q"], cwd=ROOT, check=True)
    patch_set = manifest.load()
    versions = [patch_set.local_version(t.pin) for t in patch_set.targets.values()]
    missing = [v for v in versions if not list(dist.glob(f"*-{v}-*.whl"))]
    assert not missing, f"dist/ lacks wheels of {missing}"
    return dist
