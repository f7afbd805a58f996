# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Every refusal of the frozen FP8 base names what is wrong. No process group, no forward: modules and configs."""

from types import SimpleNamespace

import pytest
import torch


def linear(**fields):
    """A frozen local linear without process groups, whose config has `fields`."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    module = ColumnParallelLinear.__new__(ColumnParallelLinear)
    torch.nn.Module.__init__(module)
    module.config = SimpleNamespace(**fields)
    module.weight = torch.nn.Parameter(torch.randn(130, 96).bfloat16(), requires_grad=False)
    return module


def layer(parent=None, **linears):
    """A model of one layer with `linears` in its mlp; `parent` is the mlp's class."""
    mlp = (parent or torch.nn.Module)()
    for name, module in linears.items():
        setattr(mlp, name, module)
    mlp_layer = torch.nn.ModuleDict({"mlp": mlp})
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList([mlp_layer])})


def convert(model, **kwargs):
    from megatron.core.frozen_fp8 import convert_frozen_base

    return convert_frozen_base(model, **kwargs)


def test_a_plain_model_of_this_kind_converts():
    """Else the refusals below could be refusals of the test's own model."""
    assert convert(layer(linear_fc1=linear(), linear_fc2=linear())).summary.num_tensors == 2


@pytest.mark.parametrize(
    "flag",
    [
        "use_transformer_engine_op_fuser",
        "defer_embedding_wgrad_compute",
        "cpu_offloading_weights",
        "qk_clip",
        "cache_mla_latents",
    ],
)
def test_a_path_that_bypasses_forward_is_refused_by_the_name_of_its_flag(flag):
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    assert flag in MLATransformerConfig.__dataclass_fields__, "renamed upstream"
    with pytest.raises(NotImplementedError, match=rf"layers\.0\.mlp\.linear_fc1: {flag} uses the weight outside"):
        convert(layer(linear_fc1=linear(**{flag: True})))


def test_sharded_weights_are_refused():
    from megatron.core.transformer.transformer_config import TransformerConfig

    assert "gtp_weight_remat_size" in TransformerConfig.__dataclass_fields__, "renamed upstream"
    with pytest.raises(NotImplementedError, match=r"linear_fc1: GTP shards the weight; .* got 2"):
        convert(layer(linear_fc1=linear(gtp_weight_remat_size=2)))


@pytest.mark.parametrize(
    "name", ["TEFusedMLP", "TEFusedMLPWithGroupedLinear", "FusedSharedExpertMLP", "TEFusedLoRALinear"]
)
def test_a_parent_that_uses_the_weight_itself_is_refused_by_name(name):
    parent = type("Derived", (type(name, (torch.nn.Module,), {}),), {})
    with pytest.raises(NotImplementedError, match=rf"layers\.0\.mlp\.linear_fc1: {name} uses this weight outside"):
        convert(layer(parent, linear_fc1=linear()))


def test_those_parents_exist_upstream():
    from megatron.core.transformer.moe import experts, shared_experts

    assert hasattr(shared_experts, "FusedSharedExpertMLP") and hasattr(experts, "InferenceGroupedMLP")


def test_other_linears_of_such_a_model_are_no_reason_to_refuse():
    """The check is by the linear's own parents, not by the model."""
    from megatron.core.frozen_fp8 import select_frozen_linears

    fused = type("FusedSharedExpertMLP", (torch.nn.Module,), {})()
    fused.linear_fc1 = linear()
    fused.linear_fc1.weight.requires_grad_(True)
    model = layer(linear_fc1=linear())
    model["layers"][0]["shared"] = fused
    assert [s.name for s in select_frozen_linears(model)] == ["layers.0.mlp.linear_fc1"]


def grouped(second):
    module = linear()
    module.weight0 = torch.nn.Parameter(module.weight.detach().clone(), requires_grad=False)
    module.weight1 = second
    del module.weight
    return layer(linear_fc1=module)


