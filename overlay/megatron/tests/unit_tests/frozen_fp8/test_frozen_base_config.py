# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The config fields of the frozen FP8 base: their flags, their checks, and the training loop's call."""

import argparse

import pytest
import torch


def config(**values):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, **values)


def test_the_command_line_has_both_flags():
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    args, _ = parser.parse_known_args(["--fp8-frozen-base-store", "--fp8-frozen-base-per-layer-free"])
    assert args.fp8_frozen_base_store is True
    assert args.fp8_frozen_base_per_layer_free is True
    defaults, _ = parser.parse_known_args([])
    assert defaults.fp8_frozen_base_store is False
    assert defaults.fp8_frozen_base_per_layer_free is False


def test_per_layer_free_needs_the_store():
    with pytest.raises(ValueError, match="needs fp8_frozen_base_store"):
        config(fp8_frozen_base_per_layer_free=True)
    assert config(fp8_frozen_base_store=True, fp8_frozen_base_per_layer_free=True).fp8_frozen_base_store


class Chunk(torch.nn.Module):
    """One frozen linear under a base name, with the config that a training loop finds on a model."""

    def __init__(self, linear, values):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"linear_fc1": linear})])
        self.config = values

    @property
    def linear_fc1(self):
        return self.layers[0]["linear_fc1"]


@pytest.fixture(autouse=True)
def no_parallel_state_left():
    yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def frozen_chunk(values):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    linear = ColumnParallelLinear(
        64, 192, config=values, init_method=torch.nn.init.ones_, bias=False, gather_output=False
    )
    linear.requires_grad_(False)
    return Chunk(linear, values)


@pytest.mark.parametrize("free", [False, True])
def test_the_training_loop_converts_once_and_only_when_asked(free):
    from megatron.core.frozen_fp8 import convert_if_configured, is_frozen_fp8

    common = {"params_dtype": torch.bfloat16, "bf16": True, "use_cpu_initialization": True}
    plain = frozen_chunk(config(**common))
    assert convert_if_configured([plain]) is None
    assert not is_frozen_fp8(plain.linear_fc1.weight)
    chunk = frozen_chunk(config(fp8_frozen_base_store=True, fp8_frozen_base_per_layer_free=free, **common))
    report = convert_if_configured([chunk])
    assert report.per_layer_free is free
    assert is_frozen_fp8(chunk.linear_fc1.weight)
    assert chunk.linear_fc1.weight.slab.per_layer_free is free
    assert convert_if_configured([chunk]) is None  # provide_distributed_model and the loop both call it
