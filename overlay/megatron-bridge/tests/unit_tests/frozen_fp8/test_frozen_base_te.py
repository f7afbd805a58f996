# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The frozen FP8 base in Transformer Engine modules, on a GPU: bits, bytes, launches, readers, FP8 compute."""

import gc
import os

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and Transformer Engine"),
]


@pytest.fixture(scope="module")
def parallel():
    from megatron.core import parallel_state

    os.environ["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] = "1"
    torch.cuda.set_device(0)
    created = not torch.distributed.is_initialized()
    if created:
        torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    if created:
        torch.distributed.destroy_process_group()


def build(recompute=None, **settings):
    """A four-layer Qwen3-MoE of Bridge with LoRA on every base linear; hidden size not a multiple of 128."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.peft.lora import LoRA
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnBackend
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        num_hidden_layers=4,
        hidden_size=576,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=1024,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        intermediate_size=1024,
        moe_intermediate_size=320,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        dtype="bfloat16",
    )
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    values = {
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "seq_length": 1024,
        "gradient_accumulation_fusion": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "attention_backend": AttnBackend.unfused,
    }
    if recompute == "full":
        values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for name, value in (values | settings).items():
        setattr(provider, name, value)
    provider.finalize()
    model_parallel_cuda_manual_seed(11)
    lora = LoRA(target_modules=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], dim=8, alpha=8)
    provider.register_pre_wrap_hook(lambda model: lora(model, training=True))
    model = provider.provide_distributed_model(wrap_with_ddp=False, bf16=True)[0].train()
    generator = torch.Generator(device="cuda").manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.normal_(std=0.02, generator=generator)
    return model


def step(model, seed=0):
    """Loss and adapter gradients of one microbatch."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    tokens = torch.randint(0, 1024, (1, 512), device="cuda", generator=generator)
    position = torch.arange(512, device="cuda")[None]
    return model(tokens, position, None, labels=tokens).float().mean()


def gradients(model):
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def dequantise_in_place(stock, frozen):
    """Give `stock` the values that `frozen` stores, and the adapters of `frozen`."""
    from megatron.core.frozen_fp8 import is_frozen_fp8

    count = 0
    with torch.no_grad():
        for param, other in zip(stock.parameters(), frozen.parameters(), strict=True):
            param.copy_(other.dequantize() if is_frozen_fp8(other) else other)
            count += is_frozen_fp8(other)
    assert count == 4 * (2 + 2 * 8)


def assert_same(found, expected):
    assert found.keys() == expected.keys() and len(found) > 0
    assert [n for n in expected if not torch.equal(found[n], expected[n])] == []
    assert any(bool(g.any()) for g in found.values())


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("free", [False, True], ids=["store", "per-layer-free"])
def test_bit_equal_to_the_dequantised_model_with_two_microbatches_in_flight(parallel, free, recompute):
    frozen = build(recompute, fp8_frozen_base_store=True, fp8_frozen_base_per_layer_free=free)
    stock = build(recompute)
    dequantise_in_place(stock, frozen)
    results = []
    for model in (stock, frozen):
        first, second = step(model, 1), step(model, 2)
        second.backward()
        first.backward()
        results.append(((first.item(), second.item()), gradients(model)))
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])


