# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors

"""LoRA under full recompute gets gradients for every model of a process, not only for the first at an address."""

import gc
import weakref

import pytest
import torch


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEQUENCE, VOCABULARY = 8, 32


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    """Model parallelism over a single rank."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    started = not torch.distributed.is_initialized()
    if started:
        store = tmp_path_factory.mktemp("dist") / "store"
        backend = "nccl" if DEVICE == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    yield
    parallel_state.destroy_model_parallel()
    if started:
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def empty_registry():
    """No entry of another test's model."""
    from megatron.bridge.peft.recompute import PEFT_RECOMPUTE_PATCHED

    gc.collect()
    PEFT_RECOMPUTE_PATCHED.clear()
    yield PEFT_RECOMPUTE_PATCHED
    PEFT_RECOMPUTE_PATCHED.clear()


def build_gpt(into=None):
    """A GPTModel of one recomputed layer; `into` is a bare instance to initialise instead of a new one."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    model = GPTModel.__new__(GPTModel) if into is None else into
    model.__init__(
        config,
        get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="learned_absolute",
    )
    return model.to(DEVICE)


def add_lora(model):
    from megatron.bridge.peft.lora import LoRA

    return LoRA(target_modules=["linear_qkv", "linear_fc1"], dim=2, alpha=2)(model, training=True)


def adapter_gradients(model) -> dict[str, torch.Tensor]:
    """One backward pass; the gradients by name, without those that are None. Raises if the loss has no graph."""
    tokens = torch.arange(SEQUENCE, device=DEVICE).unsqueeze(0)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=DEVICE).triu(1)
    model(tokens, tokens, mask, labels=tokens).float().mean().backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def assert_adapters_learn(model) -> None:
    gradients = adapter_gradients(model)
    expected = {name for name, param in model.named_parameters() if param.requires_grad}
    assert expected and gradients.keys() == expected
    # linear_out starts at zero, so only its own gradient is nonzero in the first step
    assert all(grad.abs().sum() > 0 for name, grad in gradients.items() if "linear_out" in name)


def test_model_at_the_address_of_a_dead_one_gets_gradients(empty_registry):
    from megatron.core.models.gpt import GPTModel

    first = add_lora(build_gpt())
    assert_adapters_learn(first)
    address, alive = id(first), weakref.ref(first)
    del first
    gc.collect()
    assert alive() is None, "the model leaked, so its address cannot come again"

    bare = []  # kept, so that each new instance takes another free slot until the freed one comes up
    while len(bare) < 200_000 and (not bare or id(bare[-1]) != address):
        bare.append(GPTModel.__new__(GPTModel))
    if id(bare[-1]) != address:
        pytest.skip("the allocator gave the freed address to something else")
    second = bare.pop()
    del bare
    assert_adapters_learn(add_lora(build_gpt(into=second)))


def test_stale_entry_does_not_stop_the_patch(empty_registry):
    model = build_gpt()
    empty_registry.add(id(model))  # what a model that lived here before leaves behind
    assert_adapters_learn(add_lora(model))


def test_collected_model_leaves_no_entry(empty_registry):
    model = add_lora(build_gpt())
    assert empty_registry == {id(model)}
    del model
    gc.collect()
    assert empty_registry == set()


def test_empty_registry_passed_in_is_used(empty_registry):
    from megatron.bridge.peft.recompute import maybe_enable_recompute_inputs_grad

    own: set[int] = set()
    lora_model = add_lora(build_gpt())
    del lora_model.decoder.forward  # back to the class's forward: an adapter model that nobody patched
    empty_registry.clear()
    assert maybe_enable_recompute_inputs_grad(lora_model, own) is own
    assert own == {id(lora_model)} and not empty_registry
    assert_adapters_learn(lora_model)


def test_block_is_patched_once(empty_registry):
    from megatron.bridge.peft.recompute import maybe_enable_recompute_inputs_grad

    model = add_lora(build_gpt())
    forward = vars(model.decoder)["forward"]
    maybe_enable_recompute_inputs_grad(model)
    maybe_enable_recompute_inputs_grad([model], set())
    assert vars(model.decoder)["forward"] is forward


def test_forward_replaced_by_others_still_runs(empty_registry):
    model = build_gpt()
    calls = []
    inner = model.decoder.forward

    def counting_forward(*args, **kwargs):
        calls.append(len(args))
        return inner(*args, **kwargs)

    model.decoder.forward = counting_forward
    assert_adapters_learn(add_lora(model))
    assert len(calls) == 1


def test_failure_to_patch_is_raised(empty_registry):
    from megatron.core.transformer.transformer_block import TransformerBlock

    class Sealed(TransformerBlock):
        def __setattr__(self, name, value):
            if name == "forward":
                raise AttributeError("forward is sealed")
            super().__setattr__(name, value)

    model = build_gpt()
    model.decoder.__class__ = Sealed
    with pytest.raises(RuntimeError, match="zero gradients") as caught:
        add_lora(model)
    assert isinstance(caught.value.__cause__, AttributeError)
