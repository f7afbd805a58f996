# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""A frozen base held as block FP8 computes bit for bit what the dequantised weights compute, and frees memory."""

import gc
import os
import weakref

import pytest
import torch

BLOCK = 128


def oracle_quantize(weight):
    """Plain torch, block by block: e4m3 bytes and fp32 scale_inv."""
    rows, cols = weight.shape
    q = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    scale_inv = torch.empty(-(-rows // BLOCK), -(-cols // BLOCK))
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            block = weight[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK].float()
            amax = block.abs().max()
            scale = 448.0 / amax if amax > 0 else torch.ones(())
            q[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] = (block * scale).to(torch.float8_e4m3fn)
            scale_inv[i, j] = 1.0 / scale
    return q, scale_inv


def oracle_dequantize(q, scale_inv):
    """Plain torch, block by block: bf16."""
    out = torch.empty(q.shape, dtype=torch.bfloat16)
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            at = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            out[at] = (q[at].float() * scale_inv[i, j]).to(torch.bfloat16)
    return out


class Adapter(torch.nn.Module):
    """A low-rank adapter around a frozen linear, as PEFT libraries add it."""

    def __init__(self, to_wrap, in_features, out_features, rank=4):
        super().__init__()
        self.to_wrap = to_wrap
        self.adapter = torch.nn.Sequential(
            torch.nn.Linear(in_features, rank, bias=False, dtype=torch.bfloat16),
            torch.nn.Linear(rank, out_features, bias=False, dtype=torch.bfloat16),
        )

    def forward(self, x, *args):
        out, bias = self.to_wrap(x, *args)
        return out + self.adapter(x), bias


@pytest.fixture(scope="module")
def parallel():
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    created = not torch.distributed.is_initialized()
    if created:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29577")
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.destroy_model_parallel()  # what another file may have left
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(7)
    yield
    parallel_state.destroy_model_parallel()
    if created:
        torch.distributed.destroy_process_group()


def build(moe=False, recompute=None, layers=2):
    """A bf16 GPT of the local spec with a frozen base and adapters on every base linear."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    extra = {}
    if moe:
        extra |= {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 96}
        extra |= {"moe_token_dispatcher_type": "allgather"}
    if recompute == "full":
        extra |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if recompute == "selective":
        extra |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=192,  # not a multiple of 128: ragged blocks
        num_attention_heads=4,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        bf16=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **extra,
    )
    spec = get_gpt_layer_local_spec(num_experts=4 if moe else None, moe_grouped_gemm=False)
    torch.manual_seed(3)
    model = GPTModel(config, spec, vocab_size=128, max_sequence_length=32).bfloat16()
    model.requires_grad_(False)
    wrap(model)
    # a recomputed layer needs an input that requires grad; PEFT libraries see to it in the same way
    model.embedding.register_forward_hook(lambda module, args, out: out.requires_grad_())
    return model


def wrap(model):
    from megatron.core.frozen_fp8.select import BASE_NAMES

    torch.manual_seed(5)
    for _name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            if child_name in BASE_NAMES:
                out_features, in_features = child.weight.shape
                setattr(module, child_name, Adapter(child, in_features, out_features))


def dequantised_reference(model):
    """Put the oracle's dequantised values into the selected weights of a model that was not converted."""
    from megatron.core.frozen_fp8 import select_frozen_linears

    for linear in select_frozen_linears(model):
        for name in linear.params:
            param = linear.module._parameters[name]
            with torch.no_grad():
                param.copy_(oracle_dequantize(*oracle_quantize(param)))
    return model


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 128, (2, 16), generator=generator)
    position = torch.arange(16)[None].expand(2, -1)
    mask = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)[None, None]
    return tokens, position, mask


def loss_of(model, seed):
    tokens, position, mask = batch(seed)
    return model(tokens, position, mask, labels=tokens).float().mean()


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def run(model, microbatches, order):
    """Losses and gradients with `microbatches` graphs alive before the first backward, in `order`."""
    model.zero_grad(set_to_none=True)
    losses = [loss_of(model, seed) for seed in range(microbatches)]
    for index in order:
        losses[index].backward()
    return [loss.item() for loss in losses], gradients(model)


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys() and len(found) > 0
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
        # an expert may get no token; attention always does
        assert found[name].abs().max() > 0 or "experts" in name, f"{name}: no gradient arrives"


