# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""A LoRA model that Bridge builds from an HF config holds its frozen base as block FP8, on request and by itself."""

import pytest
import torch


BLOCK = 128
SEQUENCE = 16
COMMON = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "dtype": "bfloat16",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "tie_word_embeddings": False,
}


def qwen3_moe():
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **COMMON, num_hidden_layers=2, intermediate_size=96, architectures=["Qwen3MoeForCausalLM"]
    ), _qwen3_spec


def qwen3_5_moe_text():
    from transformers import Qwen3_5MoeTextConfig

    linear = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 48}
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    config = Qwen3_5MoeTextConfig(
        **COMMON, **linear, **kinds, rope_parameters=rope, architectures=["Qwen3_5MoeForCausalLM"]
    )
    return config, _qwen3_5_spec


def _qwen3_spec(provider):
    from megatron.bridge.models.gpt_provider import local_layer_spec

    return local_layer_spec(provider)


def _qwen3_5_spec(provider, vp_stage=None):
    """One layer of gated delta net, one of attention, of local modules."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layers = [
        get_gpt_layer_local_spec(
            num_experts=provider.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
        )
        for _ in range(provider.num_layers)
    ]
    layers[0].submodules.self_attention = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        ),
    )
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm)


MODELS = {"qwen3-moe": (qwen3_moe, 2 * (2 + 8)), "qwen3.5-moe": (qwen3_5_moe_text, 2 * (2 + 2 + 8))}


def provider_of(name, **fields):
    """Bridge's provider for the tiny model, on the local spec and without fused kernels."""
    from megatron.bridge import AutoBridge

    config, spec = MODELS[name][0]()
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    provider.transformer_layer_spec = spec
    off = "gradient_accumulation_fusion bias_dropout_fusion masked_softmax_fusion bias_activation_fusion"
    off += " apply_rope_fusion persist_layer_norm moe_permute_fusion moe_grouped_gemm layernorm_zero_centered_gamma"
    fields = dict.fromkeys(off.split(), False) | {"moe_token_dispatcher_type": "allgather"} | fields
    fields |= {"moe_router_load_balancing_type": "none", "deterministic_mode": True, "attention_backend": None}
    fields.pop("attention_backend")
    for field, value in fields.items():
        assert hasattr(provider, field), field
        setattr(provider, field, value)
    provider.finalize()
    return provider


def lora():
    """Adapters on attention, delta net, experts and shared experts, none of them zero."""
    from megatron.bridge.peft.lora import LoRA

    targets = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"]
    return LoRA(target_modules=targets, dim=4, alpha=8, dropout=0.0, lora_B_init_method="normal")


def build(name, peft=True, **fields):
    """What a user of Bridge does: provider, pre-wrap hook, `provide_distributed_model`. The same weights each time."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    provider = provider_of(name, **fields)
    if peft:
        provider.register_pre_wrap_hook(lambda chunks: lora()(chunks, training=True))
    model_parallel_cuda_manual_seed(7)
    torch.manual_seed(3)
    return provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)


@torch.no_grad()
def dequantised_reference(chunks):
    """Put the oracle's values, block by block in plain torch, into the weights that would become FP8."""
    from megatron.core.frozen_fp8 import select_frozen_linears

    for linear in select_frozen_linears(chunks):
        for name in linear.params:
            param = linear.module._parameters[name]
            for rows in param.split(BLOCK):
                for block in rows.split(BLOCK, 1):
                    scale = 448.0 / block.float().abs().max()
                    block.copy_((block.float() * scale).to(torch.float8_e4m3fn).float() * (1.0 / scale))
    return chunks


def run(chunks, microbatches=2):
    """Losses and adapter gradients with all microbatches in flight."""
    model = chunks[0]
    model.zero_grad(set_to_none=True)
    losses = []
    for seed in range(microbatches):
        tokens = torch.randint(0, 256, (2, SEQUENCE), generator=torch.Generator().manual_seed(seed))
        mask = torch.triu(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool), 1)[None, None]
        losses.append(model(tokens, torch.arange(SEQUENCE)[None].expand(2, -1), mask, labels=tokens).float().mean())
    for loss in losses:
        loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return [loss.item() for loss in losses], gradients


def assert_same_bits(found, expected):
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys() and len(found[1]) > 0
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name
        # an expert may get no token; everything else does
        assert gradient.any() or ".experts." in name, f"{name}: no gradient arrives"


