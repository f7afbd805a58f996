#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Measure the bug-fix patches against the unpatched trees on one GPU.

    python bench/first_patches.py recompute              # patched trees on PYTHONPATH
    python bench/first_patches.py override
    python bench/first_patches.py rollback               # run it twice: with the stock SGLang and with the patched one

recompute: peak memory of a step when `--recompute-*` was typed. "not forwarded" is what a training loop gets from
    `to_megatron_provider()` alone; "forwarded" passes `runtime_args`.
override: the bytes Transformer Engine keeps for a frozen FP8 weight after a step, with and without
    `fp8_backward_override="dequantized"`.
rollback: tokens of an engine before and after `update_weights_from_disk` of a checkpoint whose last shard is cut off.

Each prints one JSON line. Needs torch, Transformer Engine (the first two) and a GPU.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
os.environ.setdefault("SGLANG_ENABLE_JIT_DEEPGEMM", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)

import torch  # noqa: E402  (the environment above is read at import)

GIB = 2**30
PROMPTS = [[5, 17, 99, 1234, 777, 4242, 31, 8], [9, 8, 7, 6, 5, 4, 3, 2, 100, 200]]
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]


def recompute() -> dict:
    """Peak GiB of one step of the 2.6 B MoE, arguments dropped and forwarded."""
    import argparse

    import frozen_base  # the bench beside this file builds the model
    from megatron.bridge.runtime_args import RuntimeArgs
    from megatron.training.arguments import add_megatron_arguments

    frozen_base.initialise()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    args, _ = parser.parse_known_args(RECOMPUTE)
    typed = RuntimeArgs.from_args(args, RECOMPUTE, parser=parser)
    result = {}
    for name, runtime_args in (("not forwarded", None), ("forwarded", typed)):
        model, resident = frozen_base.resident_bytes(
            lambda given=runtime_args: frozen_base.build("moe", recompute=False, runtime_args=given)
        )
        frozen_base.run_step(model, 4096)
        step = frozen_base.run_step(model, 4096)
        result[name] = {"peak_gib": (resident + step.peak_bytes) / GIB, "loss": step.loss}
        del model
    return result


def override() -> dict:
    """GiB held by an FP8 model of one wide linear after a step, by `fp8_backward_override`."""
    import transformer_engine.pytorch as te
    from megatron.core.fp8_utils import get_fp8_recipe
    from megatron.core.transformer.transformer_config import TransformerConfig

    result = {}
    for value in (None, "dequantized"):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8192,
            num_attention_heads=64,
            bf16=True,
            params_dtype=torch.bfloat16,
            fp8="e4m3",
            fp8_recipe="blockwise",
            fp8_backward_override=value,
        )
        recipe = get_fp8_recipe(config)
        with te.quantized_model_init(enabled=True, recipe=recipe), torch.no_grad():
            linear = te.Linear(8192, 8192, bias=False, params_dtype=torch.bfloat16, device="cuda")
        linear.requires_grad_(False)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        data = torch.randn(4096, 8192, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        with te.autocast(enabled=True, recipe=recipe):
            linear(data).float().square().mean().backward()
        grad = data.grad.norm().item()
        del data
        gc.collect()
        kept = torch.cuda.memory_allocated() - before
        weight = linear.weight
        result[str(value)] = {
            "weight_columnwise_kept": weight._columnwise_data is not None,
            "kept_after_step_mib": kept / 2**20,
            "input_gradient_norm": grad,
        }
        del linear, weight
    return result


def tiny_checkpoint(folder: Path, seed: int) -> Path:
    """A random dense Qwen3 of 0.2 B in two or more shards."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        num_hidden_layers=8,
        hidden_size=1024,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=32768,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="150MB")
    return folder


def rollback() -> dict:
    """Tokens before, and after an update that fails half-way."""
    import sglang
    import sglang as sgl

    with tempfile.TemporaryDirectory() as name:
        old = tiny_checkpoint(Path(name) / "old", 0)
        new = tiny_checkpoint(Path(name) / "new", 1)
        shards = sorted(new.glob("*.safetensors"))
        shards[-1].write_bytes(shards[-1].read_bytes()[: shards[-1].stat().st_size // 2])
        engine = sgl.Engine(
            model_path=str(old),
            skip_tokenizer_init=True,
            attention_backend="triton",
            sampling_backend="pytorch",
            grammar_backend="none",
            disable_cuda_graph=True,
            max_total_tokens=4096,
            log_level="error",
        )
        before = tokens(engine)
        try:
            success, message = engine.update_weights_from_disk(str(new))[:2]
        except Exception as error:
            success, message = None, repr(error)
        after = tokens(engine)
        engine.shutdown()
    return {
        "sglang": sglang.__file__,
        "success": success,
        "message": str(message)[:300],
        "tokens_same": before == after,
        "shards": len(shards),
    }


def tokens(engine) -> list[list[int]]:
    """Greedy continuation of two prompts."""
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    answers = engine.generate(input_ids=PROMPTS, sampling_params=sampling, return_logprob=True)
    return [[entry[1] for entry in a["meta_info"]["output_token_logprobs"]] for a in answers]


if __name__ == "__main__":
    actions = {"recompute": recompute, "override": override, "rollback": rollback}
    if len(sys.argv) != 2 or sys.argv[1] not in actions:
        sys.exit(__doc__)
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    print(json.dumps({sys.argv[1]: actions[sys.argv[1]]()}))