def test_frozen_and_trainable_weights_in_one_module_are_refused():
    trainable = torch.nn.Parameter(torch.zeros(130, 96, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"linear_fc1: .*frozen \['weight0'\], trainable \['weight1'\]"):
        convert(grouped(trainable))


def test_weights_of_several_shapes_in_one_module_are_refused():
    other = torch.nn.Parameter(torch.zeros(131, 96, dtype=torch.bfloat16), requires_grad=False)
    with pytest.raises(ValueError, match=r"linear_fc1: expected weights of one shape .*\(130, 96\), \(131, 96\)"):
        convert(grouped(other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_another_dtype_is_refused(dtype):
    module = linear()
    module.weight = torch.nn.Parameter(module.weight.to(dtype), requires_grad=False)
    with pytest.raises(ValueError, match=rf"linear_fc1: .*torch.bfloat16, got .*{dtype}"):
        convert(layer(linear_fc1=module))


def test_converting_twice_is_refused():
    model = layer(linear_fc1=linear())
    convert(model)
    with pytest.raises(ValueError, match=r"linear_fc1: already converted"):
        convert(model)


def test_a_trainable_base_is_refused():
    module = linear()
    module.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="no frozen base linear found: expected a model whose base is frozen"):
        convert(layer(linear_fc1=module))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(value):
    model = layer(linear_fc1=linear(), linear_fc2=linear())
    model["layers"][0]["mlp"].linear_fc2.weight.data[129, 95] = value
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.linear_fc2\.weight: .*a NaN or an infinity"):
        convert(model)


def test_a_model_without_data_is_refused():
    with pytest.raises(ValueError, match=r"linear_fc1\.weight: expected loaded weights, got the meta device"):
        convert(layer(linear_fc1=linear()).to("meta"))


def test_a_projector_between_towers_is_not_selected():
    """It names its linears like a layer's."""
    from megatron.core.frozen_fp8 import select_frozen_linears

    merger = torch.nn.Module()
    merger.linear_fc1 = linear()
    model = layer(linear_fc1=linear())
    model["merger"] = merger
    assert [s.name for s in select_frozen_linears(model)] == ["layers.0.mlp.linear_fc1"]


def test_per_layer_free_needs_the_store():
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    with pytest.raises(ValueError, match="fp8_frozen_base_per_layer_free needs fp8_frozen_base_store"):
        TransformerConfig(**sizes, fp8_frozen_base_per_layer_free=True)
    TransformerConfig(**sizes, fp8_frozen_base_per_layer_free=True, fp8_frozen_base_store=True)


class TestConvertIfConfigured:
    """What the training loops call."""

    def model(self, **fields):
        from megatron.core.transformer.transformer_config import TransformerConfig

        model = layer(linear_fc1=linear())
        model.config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, **fields)
        return model

    def call(self, model):
        from megatron.core.frozen_fp8 import convert_if_configured

        return convert_if_configured(model)

    def test_off_by_default(self):
        assert self.call([self.model()]) is None

    @pytest.mark.parametrize("per_layer_free", [False, True])
    def test_once(self, per_layer_free):
        model = self.model(fp8_frozen_base_store=True, fp8_frozen_base_per_layer_free=per_layer_free)
        assert self.call([model]).per_layer_free is per_layer_free
        assert self.call([model]) is None

    def test_a_base_that_is_not_frozen_is_an_error(self):
        model = self.model(fp8_frozen_base_store=True).requires_grad_(True)
        with pytest.raises(ValueError, match="no frozen base linear found"):
            self.call([model])

    def test_a_stage_without_layers_has_nothing_to_convert(self):
        model = self.model(fp8_frozen_base_store=True)
        del model["layers"]
        model["embedding"] = torch.nn.Embedding(4, 4)
        assert self.call([model]) is None


class TestKernelArguments:
    """Shapes, dtypes and layouts are checked before a kernel sees them."""

    q = torch.zeros(2, 130, 96, dtype=torch.float8_e4m3fn)
    scale = torch.ones(2, 2, 1)

    def call(self, *args):
        from megatron.core.frozen_fp8.kernels import dequantize_blocks

        return dequantize_blocks(*args)

    def test_valid(self):
        assert self.call(self.q, self.scale).shape == self.q.shape

    @pytest.mark.parametrize("q", [q[0], q.to(torch.bfloat16), q.transpose(1, 2)], ids=["rank", "dtype", "layout"])
    def test_q(self, q):
        with pytest.raises(ValueError, match=r"q: expected contiguous \[G, M, K\]"):
            self.call(q, self.scale)

    @pytest.mark.parametrize("scale", [scale[:, :1], scale.double()], ids=["shape", "dtype"])
    def test_scale(self, scale):
        with pytest.raises(ValueError, match=r"scale_inv: expected \(2, 2, 1\) float32"):
            self.call(self.q, scale)

    def test_scale_layout(self):
        wide = torch.zeros(1, 1, 300, dtype=torch.float8_e4m3fn)
        with pytest.raises(ValueError, match="scale_inv: expected unit stride along k"):
            self.call(wide, torch.ones(1, 1, 6)[:, :, ::2])

    def test_scale_device(self):
        with pytest.raises(ValueError, match="scale_inv: expected unit stride along k on cpu, got .* on meta"):
            self.call(self.q, self.scale.to("meta"))

    @pytest.mark.parametrize("dtype, shape", [(torch.float32, (2, 130, 96)), (torch.bfloat16, (2, 130, 95))])
    def test_out(self, dtype, shape):
        with pytest.raises(ValueError, match=r"out: expected contiguous \(2, 130, 96\) bfloat16"):
            self.call(self.q, self.scale, torch.empty(shape, dtype=dtype))

    @pytest.mark.parametrize("weight", [torch.zeros(4), torch.zeros(4, 4, dtype=torch.float16)], ids=["rank", "dtype"])
    def test_weight(self, weight):
        from megatron.core.frozen_fp8.kernels import quantize_blocks

        with pytest.raises(ValueError, match="weight: expected a 2-D bfloat16 or float32 tensor"):
            quantize_blocks(weight)


class TestWrites:
    """A stored weight takes a whole new value by copy_, which quantises, and nothing else."""

    @pytest.fixture
    def weight(self):
        model = layer(linear_fc1=linear())
        convert(model)
        return model["layers"][0]["mlp"].linear_fc1.weight

    def test_in_place_operator(self, weight):
        with pytest.raises(NotImplementedError, match=r"mul_.*cannot be changed in place"):
            weight.data.mul_(2)

    def test_part(self, weight):
        with pytest.raises(NotImplementedError, match="a part of a frozen FP8 weight cannot be written"):
            weight.data[0] = 0

    def test_data(self, weight):
        with pytest.raises(NotImplementedError, match="cannot be replaced, moved or cast"):
            weight.data = torch.zeros(130, 96, dtype=torch.bfloat16)

    def test_shape(self, weight):
        with pytest.raises(ValueError, match=r"expected shape \(130, 96\), got \(1, 96\)"):
            weight.data.copy_(torch.zeros(1, 96))

    def test_dtype(self, weight):
        with pytest.raises(ValueError, match="expected a 2-D bfloat16 or float32 tensor, got .*float16"):
            weight.data.copy_(torch.zeros(130, 96, dtype=torch.float16))