@pytest.mark.parametrize("shape", [(128, 128), (192, 320), (1, 1), (129, 127), (256, 64)])
def test_quantise_and_dequantise_match_the_oracle_bit_for_bit(shape):
    from megatron.core.frozen_fp8.kernels import dequantize_blocks, quantize_blocks

    torch.manual_seed(0)
    weight = (torch.randn(shape) * 0.02).bfloat16()
    weight[: shape[0] // 2] = 0  # planted blocks of zeros
    q, scale_inv = quantize_blocks(weight)
    want_q, want_scale = oracle_quantize(weight)
    assert torch.equal(q.view(torch.uint8), want_q.view(torch.uint8))
    assert torch.equal(scale_inv, want_scale)
    back = dequantize_blocks(q[None], scale_inv[None])[0]
    assert torch.equal(back, oracle_dequantize(want_q, want_scale))


def test_a_block_too_small_for_a_scale_becomes_zero_and_no_nan():
    from megatron.core.frozen_fp8.kernels import dequantize_blocks, quantize_blocks

    weight = torch.zeros(128, 256, dtype=torch.bfloat16)
    weight[3, 5] = 1e-37  # 448 / 1e-37 is no float32
    weight[0, 200] = 0.5
    back = dequantize_blocks(*(t[None] for t in quantize_blocks(weight)))[0]
    weight[3, 5] = 0
    assert torch.equal(back, weight)


@pytest.mark.parametrize("per_layer_free", [False, True], ids=["store", "per-layer-free"])
@pytest.mark.parametrize("microbatches, order", [(1, [0]), (3, [2, 0, 1])], ids=["one", "three-in-flight"])
@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_loss_and_gradients_are_bit_equal_to_the_dequantised_model(
    parallel, moe, recompute, microbatches, order, per_layer_free
):
    from megatron.core.frozen_fp8 import convert_frozen_base

    reference = dequantised_reference(build(moe, recompute))
    expected_losses, expected = run(reference, microbatches, order)
    model = build(moe, recompute)
    report = convert_frozen_base(model, per_layer_free=per_layer_free)
    assert report.summary.num_tensors == 2 * (2 + (8 if moe else 2))
    losses, found = run(model, microbatches, order)
    assert losses == expected_losses
    assert_same_bits(found, expected)


class LiveBytes:
    """Bytes of dequantised weights that are alive, at most, while the context is open."""

    def __init__(self, monkeypatch):
        from megatron.core.frozen_fp8 import tensor

        self.live, self.peak, self.calls = 0, 0, 0
        original = tensor.dequantize_blocks

        def counted(*args, **kwargs):
            out = original(*args, **kwargs)
            self.live += out.nbytes
            self.calls += 1
            self.peak = max(self.peak, self.live)
            weakref.finalize(out, self._drop, out.nbytes)
            return out

        monkeypatch.setattr(tensor, "dequantize_blocks", counted)

    def _drop(self, nbytes):
        self.live -= nbytes


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_per_layer_free_keeps_one_module_alive(parallel, monkeypatch, recompute, microbatches):
    from megatron.core.frozen_fp8 import convert_frozen_base, select_frozen_linears

    model = build(recompute=recompute)
    largest = max(2 * s.shape[0] * s.shape[1] for s in select_frozen_linears(model))
    convert_frozen_base(model, per_layer_free=True)
    gc.disable()
    try:
        live = LiveBytes(monkeypatch)
        run(model, microbatches, range(microbatches))
        assert live.peak == largest
        assert live.live == 0
    finally:
        gc.enable()


def test_store_alone_dequantises_once_a_microbatch(parallel, monkeypatch):
    from megatron.core.frozen_fp8 import convert_frozen_base

    model = build()
    modules = convert_frozen_base(model).summary.num_modules
    live = LiveBytes(monkeypatch)
    run(model, 1, [0])
    assert live.calls == modules
    assert live.live == 0


def test_memory_is_flat_over_fifty_steps_without_gc(parallel):
    from megatron.core.frozen_fp8 import convert_frozen_base

    model = build(layers=1)
    convert_frozen_base(model, per_layer_free=True)
    gc.collect()
    gc.disable()
    try:
        counts = []
        for _step in range(50):
            run(model, 1, [0])
            counts.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
        assert len(set(counts[2:])) == 1, counts
    finally:
        gc.enable()


def test_bf16_copy_is_freed_and_resident_bytes_follow_the_formula(parallel):
    from megatron.core.frozen_fp8 import convert_frozen_base, select_frozen_linears

    model = build()
    selected = select_frozen_linears(model)
    old = [weakref.ref(s.module._parameters[n]) for s in selected for n in s.params]
    elements = [s.module._parameters[n].numel() for s in selected for n in s.params]
    blocks = [-(-s.shape[0] // BLOCK) * -(-s.shape[1] // BLOCK) for s in selected for n in s.params]
    report = convert_frozen_base(model)
    assert all(ref() is None for ref in old)
    assert report.summary.bf16_bytes == 2 * sum(elements)
    assert report.summary.fp8_bytes == sum(elements) + 4 * sum(blocks)


def test_attributes_and_names_survive(parallel):
    from megatron.core.frozen_fp8 import convert_frozen_base, is_frozen_fp8

    model = build()
    before = {n: dict(p.__dict__) for n, p in model.named_parameters()}
    shapes = {n: (tuple(p.shape), p.dtype, p.device) for n, p in model.named_parameters()}
    convert_frozen_base(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    stored = [n for n, p in after.items() if is_frozen_fp8(p)]
    assert len(stored) == 8
    for name, param in after.items():
        assert (tuple(param.shape), param.dtype, param.device) == shapes[name]
        assert before[name].items() <= param.__dict__.items(), name


def test_readers_outside_forward_see_the_dequantised_values(parallel):
    from megatron.core.frozen_fp8 import convert_frozen_base

    reference = dict(dequantised_reference(build()).named_parameters())
    model = build()
    convert_frozen_base(model)
    for name, param in model.named_parameters():
        assert torch.equal(param.detach().float().norm(), reference[name].detach().float().norm()), name
        assert torch.equal(param.data.clone(), reference[name].data), name
        assert torch.equal(param[:1] + 0, reference[name][:1] + 0), name
    state = {k: v.clone() for k, v in model.state_dict().items() if torch.is_tensor(v)}
    for name, value in state.items():
        assert torch.equal(value, reference[name]), name


def test_a_state_dict_round_trip_keeps_the_bits(parallel):
    from megatron.core.frozen_fp8 import convert_frozen_base

    model = build()
    convert_frozen_base(model)
    expected, want = run(model, 1, [0])
    state = {k: (v.clone() if torch.is_tensor(v) else v) for k, v in model.state_dict().items()}
    other = build()
    with torch.no_grad():
        for param in other.parameters():
            param.normal_(std=0.1)
    other.requires_grad_(False)
    for name, param in other.named_parameters():
        param.requires_grad_(".adapter." in name)
    convert_frozen_base(other)
    other.load_state_dict(state)
    found, got = run(other, 1, [0])
    assert found == expected
    assert_same_bits(got, want)


def test_writing_in_place_is_refused(parallel):
    from megatron.core.frozen_fp8 import convert_frozen_base, select_frozen_linears

    model = build(layers=1)
    selected = select_frozen_linears(model)
    convert_frozen_base(model)
    weight = selected[0].module.weight
    with pytest.raises(NotImplementedError, match="cannot be changed in place"):
        weight.data.mul_(2)
    with pytest.raises(ValueError, match="expected shape"):
        weight.data.copy_(torch.zeros(3, 3))


def test_offload_hooks_outside_still_see_every_other_tensor(parallel):
    from megatron.core.frozen_fp8 import convert_frozen_base

    model = build()
    convert_frozen_base(model, per_layer_free=True)
    expected, want = run(model, 1, [0])
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    def unpack(tensor):
        unpacked.append(tuple(tensor.shape))
        return tensor

    model.zero_grad(set_to_none=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = loss_of(model, 0)
    loss.backward()
    assert [loss.item()] == expected
    assert_same_bits(gradients(model), want)
    assert len(packed) > 0 and sorted(packed) == sorted(unpacked)
    weights = {tuple(p.shape) for n, p in model.named_parameters() if n.endswith("to_wrap.weight")}
    assert not weights & set(packed)


def test_evaluation_inside_training(parallel):
    from megatron.core.frozen_fp8 import convert_frozen_base

    model = build()
    convert_frozen_base(model, per_layer_free=True)
    expected, want = run(model, 1, [0])
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, 0)
    with torch.no_grad():
        assert loss_of(model, 0).item() == expected[0]
    loss.backward()
    assert_same_bits(gradients(model), want)


def test_a_model_without_a_frozen_base_is_refused(parallel):
    from megatron.core.frozen_fp8 import convert_frozen_base

    model = build(layers=1)
    model.requires_grad_(True)
    with pytest.raises(ValueError, match="no frozen base linear found"):
        convert_frozen_base(model)


def test_converting_twice_is_refused(parallel):
    from megatron.core.frozen_fp8 import convert_frozen_base

    model = build(layers=1)
    convert_frozen_base(model)
    with pytest.raises(ValueError, match="already"):
        convert_frozen_base(model)


def test_a_weight_that_is_not_finite_is_refused_by_name(parallel):
    from megatron.core.frozen_fp8 import convert_frozen_base, select_frozen_linears

    model = build(layers=1)
    linear = select_frozen_linears(model)[1]
    with torch.no_grad():
        linear.module.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        convert_frozen_base(model)
    assert not any("_frozen_fp8_slab" in m.__dict__ for m in model.modules()), "a refused model was changed"


def test_a_half_converted_model_is_not_taken_for_a_converted_one(parallel):
    from megatron.core.frozen_fp8 import convert_if_configured, select_frozen_linears
    from megatron.core.frozen_fp8.convert import convert_module

    model = build(layers=1)
    model.config.fp8_frozen_base_store = True
    convert_module(select_frozen_linears(model)[0], per_layer_free=False)
    with pytest.raises(ValueError, match="failed half-way"):
        convert_if_configured(model)


def test_single_grouped_weight_is_refused(parallel):
    from megatron.core.frozen_fp8 import convert_frozen_base

    model = build(layers=1)
    model.config.moe_single_grouped_weight = True
    with pytest.raises(NotImplementedError, match="moe_single_grouped_weight"):
        convert_frozen_base(model)