@pytest.mark.parametrize("name", MODELS)
def test_the_flags_are_fields_of_the_provider(parallel, name):
    provider = provider_of(name)
    assert provider.fp8_frozen_base_store is False and provider.fp8_frozen_base_per_layer_free is False


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("name", MODELS)
def test_converts_by_itself_and_is_bit_equal_to_the_dequantised_model(parallel, name, recompute):
    from megatron.core.frozen_fp8 import is_frozen_fp8

    fields = {}
    if recompute == "full":
        fields = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    expected = run(dequantised_reference(build(name, **fields)))
    for per_layer_free in (False, True):
        chunks = build(
            name, fp8_frozen_base_store=True, fp8_frozen_base_per_layer_free=per_layer_free, **fields
        )
        stored = [n for n, p in chunks[0].named_parameters() if is_frozen_fp8(p)]
        assert len(stored) == MODELS[name][1]
        assert not any("adapter" in n or "router" in n or "output_layer" in n for n in stored)
        assert all(p.requires_grad == ("adapter" in n) for n, p in chunks[0].named_parameters())
        assert_same_bits(run(chunks), expected)


@pytest.mark.parametrize("name", MODELS)
def test_unset_flags_change_nothing(parallel, name):
    from megatron.core.frozen_fp8 import is_frozen_fp8

    assert not any(is_frozen_fp8(p) for p in build(name)[0].parameters())


def test_without_peft_the_flag_is_an_error(parallel):
    with pytest.raises(ValueError, match=r"no frozen base linear found: .*apply the adapters before the conversion"):
        build("qwen3-moe", peft=False, fp8_frozen_base_store=True)


def test_per_layer_free_without_the_store_is_an_error(parallel):
    with pytest.raises(ValueError, match="fp8_frozen_base_per_layer_free needs fp8_frozen_base_store"):
        provider_of("qwen3-moe", fp8_frozen_base_per_layer_free=True)


def test_the_merged_weight_of_an_adapted_linear(parallel):
    """`LoRALinear.weight` adds the adapter's product to the base weight; absorbed attention reads it."""
    reference = dequantised_reference(build("qwen3-moe"))[0]
    model = build("qwen3-moe", fp8_frozen_base_store=True)[0]
    merged = dict(reference.named_modules())
    found = [n for n, m in model.named_modules() if type(m).__name__ == "LoRALinear" and ".experts." not in n]
    assert len(found) == 2 * 2
    for name in found:
        weight = model.get_submodule(name).weight
        assert torch.equal(weight, merged[name].weight), name
        assert not torch.equal(weight, model.get_submodule(name).to_wrap.weight.dequantize())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Qwen3-MoE checkpoint with weights."""
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(11)
    directory = tmp_path_factory.mktemp("qwen3-moe")
    Qwen3MoeForCausalLM(qwen3_moe()[0]).bfloat16().save_pretrained(directory)
    return str(directory)


def loaded(checkpoint, **fields):
    """Built, converted if `fields` say so, and then loaded from the HF checkpoint."""
    from megatron.bridge import AutoBridge

    chunks = build("qwen3-moe", **fields)
    AutoBridge.from_hf_pretrained(checkpoint).load_hf_weights(chunks)
    return chunks


def test_hf_weights_loaded_after_the_conversion_are_quantised(parallel, checkpoint):
    from megatron.core.frozen_fp8 import is_frozen_fp8

    before = build("qwen3-moe", fp8_frozen_base_store=True)[0]
    model = loaded(checkpoint, fp8_frozen_base_store=True)[0]
    reference = dequantised_reference(loaded(checkpoint))[0]
    stored = {n: p for n, p in model.named_parameters() if is_frozen_fp8(p)}
    assert len(stored) == MODELS["qwen3-moe"][1]
    for name, param in stored.items():
        assert torch.equal(param.dequantize(), reference.get_parameter(name)), name
        assert not torch.equal(param.rowwise_data.float(), before.get_parameter(name).rowwise_data.float()), name
    assert_same_bits(run([model]), run([reference]))


@pytest.mark.parametrize("merge", [False, True], ids=["base", "merged"])
def test_hf_export_of_a_stored_base(parallel, checkpoint, merge):
    """The dequantised values, with and without the adapters added."""
    from megatron.bridge import AutoBridge

    def export(chunks):
        bridge = AutoBridge.from_hf_pretrained(checkpoint)
        stream = bridge.export_hf_weights(chunks, cpu=True, show_progress=False, merge_adapter_weights=merge)
        return {name: weight.clone() for name, weight in stream}

    found = export(loaded(checkpoint, fp8_frozen_base_store=True, fp8_frozen_base_per_layer_free=True))
    expected = export(dequantised_reference(loaded(checkpoint)))
    assert found.keys() == expected.keys() and len(found) > 2 * (4 + 3 * 4)
    for name, weight in expected.items():
        assert type(found[name]) is torch.Tensor and found[name].dtype == torch.bfloat16, name
        assert torch.equal(found[name], weight), name
