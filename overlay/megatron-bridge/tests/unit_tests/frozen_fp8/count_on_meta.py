# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Build one rank of Qwen3.5-MoE on the meta device with Bridge and print what the FP8 frozen base would store.

    python count_on_meta.py MODEL TP EP [MODEL TP EP ...]

No GPU: the process groups are torch's fake ones, the world has EP ranks. Prints one line of JSON for each.
"""

import importlib.util
import json
import sys

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore


PARTS = ("language_model.decoder", "language_model.mtp", "vision_model.decoder")


def config_of(model):
    """The public checkpoints' config.json, where it differs from the defaults of the config class."""
    from transformers import Qwen3_5MoeConfig

    text = {"dtype": "bfloat16", "mtp_num_hidden_layers": 1}
    if model == "Qwen3.5-122B-A10B":
        text |= {"hidden_size": 3072, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 2}
        text |= {"moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024, "num_experts": 256}
        text |= {"linear_num_value_heads": 64, "linear_num_key_heads": 16, "head_dim": 256}
    elif model != "Qwen3.5-35B-A3B":
        raise ValueError(f"model: expected Qwen3.5-35B-A3B or Qwen3.5-122B-A10B, got {model}")
    config = Qwen3_5MoeConfig(text_config=text, architectures=["Qwen3_5MoeForConditionalGeneration"])
    config.vision_config.out_hidden_size = config.text_config.hidden_size
    return config


def build(config, tp, ep):
    """Rank 0 with TP and EP over the same ranks, frozen as PEFT leaves the base."""
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ep)
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    provider.tensor_model_parallel_size, provider.expert_model_parallel_size = tp, ep
    provider.expert_tensor_parallel_size = 1
    provider.sequence_parallel = True
    provider.perform_initialization = False
    provider.gradient_accumulation_fusion = False
    if not torch.cuda.is_available():  # the dispatcher holds no weights, and this one makes no stream
        provider.moe_token_dispatcher_type, provider.moe_permute_fusion = "allgather", False
    provider.finalize()
    parallel_state.initialize_model_parallel(
        tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1, create_gloo_process_groups=False
    )
    return provider.provide_distributed_model(
        wrap_with_ddp=False,
        init_model_with_meta_device=True,
        pre_wrap_hook=lambda chunks: [chunk.requires_grad_(False) for chunk in chunks],
    )


def count(model, tp, ep):
    """What the FP8 frozen base selects on rank 0, as plain numbers."""
    from megatron.core import parallel_state
    from megatron.core.frozen_fp8 import select_frozen_linears, summarise

    config = config_of(model)
    chunks = build(config, tp, ep)
    selected = select_frozen_linears(chunks)
    summary = summarise(selected)
    tensors = dict.fromkeys(PARTS, 0)
    for linear in selected:
        part = next((p for p in PARTS if f"{p}." in linear.name), "elsewhere")
        tensors[part] = tensors.get(part, 0) + len(linear.params)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return {
        "model": model,
        "config": {p: json.loads(getattr(config, p).to_json_string()) for p in ("text_config", "vision_config")},
        "num_tensors": summary.num_tensors,
        "saved_gib": summary.saved_gib,
        "bf16_bytes": summary.bf16_bytes,
        "fp8_bytes": summary.fp8_bytes,
        "tensors": tensors,
        "classes": sorted({type(linear.module).__name__ for linear in selected}),
        "devices": sorted({str(p.device) for chunk in chunks for p in chunk.parameters()}),
    }


def main(arguments):
    if importlib.util.find_spec("transformer_engine") is None:
        import transformer_engine_shapes

        transformer_engine_shapes.install()
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("meta")
    for model, tp, ep in zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True):
        print(json.dumps(count(model, int(tp), int(ep))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
