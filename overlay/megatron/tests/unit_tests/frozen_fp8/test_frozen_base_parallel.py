# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The frozen FP8 base on two ranks: tensor, sequence, expert and pipeline parallel. torchrun runs two_ranks.py."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="local-spec modules on gloo; a GPU runs the single-rank tests")
def test_on_two_ranks():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "pytest"]
    command += ["-q", "-rs", "-p", "no:warnings", "-p", "no:cacheprovider"]
    command += [str(Path(__file__).with_name("two_ranks.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.count(" passed") == 2 and "skipped" not in done.stdout, done.stdout[-6000:]
