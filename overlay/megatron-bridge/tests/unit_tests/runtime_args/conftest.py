# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors

"""Fixtures: Megatron's own argument parser, and bridges of tiny checkpoints that exist as a config.json only."""

import argparse

import pytest


COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "torch_dtype": "bfloat16",
}


def qwen3():
    from transformers import Qwen3Config

    return Qwen3Config(**COMMON, head_dim=16, architectures=["Qwen3ForCausalLM"])


def qwen3_moe():
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3MoeConfig(**COMMON, **experts, head_dim=16, architectures=["Qwen3MoeForCausalLM"])


def deepseek_v3():
    from transformers import DeepseekV3Config

    latent = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
    }
    common = COMMON | {"num_key_value_heads": 4}
    return DeepseekV3Config(**common, **latent, **experts, architectures=["DeepseekV3ForCausalLM"])


def qwen3_vl():
    from transformers import Qwen3VLConfig

    text = {name: value for name, value in COMMON.items() if name != "torch_dtype"}
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 5000000.0}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    return Qwen3VLConfig(
        text_config=text | {"head_dim": 16, "rope_scaling": rope, "dtype": "bfloat16"},
        vision_config=vision | {"deepstack_visual_indexes": [0]},
        architectures=["Qwen3VLForConditionalGeneration"],
    )


def qwen3_5():
    from transformers import Qwen3_5Config

    text = {name: value for name, value in COMMON.items() if name != "torch_dtype"}
    linear = {
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
    kinds = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    return Qwen3_5Config(
        text_config=text | linear | kinds | {"head_dim": 16, "rope_parameters": rope, "dtype": "bfloat16"},
        vision_config=vision,
        architectures=["Qwen3_5ForConditionalGeneration"],
    )


CONFIGS = {
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "deepseek_v3": deepseek_v3,
    "qwen3_vl": qwen3_vl,
    "qwen3_5": qwen3_5,
}


@pytest.fixture
def make_bridge(tmp_path):
    """Return a function: model name -> AutoBridge of a tiny checkpoint directory."""

    def make(name="qwen3"):
        from megatron.bridge import AutoBridge

        CONFIGS[name]().save_pretrained(tmp_path / name)
        return AutoBridge.from_hf_pretrained(str(tmp_path / name))

    return make


@pytest.fixture(scope="session")
def parser():
    """The parser of Megatron's ``parse_args``."""
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


@pytest.fixture
def from_argv(parser):
    """Return a function: command line -> RuntimeArgs, as `RuntimeArgs.from_args` makes them."""

    def make(line, **options):
        from megatron.bridge.runtime_args import RuntimeArgs

        argv = line.split() if isinstance(line, str) else list(line)
        return RuntimeArgs.from_args(parser.parse_args(argv), argv, parser=parser, **options)

    return make
