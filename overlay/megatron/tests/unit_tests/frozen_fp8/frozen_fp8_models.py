# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Small models with a frozen base and adapters, the oracle of the store in plain torch, and how they are compared."""

import torch

BLOCK = 128
VOCAB, SEQUENCE, BATCH = 128, 16, 2
HIDDEN = 192  # not a multiple of 128: ragged blocks


def oracle(weight):
    """What block FP8 makes of a bf16 [M, K] weight: e4m3 bytes [M, K], scale_inv [m, k] float32, bf16 [M, K]."""
    q = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scale_inv = torch.empty(-(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK))
    back = torch.empty(weight.shape, dtype=torch.bfloat16)
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            at = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            block = weight.detach()[at].float()
            scale = 448.0 / block.abs().max() if block.any() else torch.ones(())
            q[at], scale_inv[i, j] = (block * scale).to(q.dtype), 1.0 / scale
            back[at] = (q[at].float() * scale_inv[i, j]).to(back.dtype)
    return q, scale_inv, back


class Adapter(torch.nn.Module):
    """A low-rank adapter around a frozen linear, with the communication its tensor parallel layout asks for."""

    def __init__(self, to_wrap, rank=4, row=False, sequence_parallel=False, communicate=True):
        super().__init__()
        rows, columns = to_wrap.weight.shape
        self.to_wrap, self.row, self.sequence_parallel, self.communicate = to_wrap, row, sequence_parallel, communicate
        down = torch.nn.Linear(columns, rank, bias=False, dtype=torch.bfloat16)
        up = torch.nn.Linear(rank, rows, bias=False, dtype=torch.bfloat16)
        self.adapter = torch.nn.ModuleDict({"down": down, "up": up})

    def forward(self, x, *args, **kwargs):
        out, bias = self.to_wrap(x, *args, **kwargs)
        return out + self._delta(x), bias

    def _delta(self, x):
        from megatron.core import tensor_parallel as tp

        if not self.communicate:
            return self.adapter["up"](self.adapter["down"](x))
        if self.row:
            reduce = tp.reduce_scatter_to_sequence_parallel_region
            reduce = reduce if self.sequence_parallel else tp.reduce_from_tensor_model_parallel_region
            return self.adapter["up"](reduce(self.adapter["down"](x)))
        gather = tp.gather_from_sequence_parallel_region
        gather = gather if self.sequence_parallel else tp.copy_to_tensor_model_parallel_region
        return self.adapter["up"](self.adapter["down"](gather(x)))


ROWS = ("linear_proj", "linear_fc2", "out_proj")


def freeze_and_adapt(model, sequence_parallel=False):
    """Freeze `model` and put an adapter on every linear that becomes FP8. As PEFT does."""
    from megatron.core.frozen_fp8 import select_frozen_linears

    model.requires_grad_(False)
    torch.manual_seed(5)
    for linear in select_frozen_linears(model):
        parent, _, name = linear.name.rpartition(".")
        communicate = ".experts." not in linear.name and "down_proj" not in name
        parallel = {"sequence_parallel": sequence_parallel, "communicate": communicate}
        adapted = Adapter(linear.module, row=name in ROWS, **parallel)
        setattr(model.get_submodule(parent), name, adapted)
    return model


def config(kind=None, recompute=None, layers=2, **fields):
    """A bf16 TransformerConfig (or `kind`) of the local spec, without any fused kernel."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    if recompute == "full":
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if recompute == "selective":
        fields |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    off = (
        "add_bias_linear gradient_accumulation_fusion bias_dropout_fusion masked_softmax_fusion "
        "bias_activation_fusion persist_layer_norm apply_rope_fusion"
    )
    return (kind or TransformerConfig)(
        **{
            "num_layers": layers,
            "hidden_size": HIDDEN,
            "num_attention_heads": 4,
            "use_cpu_initialization": True,
            "params_dtype": torch.bfloat16,
            "bf16": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **dict.fromkeys(off.split(), False),
            **fields,
        }
    )


def moe(**fields):
    """Fields of a mixture of four experts; the expert's width is ragged too."""
    return {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 96, **fields}


def gpt(config, spec=None, **kwargs):
    """A frozen GPT with adapters; the same `config` gives the same weights."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if spec is None:
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=False,
            multi_latent_attention=config.multi_latent_attention,
            normalization=config.normalization,
        )
    model_parallel_cuda_manual_seed(7)
    torch.manual_seed(3)
    model = GPTModel(config, spec, vocab_size=VOCAB, max_sequence_length=SEQUENCE, **kwargs).bfloat16()
    _own_experts(model)
    freeze_and_adapt(model, config.sequence_parallel)
    if model.pre_process:
        # a recomputed layer needs an input that requires grad; PEFT libraries see to it in the same way
        model.embedding.register_forward_hook(lambda module, args, out: out.requires_grad_())
    return model


@torch.no_grad()
def _own_experts(model):
    """Initialised on a CPU, the experts of every rank are the same; give each rank its own."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(parallel_state.get_expert_model_parallel_rank())
    for name, param in model.named_parameters():
        if ".experts." in name:
            param.normal_(std=0.02, generator=generator)


@torch.no_grad()
def dequantised_reference(model):
    """Put the oracle's values into the weights that would become FP8, of a model that is not converted."""
    from megatron.core.frozen_fp8 import select_frozen_linears

    for linear in select_frozen_linears(model):
        for name in linear.params:
            param = linear.module._parameters[name]
            param.copy_(oracle(param)[2])
    return model


def batch(seed):
    """Tokens [2, 16], positions and a causal mask."""
    tokens = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(seed))
    mask = torch.triu(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool), 1)[None, None]
    return tokens, torch.arange(SEQUENCE)[None].expand(BATCH, -1), mask


def loss_of(model, seed):
    """The mean loss of one microbatch; data parallel ranks see other tokens."""
    from megatron.core import parallel_state

    tokens, position, mask = batch(seed + 100 * parallel_state.get_data_parallel_rank())
    return model(tokens, position, mask, labels=tokens).float().mean()


def run(model, schedule, loss_of=loss_of):
    """Losses and adapter gradients after `schedule`: "f0 f1 b0 b1" is two forwards, then two backwards."""
    model.zero_grad(set_to_none=True)
    losses = {}
    for step in schedule.split():
        kind, index = step[0], int(step[1:])
        if kind == "f":
            losses[index] = loss_of(model, index)
        else:
            losses[index].backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return [losses[index].item() for index in sorted(losses)], gradients


def assert_same_bits(found, expected):
    """Losses and gradients as `run` gives them are equal bit for bit, and every adapter got a gradient."""
    assert found[0] == expected[0], f"losses {found[0]} != {expected[0]}"
    assert found[1].keys() == expected[1].keys() and len(found[1]) > 0
    for name in expected[1]:
        assert torch.equal(found[1][name], expected[1][name]), name
        # an expert may get no token; everything else does
        assert found[1][name].any() or ".experts." in name, f"{name}: no gradient arrives"
