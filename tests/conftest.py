# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""What every test may ask for: the pinned official wheels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from patchset import download, manifest
from patchset.report import Report


@pytest.fixture(scope="session")
def dists() -> Path:
    """Directory of the three pinned wheels: FP8_COLOCATE_DISTS, else the tool's cache, filled when it is empty."""
    if "FP8_COLOCATE_DISTS" in os.environ:
        return Path(os.environ["FP8_COLOCATE_DISTS"])
    pins = manifest.load()
    wheels = [download.wheel_path(pins, t, pins.pin(t), Report(quiet=True)) for t in pins.targets.values()]
    return wheels[0].parent
