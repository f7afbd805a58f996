# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors

"""A frozen linear under generalized tensor parallelism saves its shard and gathers again in the backward.

The gathered weight lives in a buffer shared by all weights of its shape: saved for the backward, it holds another
layer's weight by then. Two ranks are needed to see it, so torchrun runs frozen_linear_gtp_two_ranks.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_on_two_ranks():
    if DEVICE == "cuda":
        from megatron.core.tensor_parallel.gtp_api import HAVE_GTP

        if not HAVE_GTP or torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs and Transformer Engine 2.19 or newer, or no GPU at all")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "pytest"]
    command += ["-q", "-rs", "-p", "no:cacheprovider", str(Path(__file__).with_name("frozen_linear_gtp_two_ranks.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.count(" passed") == 2 and "skipped" not in done.stdout, done.stdout[-6000:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_unsharded_weight_is_saved_as_it_is(dtype, bias):
    from megatron.core.tensor_parallel.layers import LinearWithFrozenWeight

    weight = torch.randn(6, 8, device=DEVICE).to(dtype)
    offset = torch.randn(6, device=DEVICE).to(dtype) if bias else None
    x = torch.randn(4, 8, device=DEVICE).to(dtype).requires_grad_(True)
    out = LinearWithFrozenWeight.apply(x, weight, offset, False, None)  # callers without GTP pass five
    expected = x.detach().matmul(weight.t())
    assert torch.equal(out, expected if offset is None else expected + offset)
    (saved,) = out.grad_fn.saved_tensors
    assert saved.data_ptr() == weight.data_ptr() and saved.shape == weight.shape
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(out).matmul(weight))
