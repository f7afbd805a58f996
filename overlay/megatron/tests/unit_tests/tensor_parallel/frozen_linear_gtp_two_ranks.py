# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors

"""What test_frozen_linear_gtp.py runs on two ranks, under torchrun."""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
WIDTH, HIDDEN = 32, 64  # cut in two, both are multiples of 16 rows, the padding unit
UP, DOWN = (HIDDEN, WIDTH), (WIDTH, HIDDEN)  # [rows, columns]; GTP wants neighbours of different shape


@pytest.fixture(scope="module")
def group():
    """A group of both ranks that serves as the GTP group and, where a test says so, as the TP group."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import generalized_tensor_parallelism as gtp

    if DEVICE == "cuda":
        if not gtp.HAVE_TE:
            pytest.skip("GTP on a GPU needs Transformer Engine 2.19 or newer")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(gtp_remat_size=2)
    yield parallel_state.get_gtp_weight_remat_group()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh_gtp_state():
    """Prefetch chains and the buffer cache are process-wide."""
    yield
    from megatron.core.tensor_parallel import generalized_tensor_parallelism as gtp

    gtp.reset_gtp_state()
    gtp.update_gtp_config(weight_prefetch=True, async_reduction=True)


class Linear(torch.nn.Module):
    """A full weight and the same weight cut into GTP shards by Megatron-Core."""

    def __init__(self, group, seed, shape, dtype=torch.float32, bias=False, trainable=False):
        super().__init__()
        from megatron.core.tensor_parallel.gtp_api import wrap_module_params_gtp

        generator = torch.Generator().manual_seed(seed)  # the same numbers on both ranks
        full = torch.randn(shape, generator=generator).to(DEVICE, dtype)
        self.full = full.clone().requires_grad_(trainable)
        self.bias = torch.randn(shape[0], generator=generator).to(DEVICE, dtype) if bias else None
        self.weight = torch.nn.Parameter(full)
        wrap_module_params_gtp(self, ["weight"], group)
        self.weight.requires_grad_(trainable)
        if trainable:
            self.weight.main_grad = torch.zeros_like(self.weight.data)

    def apply_sharded(self, x, allreduce_dgrad=False, tp_group=None):
        from megatron.core.tensor_parallel import layers

        linear = (
            layers.linear_with_grad_accumulation_and_async_allreduce
            if self.weight.requires_grad
            else layers.linear_with_frozen_weight
        )
        return linear(x, self.weight, self.bias, False, allreduce_dgrad, False, tp_group=tp_group, gtp_remat_size=2)

    def apply_full(self, x):
        """The non-GTP frozen path on the whole weight: what the sharded path must equal bit for bit."""
        from megatron.core.tensor_parallel.layers import linear_with_frozen_weight

        return linear_with_frozen_weight(x, self.full.detach(), self.bias, False, False, False, None)


def make_input(dtype, shape=(3, 2, WIDTH)):
    generator = torch.Generator().manual_seed(100 + torch.distributed.get_rank())
    return torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_(True)


def run(layers, x, method):
    """Forward through all layers and backward of the sum; (output, gradient of the input)."""
    x = x.detach().clone().requires_grad_(True)
    out = x
    for layer in layers:
        out = getattr(layer, method)(out)
    out.sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prefetch", [False, True])
def test_chain_equals_full_weights(group, dtype, bias, prefetch):
    from megatron.core.tensor_parallel import generalized_tensor_parallelism as gtp

    gtp.update_gtp_config(weight_prefetch=prefetch)
    layers = [Linear(group, seed, shape, dtype, bias) for seed, shape in enumerate((UP, DOWN, UP, DOWN))]
    for _ in range(3):  # the first pass links the prefetch chain, the later ones follow it
        x = make_input(dtype)
        out, grad = run(layers, x, "apply_sharded")
        expected_out, expected_grad = run(layers, x, "apply_full")
        assert torch.equal(out, expected_out)
        assert torch.equal(grad, expected_grad)


def test_padded_weight_equals_full_weight(group):
    layer = Linear(group, 0, (WIDTH + 8, WIDTH))
    assert layer.weight.pad_length > 0
    x = make_input(torch.float32)
    for got, expected in zip(run([layer], x, "apply_sharded"), run([layer], x, "apply_full"), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("leading", [(5,), (3, 2)])
def test_saves_the_shard_itself(group, leading):
    layers = [Linear(group, seed, shape) for seed, shape in enumerate((UP, DOWN))]
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = make_input(torch.float32, (*leading, WIDTH))
        for layer in layers:
            out = layer.apply_sharded(out)
    assert [tensor.data_ptr() for tensor in saved] == [layer.weight.data_ptr() for layer in layers]
    assert sum(tensor.numel() for tensor in saved) == sum(layer.full.numel() for layer in layers) // 2
    out.sum().backward()


def test_allreduces_dgrad(group):
    layer = Linear(group, 0, UP)
    x = make_input(torch.float32)
    layer.apply_sharded(x, allreduce_dgrad=True, tp_group=group).sum().backward()
    _, expected = run([layer], x, "apply_full")
    torch.distributed.all_reduce(expected, group=group)
    assert torch.equal(x.grad, expected)


def test_under_recompute(group):
    from megatron.core.tensor_parallel import generalized_tensor_parallelism as gtp

    gtp.update_gtp_config(weight_prefetch=False)  # its recompute chain follows Transformer Engine's FP8 phase
    layers = [Linear(group, seed, shape) for seed, shape in enumerate((UP, DOWN, UP, DOWN))]
    x = make_input(torch.float32)
    _, expected = run(layers, x, "apply_full")

    def forward(hidden):
        for layer in layers:
            hidden = layer.apply_sharded(hidden)
        return hidden

    torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=True).sum().backward()
    assert torch.equal(x.grad, expected)


def test_trainable_between_frozen(group):
    """The trainable linear's backward takes the weight that the frozen one behind it prefetched."""
    from megatron.core.tensor_parallel import generalized_tensor_parallelism as gtp

    gtp.update_gtp_config(async_reduction=False)  # deferred reduction expects every weight to be trainable
    layers = [Linear(group, 0, UP), Linear(group, 1, DOWN, trainable=True), Linear(group, 2, UP)]
    for _ in range(3):
        x = make_input(torch.float32)
        out, grad = run(layers, x, "apply_sharded")
        expected_out, expected_grad = run(layers, x, "apply_full")
        assert torch.equal(out, expected_out) and torch.equal(grad, expected_grad)
    assert layers[1].weight.main_grad.abs().sum() > 0
