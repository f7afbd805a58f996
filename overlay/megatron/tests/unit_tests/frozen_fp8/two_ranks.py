# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""What test_frozen_base_parallel.py runs on two ranks, under torchrun."""

import pytest
import torch
from frozen_fp8_models import (
    BATCH,
    HIDDEN,
    SEQUENCE,
    assert_same_bits,
    batch,
    config,
    dequantised_reference,
    gpt,
    moe,
    run,
)

LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "ep2": {"expert_model_parallel_size": 2},
    "tp2-ep2-sp": {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": True,
    },
}
ONE_F_ONE_B = "f0 f1 b0 f2 b1 b2"


@pytest.fixture(scope="session", autouse=True)
def world():
    """Both ranks."""
    torch.distributed.init_process_group("gloo")
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(params=LAYOUTS)
def fields(request):
    """The config fields of a layout, with the process groups of both ranks set up for it."""
    from megatron.core import parallel_state

    layout = LAYOUTS[request.param]
    sizes = {name: size for name, size in layout.items() if name.endswith("_size")}
    parallel_state.initialize_model_parallel(**sizes)
    experts = moe(moe_token_dispatcher_type="alltoall") if "ep2" in request.param else {}
    yield layout | experts
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("recompute", [None, "full"])
def test_loss_and_gradients_are_bit_equal_to_the_dequantised_model(fields, recompute):
    from megatron.core.frozen_fp8 import convert_frozen_base

    expected = run(dequantised_reference(gpt(config(recompute=recompute, **fields))), ONE_F_ONE_B)
    for per_layer_free in (False, True):
        model = gpt(config(recompute=recompute, **fields))
        report = convert_frozen_base(model, per_layer_free=per_layer_free)
        local_experts = 4 // fields.get("expert_model_parallel_size", 1)
        mlp = 2 * local_experts if "num_moe_experts" in fields else 2
        assert report.summary.num_tensors == 2 * (2 + mlp)
        assert_same_bits(run(model, ONE_F_ONE_B), expected)


def test_the_shards_differ_between_the_ranks(fields):
    """Else bit-equality on both would say little."""
    from megatron.core.frozen_fp8 import select_frozen_linears

    model = gpt(config(layers=1, **fields))
    experts = [s for s in select_frozen_linears(model) if ".experts." in s.name]
    weight = (experts or select_frozen_linears(model))[0].module.weight.detach()
    both = [torch.empty_like(weight) for _ in range(2)]
    torch.distributed.all_gather(both, weight)
    assert not torch.equal(*both)


@pytest.fixture
def two_stages():
    """The process groups of a pipeline of two stages."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    yield
    parallel_state.destroy_model_parallel()


def pipeline_run(model):
    """Losses (last stage) and adapter gradients of three microbatches, one forward one backward, over two stages.

    By hand: Megatron-Core's own schedule counts tokens on a GPU.
    """
    other = 1 - torch.distributed.get_rank()
    losses, sent, received, pending = {}, {}, {}, []

    def post(tensor):
        pending.append((torch.distributed.isend(tensor, other), tensor))

    def exchanged():
        tensor = torch.empty(SEQUENCE, BATCH, HIDDEN, dtype=torch.bfloat16)
        torch.distributed.recv(tensor, other)
        return tensor

    def forward(index):
        tokens, position, mask = batch(index)
        if model.pre_process:
            sent[index] = model(tokens, position, mask)
            post(sent[index].detach())
        else:
            received[index] = exchanged().requires_grad_()
            model.set_input_tensor(received[index])
            losses[index] = model(tokens, position, mask, labels=tokens).float().mean()

    def backward(index):
        if model.pre_process:
            sent[index].backward(exchanged())
        else:
            losses[index].backward()
            post(received[index].grad)

    model.zero_grad(set_to_none=True)
    for step in (ONE_F_ONE_B if model.pre_process else "f0 b0 f1 b1 f2 b2").split():
        (forward if step[0] == "f" else backward)(int(step[1:]))
    for work, _ in pending:
        work.wait()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return [loss.item() for loss in losses.values()], gradients


@pytest.mark.parametrize("recompute", [None, "full"])
def test_pipeline_schedule_is_bit_equal_to_the_dequantised_model(two_stages, recompute):
    from megatron.core import parallel_state
    from megatron.core.frozen_fp8 import convert_frozen_base

    first = parallel_state.is_pipeline_first_stage()

    def build():
        fields = config(recompute=recompute, pipeline_model_parallel_size=2, pipeline_dtype=torch.bfloat16)
        return gpt(fields, pre_process=first, post_process=not first)

    expected = pipeline_run(dequantised_reference(build()))
    assert len(expected[0]) == (0 if first else 3)
    for per_layer_free in (False, True):
        model = build()
        assert convert_frozen_base(model, per_layer_free=per_layer_free).summary.num_tensors == 4
        assert_same_bits(pipeline_run(model), expected)
