# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Gated delta net, multi-latent attention and multi-token prediction on a frozen FP8 base, bit for bit."""

import os

import pytest
import torch
from frozen_fp8_models import HIDDEN, assert_same_bits, config, dequantised_reference, gpt, moe, oracle, run

TWO_IN_FLIGHT = "f0 f1 b1 b0"


@pytest.fixture(scope="module", autouse=True)
def parallel():
    from megatron.core import parallel_state

    created = not torch.distributed.is_initialized()
    if created:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29578")
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.destroy_model_parallel()  # what another file may have left
    parallel_state.initialize_model_parallel()
    with torch.compiler.set_stance("force_eager"):  # compiling would be most of the time here
        yield
    parallel_state.destroy_model_parallel()
    if created:
        torch.distributed.destroy_process_group()


def delta_net(recompute=None):
    """Two layers of gated delta net; in_proj has 200 rows: q, k, v, z and two numbers a head."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        ),
    )
    fields = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    fields |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "normalization": "RMSNorm"}
    return gpt(
        config(
            recompute=recompute,
            experimental_attention_variant="gated_delta_net",
            linear_attention_freq=[1, 1],
            deterministic_mode=True,  # the path in plain torch
            activation_func=torch.nn.functional.silu,
            **fields,
        ),
        spec,
    )


def latent_attention_config(**fields):
    """Down and up projections of queries and of keys and values."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    ranks = {"q_lora_rank": 48, "kv_lora_rank": 40, "qk_head_dim": 24, "qk_pos_emb_head_dim": 8, "v_head_dim": 24}
    return config(MLATransformerConfig, multi_latent_attention=True, rope_type="rope", **ranks, **fields)


class CausalAttention(torch.nn.Module):
    """Core attention for heads whose keys and values differ in width: the local spec's own does not take them."""

    def __init__(self, *, softmax_scale, **kwargs):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, attention_mask, **kwargs):
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.softmax_scale
        weights = scores.float().masked_fill(attention_mask, float("-inf")).softmax(-1).to(value.dtype)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)


def latent_attention(recompute=None):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(multi_latent_attention=True)
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    return gpt(latent_attention_config(recompute=recompute), spec)


def multi_token_prediction(recompute=None):
    """Two decoder layers and one that predicts the token after next, with experts."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec

    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    fields = config(recompute=recompute, mtp_num_layers=1, **moe(moe_token_dispatcher_type="allgather"))
    return gpt(fields, spec, mtp_block_spec=get_gpt_mtp_block_spec(fields, spec, use_transformer_engine=False))


MODELS = {
    "delta-net": (delta_net, 2 * 4),
    "latent-attention": (latent_attention, 2 * 7),
    "multi-token-prediction": (multi_token_prediction, 3 * (2 + 8)),
}


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_bit_equal_to_the_dequantised_model(name, recompute):
    from megatron.core.frozen_fp8 import convert_frozen_base

    build, num_tensors = MODELS[name]
    expected = run(dequantised_reference(build(recompute)), TWO_IN_FLIGHT)
    for per_layer_free in (False, True):
        model = build(recompute)
        assert convert_frozen_base(model, per_layer_free=per_layer_free).summary.num_tensors == num_tensors
        assert_same_bits(run(model, TWO_IN_FLIGHT), expected)


def test_delta_net_rows_are_ragged():
    from megatron.core.frozen_fp8 import select_frozen_linears

    shapes = {s.name.split(".")[-2]: s.shape for s in select_frozen_linears(delta_net())}
    assert shapes["in_proj"] == (2 * 32 + 2 * 64 + 2 * 4, HIDDEN)


def test_multi_token_prediction_keeps_eh_proj():
    from megatron.core.frozen_fp8 import convert_frozen_base, is_frozen_fp8

    model = multi_token_prediction()
    convert_frozen_base(model)
    plain = {n for n, p in model.named_parameters() if not is_frozen_fp8(p) and not p.requires_grad}
    assert "mtp.layers.0.eh_proj.weight" in plain
    assert any(n.endswith("router.weight") for n in plain)
    assert any(n.startswith("mtp.layers.0.") and is_frozen_fp8(p) for n, p in model.named_parameters())


def test_absorbed_latent_attention_reads_the_dequantised_weight():
    """Its forward multiplies with parts of linear_kv_up_proj.weight, past that linear's forward."""
    from megatron.core.frozen_fp8 import convert_frozen_base
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
        AbsorbedMLASelfAttention,
        AbsorbedMLASelfAttentionSubmodules,
    )
    from megatron.core.transformer.identity_op import IdentityOp

    fields = latent_attention_config()
    column = dict.fromkeys(("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj"), ColumnParallelLinear)
    attention = AbsorbedMLASelfAttention(
        fields,
        AbsorbedMLASelfAttentionSubmodules(
            **{f"linear_{name}": linear for name, linear in column.items()},
            core_attention=IdentityOp,
            linear_proj=RowParallelLinear,
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
        layer_number=1,
    ).requires_grad_(False)
    heads = oracle(attention.linear_kv_up_proj.weight)[2].view(4, fields.qk_head_dim + fields.v_head_dim, -1)
    convert_frozen_base(torch.nn.ModuleDict({"layers": torch.nn.ModuleList([attention])}), per_layer_free=True)
    k_up, v_up = attention._get_kv_up_weights()
    assert torch.equal(k_up, heads[:, : fields.qk_head_dim]) and torch.equal(v_up, heads[:, fields.qk_head_dim :])
    queries = torch.randn(2, 4, fields.qk_head_dim, dtype=torch.bfloat16, requires_grad=True)
    torch.einsum("bhd,hdk->bhk", queries, attention._get_kv_up_weights()[0]).sum().backward()
    want = torch.autograd.grad(torch.einsum("bhd,hdk->bhk", queries, heads[:, : fields.qk_head_dim]).sum(), queries)[0]
    assert torch.equal(queries.grad, want)
