#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Measure the FP8 frozen base against the stock bf16 base, in one process, on one GPU.

    python bench/frozen_base.py --case moe --case qwen35 --out bench/results/frozen_base.json

The arms of a case hold the same random weights and run interleaved, step by step, so that their ratio holds when the
machine's speed drifts. "stock" is the unconverted model: the patched tree with the flags unset, which is upstream's
code path. Prints a Markdown table; it measures and never passes or fails on a time. `--timeline` writes allocated
bytes over one step for the plot in docs/ (python bench/plot_frozen_base.py).

Needs torch, Transformer Engine and the patched trees importable (python apply.py), and a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # for the deterministic gated delta net
warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)

import torch  # noqa: E402  (the environment above is read at import)

GIB = 2**30
VOCABULARY = 32768


class Step(NamedTuple):
    """One forward and backward."""

    loss: float
    forward_ms: float
    backward_ms: float
    peak_bytes: int  # above what was allocated before the step
    left_bytes: int  # allocated after the step, gradients dropped, minus before


def moe_config():
    """2.6 B Qwen3-MoE: 8 layers, 64 experts."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        num_hidden_layers=8,
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=VOCABULARY,
        max_position_embeddings=16384,
        tie_word_embeddings=False,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        dtype="bfloat16",
    )


def qwen35_config():
    """Eight layers of the shape of Qwen3.5-35B-A3B (the class's defaults), with a small vocabulary."""
    from transformers import Qwen3_5MoeTextConfig

    return Qwen3_5MoeTextConfig(
        architectures=["Qwen3_5MoeForCausalLM"],
        num_hidden_layers=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=16384,
        dtype="bfloat16",
    )


CASES: dict[str, Callable] = {"moe": moe_config, "qwen35": qwen35_config}


def initialise() -> None:
    """One rank of NCCL and Megatron's parallel state."""
    from megatron.core import parallel_state

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def build(case: str, recompute: bool, fp8_compute: bool = False, runtime_args=None) -> torch.nn.Module:
    """A Bridge model with rank-32 LoRA on every base linear, random weights, in training mode.

    `runtime_args` goes to `to_megatron_provider` when given (the patched Bridge takes it).
    """
    from megatron.bridge import AutoBridge
    from megatron.bridge.peft.lora import LoRA
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnBackend

    given = {} if runtime_args is None else {"runtime_args": runtime_args}
    provider = AutoBridge.from_hf_config(CASES[case]()).to_megatron_provider(load_weights=False, **given)
    settings = {
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "seq_length": 16384,
        "gradient_accumulation_fusion": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "attention_backend": AttnBackend.unfused,
        "mtp_num_layers": None,
    }
    if case == "qwen35":  # the fused gated delta rule refuses this Triton on Hopper; torch's path is deterministic
        settings["deterministic_mode"] = True
    if recompute:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if fp8_compute:
        settings |= {"fp8": "e4m3", "fp8_recipe": "blockwise", "moe_router_padding_for_quantization": True}
        settings |= {"fp8_backward_override": "dequantized"}
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
    model_parallel_cuda_manual_seed(0)
    targets = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"]
    lora = LoRA(target_modules=targets, dim=32, alpha=32)
    provider.register_pre_wrap_hook(lambda model: lora(model, training=True))
    model = provider.provide_distributed_model(wrap_with_ddp=False, bf16=True)[0]
    return model.train()


def copy_weights(source: torch.nn.Module, destination: torch.nn.Module) -> None:
    """Give `destination` the weights of `source`; adapters that start at zero become non-zero in both."""
    generator = torch.Generator(device="cuda").manual_seed(3)
    with torch.no_grad():
        pairs = zip(source.named_parameters(), destination.named_parameters(), strict=True)
        for (name, param), (other_name, other) in pairs:
            if name != other_name:
                raise AssertionError(f"{name} against {other_name}")
            if param.requires_grad and param.abs().max() == 0:
                param.normal_(std=0.02, generator=generator)
            other.copy_(param)


def run_step(model: torch.nn.Module, length: int, keep_gradients: bool = False) -> Step:
    """One forward and backward on one sequence of `length` random tokens."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (1, length), device="cuda", generator=generator)
    position = torch.arange(length, device="cuda")[None]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    loss = model(tokens, position, None, labels=tokens).float().mean()
    torch.cuda.synchronize()
    middle = time.perf_counter()
    loss.backward()
    torch.cuda.synchronize()
    ended = time.perf_counter()
    peak = torch.cuda.max_memory_allocated()
    value = loss.item()
    del loss
    if not keep_gradients:
        model.zero_grad(set_to_none=True)
    left = torch.cuda.memory_allocated() - before
    return Step(value, (middle - started) * 1e3, (ended - middle) * 1e3, peak - before, left)


def resident_bytes(make: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, int]:
    """Build a model and say how many bytes it holds when the dust has settled."""
    settle()
    before = torch.cuda.memory_allocated()
    model = make()
    settle()
    return model, torch.cuda.memory_allocated() - before


def settle() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def converted(case: str, recompute: bool, source: torch.nn.Module, per_layer_free: bool, fp8_compute: bool):
    """A converted model with the weights of `source`."""
    from megatron.core.frozen_fp8 import convert_frozen_base

    model = build(case, recompute, fp8_compute)
    copy_weights(source, model)
    report = convert_frozen_base(model, per_layer_free=per_layer_free)
    print(f"# {report}", flush=True)
    return model


def load_dequantised(stock: torch.nn.Module, frozen: torch.nn.Module) -> None:
    """Give the stock model the dequantised values, so that both compute the same function."""
    from megatron.core.frozen_fp8 import is_frozen_fp8

    with torch.no_grad():
        for param, other in zip(stock.parameters(), frozen.parameters(), strict=True):
            if is_frozen_fp8(other):
                param.copy_(other.dequantize())


def bit_equality(stock: torch.nn.Module, frozen: torch.nn.Module, length: int) -> dict:
    """Loss and adapter gradients of both models, and of the stock model against itself."""
    results = []
    for model in (stock, stock, frozen):
        step = run_step(model, length, keep_gradients=True)
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        results.append((step.loss, gradients))
    (loss, want), (_, again), (found_loss, found) = results
    return {
        "loss_equal": loss == found_loss,
        "gradients": len(want),
        "gradients_equal": sum(torch.equal(want[n], found[n]) for n in want),
        "gradients_equal_stock_to_itself": sum(torch.equal(want[n], again[n]) for n in want),
        "gradients_zero": sum(not bool(g.any()) for g in found.values()),
    }


def measure(case: str, recompute: bool, lengths: list[int], steps: int, arms: list[str], seen: list[dict]) -> None:
    """All arms of one case, interleaved; appends one row for each arm and length."""
    stock, stock_bytes = resident_bytes(lambda: build(case, recompute))
    models, resident = {"stock": stock}, {"stock": stock_bytes}
    for arm in arms:
        free, compute = arm != "store", arm == "fp8 compute"
        models[arm], resident[arm] = resident_bytes(partial(converted, case, recompute, stock, free, compute))
    load_dequantised(stock, models[arms[0]])
    equality = {a: bit_equality(stock, models[a], 2048) for a in arms if a != "fp8 compute"}
    for length in lengths:
        runs: dict[str, list[Step]] = {name: [] for name in models}
        for index in range(steps + 2):
            for name, model in models.items():
                step = run_step(model, length)
                if index >= 2:  # warmed up
                    runs[name].append(step)
        for name in models:
            seen.append(_row(case, recompute, length, name, runs, resident, equality.get(name)))
            print(_line(seen[-1]), flush=True)


def _row(case, recompute, length, name, runs, resident, equality) -> dict:
    steps, base = runs[name], runs["stock"]
    total = statistics.median(s.forward_ms + s.backward_ms for s in steps)
    ratios = [
        (s.forward_ms + s.backward_ms) / (b.forward_ms + b.backward_ms) for s, b in zip(steps, base, strict=True)
    ]
    return {
        "case": case,
        "recompute": "full" if recompute else "none",
        "tokens": length,
        "arm": name,
        "resident_gib": resident[name] / GIB,
        "peak_gib": (resident[name] + max(s.peak_bytes for s in steps)) / GIB,
        "left_mib": max(s.left_bytes for s in steps) / 2**20,
        "forward_ms": statistics.median(s.forward_ms for s in steps),
        "backward_ms": statistics.median(s.backward_ms for s in steps),
        "step_ms": total,
        "ratio_to_stock": statistics.median(ratios),
        "loss": steps[-1].loss,
        "steps": len(steps),
        "bit_equality": equality,
    }


HEADER = (
    "| model | recompute | tokens | arm | resident GiB | peak GiB | left MiB | step ms | / stock | bit-equal |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def _line(row: dict) -> str:
    equality = row["bit_equality"]
    bits = (
        "-"
        if not equality
        else f"loss {equality['loss_equal']}, {equality['gradients_equal']}/{equality['gradients']}"
    )
    return (
        f"| {row['case']} | {row['recompute']} | {row['tokens']} | {row['arm']} | {row['resident_gib']:.3f} "
        f"| {row['peak_gib']:.3f} | {row['left_mib']:.1f} | {row['step_ms']:.1f} "
        f"| {row['ratio_to_stock']:.3f} | {bits} |"
    )


def kernels() -> list[dict]:
    """Dequantise against a device copy: bytes read and written a second, 3 an element here, 4 there."""
    import triton
    from megatron.core.frozen_fp8.kernels import dequantize_blocks

    source = torch.empty(16384, 8192, dtype=torch.bfloat16, device="cuda")
    sink = torch.empty_like(source)
    copy_ms = triton.testing.do_bench(lambda: sink.copy_(source), warmup=20, rep=100, return_mode="median")
    copy_rate = 2 * source.nbytes / copy_ms / 1e9
    rows = []
    for shape in [(1, 16384, 8192), (64, 1536, 2048), (64, 2048, 768), (256, 1024, 2048), (1, 12352, 2048)]:
        num, height, width = shape
        q = torch.randint(0, 120, shape, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        scale = torch.rand(num, -(-height // 128), -(-width // 128), device="cuda")
        out = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        ms = triton.testing.do_bench(
            partial(dequantize_blocks, q, scale, out), warmup=20, rep=100, return_mode="median"
        )
        rate = 3 * q.numel() / ms / 1e9
        rows.append({"shape": shape, "tb_per_s": rate, "copy_tb_per_s": copy_rate, "share_of_copy": rate / copy_rate})
        print(f"| dequantise {shape} | {rate:.2f} TB/s | {rate / copy_rate:.3f} of a copy |", flush=True)
    return rows


def timeline(case: str, length: int) -> dict[str, list[tuple[float, float]]]:
    """Allocated GiB over one step without recompute, for each arm alone: (ms since its start, GiB)."""
    arms = {"stock": None, "store": False, "store + per-layer free": True}
    curves = {}
    for name, free in arms.items():
        settle()
        model = build(case, recompute=False)
        if free is not None:
            from megatron.core.frozen_fp8 import convert_frozen_base

            convert_frozen_base(model, per_layer_free=free)
        settle()
        run_step(model, length)
        curves[name] = _allocations(model, length)
        del model
    return curves


def _allocations(model: torch.nn.Module, length: int) -> list[tuple[float, float]]:
    level = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(max_entries=500_000, stacks="python", context=None)
    run_step(model, length)
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    events = [e for e in trace if e["action"] in ("alloc", "free_completed")]
    start, points = events[0]["time_us"], []
    for event in events:
        level += event["size"] if event["action"] == "alloc" else -event["size"]
        points.append(((event["time_us"] - start) / 1e3, level / GIB))
    stride = max(1, len(points) // 2000)
    return [max(points[i : i + stride], key=lambda p: p[1]) for i in range(0, len(points), stride)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=list(CASES), help="repeatable; default moe")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 12288], metavar="TOKENS")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each arm, after two warm-up steps")
    parser.add_argument("--arms", nargs="+", default=["per-layer free", "store"], metavar="ARM")
    parser.add_argument("--recompute", nargs="+", choices=["none", "full"], default=["none", "full"])
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="write allocated bytes over one step as JSON")
    parser.add_argument("--kernels", action="store_true", help="also time the dequantise kernel")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all rows as JSON")
    args = parser.parse_args()
    initialise()
    rows: list[dict] = []
    print(HEADER, flush=True)
    for case in args.case or ["moe"]:
        for recompute in args.recompute:
            # without recompute the unfused attention of 12k tokens does not fit: the shortest length alone
            lengths = args.lengths if recompute == "full" else [min(args.lengths)]
            measure(case, recompute == "full", lengths, args.steps, args.arms, rows)
            settle()
    result = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "rows": rows}
    if args.kernels:
        result["kernels"] = kernels()
    if args.timeline:
        args.timeline.write_text(json.dumps(timeline("moe", min(args.lengths))))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
