# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Tiny Qwen3-MoE and Qwen3.5-MoE checkpoints that exist as a config only, and one rank to build them on."""

import os

import pytest
import torch


@pytest.fixture(scope="module")
def parallel():
    from megatron.core import parallel_state

    created = not torch.distributed.is_initialized()
    if created:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29581")
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.destroy_model_parallel()  # what another file may have left
    parallel_state.initialize_model_parallel()
    with torch.compiler.set_stance("force_eager"):  # compiling would be most of the time here
        yield
    parallel_state.destroy_model_parallel()
    if created:
        torch.distributed.destroy_process_group()