def requested_bytes():
    """What was asked for, without the allocator's rounding."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def test_resident_bytes_follow_the_formula_and_a_step_leaves_nothing(parallel):
    from megatron.core.frozen_fp8 import convert_frozen_base

    model = build()
    gc.collect()
    before = requested_bytes()
    report = convert_frozen_base(model, per_layer_free=True)
    gc.collect()
    saved = before - requested_bytes()
    expected = report.summary.bf16_bytes - report.summary.fp8_bytes
    assert abs(saved - expected) <= 0.01 * expected  # rows of scales are padded to four
    level = []
    for _ in range(4):
        step(model).backward()
        model.zero_grad(set_to_none=True)
        level.append(torch.cuda.memory_allocated())
    assert level[1] == level[-1]


@pytest.mark.xfail(
    strict=True,
    reason="Transformer Engine 2.17.1 keeps the weight of a layernorm linear on its graph node (ctx.weight), "
    "so its bf16 lives until backward and is not dequantised again",
)
def test_every_module_is_freed_and_dequantised_again(parallel, monkeypatch):
    from megatron.core.frozen_fp8 import convert_frozen_base, tensor

    model = build()
    modules = convert_frozen_base(model, per_layer_free=True).summary.num_modules
    calls = []
    original = tensor.dequantize_blocks
    monkeypatch.setattr(tensor, "dequantize_blocks", lambda *a, **k: calls.append(a[0].shape) or original(*a, **k))
    loss = step(model)
    assert len(calls) == modules
    loss.backward()
    assert len(calls) == 2 * modules - 1  # the first layer's qkv needs no input gradient


def test_one_launch_a_module_in_forward(parallel, monkeypatch):
    from megatron.core.frozen_fp8 import convert_frozen_base, tensor

    model = build()
    modules = convert_frozen_base(model, per_layer_free=True).summary.num_modules
    calls = []
    original = tensor.dequantize_blocks
    monkeypatch.setattr(tensor, "dequantize_blocks", lambda *a, **k: calls.append(a[0].shape) or original(*a, **k))
    loss = step(model)
    assert len(calls) == modules
    loss.backward()
    # grouped and row-parallel linears once more each, no module twice
    assert modules + 12 <= len(calls) < 2 * modules


def test_the_bytes_are_those_of_the_cpu_and_loading_quantises(parallel):
    from megatron.core.frozen_fp8 import convert_frozen_base, frozen_slab, select_frozen_linears
    from megatron.core.frozen_fp8.kernels import quantize_blocks

    model = build()
    linear = select_frozen_linears(model)[0]
    weight = linear.module._parameters[linear.params[0]].detach().clone()
    convert_frozen_base(model)
    stored = linear.module._parameters[linear.params[0]]
    slab = frozen_slab(stored)
    for source in (weight, weight * 3):
        q, scale_inv = quantize_blocks(source.cpu())
        with torch.no_grad():
            stored.copy_(source)
        assert torch.equal(slab.q_GMK[0].view(torch.uint8).cpu(), q.view(torch.uint8))
        assert torch.equal(slab.scale_inv_Gmk[0].cpu(), scale_inv)
        assert stored.dequantize().dtype == torch.bfloat16 and stored.dtype == torch.bfloat16


def test_fp8_compute_reads_the_stored_bytes(parallel):
    settings = {
        "fp8": "e4m3",
        "fp8_recipe": "blockwise",
        "fp8_backward_override": "dequantized",
        "moe_router_padding_for_quantization": True,
    }
    frozen = build("full", fp8_frozen_base_store=True, fp8_frozen_base_per_layer_free=True, **settings)
    stock = build("full")
    dequantise_in_place(stock, frozen)
    want, loss = step(stock), step(frozen)
    loss.backward()
    assert abs(loss.item() - want.item()) < 0.02 * abs(want.item())
    assert any(bool(g.any()) for g in gradients(frozen).values())
    held = [p for p in frozen.parameters() if getattr(p, "_columnwise_data", None) is not None]
    assert held == []  # no transposed copy stays beside the stored weight


RAGGED = [(1, 128, 128), (3, 192, 320), (1, 1, 1), (2, 129, 127), (5, 64, 257), (1, 6176, 2048)]


@pytest.mark.parametrize("shape", RAGGED)
def test_the_kernel_matches_plain_torch_on_ragged_shapes(shape):
    from megatron.core.frozen_fp8.kernels import dequantize_blocks

    generator = torch.Generator().manual_seed(sum(shape))
    num, rows, cols = shape
    q = torch.randint(0, 127, shape, dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    scale = torch.rand(num, -(-rows // 128), -(-cols // 128), generator=generator)
    found = dequantize_blocks(q.cuda(), scale.cuda())
    assert torch.equal(found.cpu(), dequantize_blocks(q, scale))
