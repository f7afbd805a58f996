# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Checkpoints of a frozen FP8 base hold its dequantised values, and loading one gives the same bytes again."""

import copy
import os

import pytest
import torch
from frozen_fp8_models import config, moe, oracle


@pytest.fixture(scope="module", autouse=True)
def parallel():
    from megatron.core import parallel_state

    created = not torch.distributed.is_initialized()
    if created:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29579")
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.destroy_model_parallel()  # what another file may have left
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    if created:
        torch.distributed.destroy_process_group()


KINDS = {
    "dense": {},
    # fc1 is saved as its two halves, made by chunk() and merged after the load
    "gated": {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu},
    "moe": moe(moe_token_dispatcher_type="allgather"),
}


def base(**fields):
    """A frozen GPT without adapters, whose names are those of a stock checkpoint."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    built = config(**fields)
    spec = get_gpt_layer_local_spec(num_experts=built.num_moe_experts, moe_grouped_gemm=False)
    return GPTModel(built, spec, vocab_size=128, max_sequence_length=16).bfloat16().requires_grad_(False)


def converted(**fields):
    from megatron.core.frozen_fp8 import convert_frozen_base

    model = base(**fields)
    convert_frozen_base(model, per_layer_free=True)
    return model


def values(model):
    """Every parameter by name, the stored ones dequantised by the oracle's formula."""
    from megatron.core.frozen_fp8 import is_frozen_fp8

    found = {}
    for name, param in model.named_parameters():
        if is_frozen_fp8(param):
            scale = param.rowwise_scale_inv.repeat_interleave(128, 0)[: param.shape[0]]
            scale = scale.repeat_interleave(128, 1)[:, : param.shape[1]]
            found[name] = (param.rowwise_data.float() * scale).bfloat16()
        else:
            found[name] = param.detach().clone()
    return found


def stored_bytes(model):
    """FP8 bytes and scales by name."""
    from megatron.core.frozen_fp8 import is_frozen_fp8

    stored = {n: p for n, p in model.named_parameters() if is_frozen_fp8(p)}
    assert stored
    return {n: (p.rowwise_data.view(torch.uint8).clone(), p.rowwise_scale_inv.clone()) for n, p in stored.items()}


def assert_same_bytes(found, expected):
    assert found.keys() == expected.keys()
    for name, (payload, scale_inv) in expected.items():
        assert torch.equal(found[name][0], payload) and torch.equal(found[name][1], scale_inv), name


def save(model, directory):
    from megatron.core import dist_checkpointing

    directory.mkdir()
    dist_checkpointing.save(model.sharded_state_dict(), str(directory))


def load(model, directory):
    from megatron.core import dist_checkpointing

    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(directory)))


@pytest.mark.parametrize("kind", KINDS)
def test_torch_state_dict(tmp_path, kind):
    source = converted(**KINDS[kind])
    torch.save({n: v for n, v in source.state_dict().items() if torch.is_tensor(v)}, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    plain, other = base(**KINDS[kind]), converted(**KINDS[kind])
    assert stored_bytes(other).keys() == stored_bytes(source).keys()
    plain.load_state_dict(loaded, strict=False)
    other.load_state_dict(loaded, strict=False)
    for name, value in values(source).items():
        assert torch.equal(dict(plain.named_parameters())[name], value), name
    assert_same_bytes(stored_bytes(other), stored_bytes(source))


@pytest.mark.parametrize("kind", KINDS)
def test_distributed_checkpoint(tmp_path, kind):
    source = converted(**KINDS[kind])
    save(source, tmp_path / "fp8")
    plain, other = base(**KINDS[kind]), converted(**KINDS[kind])
    load(plain, tmp_path / "fp8")
    load(other, tmp_path / "fp8")
    for name, value in values(source).items():
        assert torch.equal(dict(plain.named_parameters())[name], value), name
    assert_same_bytes(stored_bytes(other), stored_bytes(source))


def test_a_stock_checkpoint_is_quantised_on_load(tmp_path):
    """Its values were never FP8: the bytes are the oracle's."""
    stock = base()
    save(stock, tmp_path / "bf16")
    model = converted()
    load(model, tmp_path / "bf16")
    expected = {n: oracle(p)[:2] for n, p in stock.named_parameters() if n in stored_bytes(model)}
    assert_same_bytes(stored_bytes(model), {n: (q.view(torch.uint8), s) for n, (q, s) in expected.items()})


def test_checkpoint_files_are_readable_without_this_package(tmp_path):
    """What is written are plain bf16 tensors, not this package's class."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    source = converted()
    save(source, tmp_path / "fp8")
    metadata = FileSystemReader(str(tmp_path / "fp8")).read_metadata()
    weights = {n: m for n, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    assert {m.properties.dtype for n, m in weights.items() if n.endswith("weight")} == {torch.bfloat16}
    for file in (tmp_path / "fp8").glob("*.distcp"):
        assert b"frozen_fp8" not in file.read_bytes()
    torch.save({n: v for n, v in source.state_dict().items() if torch.is_tensor(v)}, tmp_path / "model.pt")
    assert b"frozen_fp8" not in (tmp_path / "model.pt").read_bytes()


def test_a_part_of_a_weight_cannot_be_written():
    """A loader that fills a weight piece by piece would fill copies; it must hear about it."""
    weight = converted().decoder.layers[0].mlp.linear_fc1.weight.data
    for part in (weight[:2], weight.narrow(0, 0, 2), weight[3], weight[:, :2].t()):
        with pytest.raises(NotImplementedError, match="cannot be written"):
            part.copy_(torch.zeros(part.shape, dtype=torch.bfloat16))
    assert torch.equal(torch.cat(weight.chunk(2)), weight.clone())


def test_copied_weights_have_their_own_bytes():
    source = converted(layers=1, **KINDS["moe"])
    before = values(source)
    copies = copy.deepcopy({n: p for n, p in source.named_parameters() if n in stored_bytes(source)})
    for name, weight in copies.items():
        original = source.get_parameter(name)
        assert isinstance(weight, torch.nn.Parameter) and not weight.requires_grad
        assert weight.__dict__.keys() == original.__dict__.keys()
        assert torch.equal(weight.dequantize(), before[name])
        weight.data.copy_(torch.ones(weight.shape))
        assert torch.equal(weight.dequantize(), torch.ones(weight.shape, dtype=torch.bfloat16))
    assert all(torch.equal(value, before[name]) for name, value in values(source).items())


def test_casting_or_replacing_the_data_is_refused():
    model = converted(layers=1)
    weight = model.decoder.layers[0].mlp.linear_fc1.weight
    with pytest.raises(NotImplementedError, match="cannot be replaced, moved or cast"):
        weight.data = torch.zeros(weight.shape, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="cannot be replaced, moved or cast"):
        model.half()
    before = stored_bytes(model)
    model.bfloat16().cpu()  # nothing to do
    assert_same_bytes(stored_bytes(model), before)
