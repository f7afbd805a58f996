# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors

"""TransformerConfig.fp8_backward_override: what it accepts, its flag, and what reaches the recipe and the GEMMs."""

import argparse
import dataclasses

import pytest
import torch

OVERRIDES = ["high_precision", "dequantized"]


def make_config(**kwargs):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1, hidden_size=256, num_attention_heads=2, use_cpu_initialization=True, **kwargs
    )


@dataclasses.dataclass
class RecipeWithOverride:
    """The part of a Transformer Engine recipe that matters here, from 2.15 on."""

    scales: str = "fp32"
    backward_override: str | None = None

    def __post_init__(self):
        if self.backward_override not in (None, *OVERRIDES):
            raise AssertionError("refused by the recipe")


@dataclasses.dataclass
class RecipeWithout:
    """The same before 2.15."""

    scales: str = "fp32"


@pytest.mark.parametrize("override", [None, *OVERRIDES])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_config_accepts(override, recipe):
    config = make_config(fp8="e4m3", fp8_recipe=recipe, fp8_backward_override=override)
    assert config.fp8_backward_override == override


def test_default_is_none():
    assert make_config().fp8_backward_override is None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_backward_override": "bf16"}, "got 'bf16'"),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_backward_override": ""}, "got ''"),
        ({"fp8_backward_override": "dequantized"}, "fp8_backward_override must be used together with fp8"),
        ({"fp8": "hybrid", "fp8_backward_override": "dequantized"}, "fp8_recipe='delayed'"),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        make_config(**options)


def test_flag_explains_itself():
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    args = parser.parse_args(["--fp8-backward-override", "dequantized"])
    assert args.fp8_backward_override == "dequantized"
    assert parser.parse_args([]).fp8_backward_override is None
    (action,) = (action for action in parser._actions if action.dest == "fp8_backward_override")
    assert tuple(action.choices) == tuple(OVERRIDES)
    assert "backward GEMMs" in action.help
    with pytest.raises(SystemExit):
        parser.parse_args(["--fp8-backward-override", "bf16"])


def test_recipe_is_left_alone_without_override():
    from megatron.core.fp8_utils import _with_backward_override

    for recipe in (RecipeWithOverride(), RecipeWithout(), RecipeWithOverride(backward_override="dequantized")):
        assert _with_backward_override(recipe, None) is recipe


@pytest.mark.parametrize("override", OVERRIDES)
def test_recipe_gets_override_and_keeps_the_rest(override):
    from megatron.core.fp8_utils import _with_backward_override

    got = _with_backward_override(RecipeWithOverride(scales="pow2"), override)
    assert got == RecipeWithOverride(scales="pow2", backward_override=override)


def test_recipe_checks_the_value_itself():
    from megatron.core.fp8_utils import _with_backward_override

    with pytest.raises(AssertionError, match="refused by the recipe"):
        _with_backward_override(RecipeWithOverride(), "unknown")


def test_recipe_without_override_is_an_error():
    from megatron.core.fp8_utils import _with_backward_override

    with pytest.raises(ValueError, match=r"2\.15 or newer.*RecipeWithout .*Upgrade Transformer Engine"):
        _with_backward_override(RecipeWithout(), "dequantized")


@pytest.fixture
def transformer_engine():
    """Transformer Engine with backward_override on a GPU that runs FP8 GEMMs."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    engine = pytest.importorskip("transformer_engine", reason="needs Transformer Engine")
    import transformer_engine.pytorch  # noqa: F401

    from megatron.core.utils import is_te_min_version

    if not is_te_min_version("2.15.0"):
        pytest.skip("needs Transformer Engine 2.15 or newer")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0 or newer")
    return engine


@pytest.mark.gpu
@pytest.mark.parametrize("override", [None, *OVERRIDES])
@pytest.mark.parametrize(
    "recipe, expected", [("tensorwise", "Float8CurrentScaling"), ("blockwise", "Float8BlockScaling")]
)
def test_get_fp8_recipe_passes_override(transformer_engine, monkeypatch, override, recipe, expected):
    from megatron.core.fp8_utils import get_fp8_recipe

    got = get_fp8_recipe(make_config(fp8="e4m3", fp8_recipe=recipe, fp8_backward_override=override))
    assert type(got).__name__ == expected
    default = type(got)().backward_override  # NVTE_BACKWARD_OVERRIDE as it was at import, usually None
    assert got.backward_override == (default if override is None else override)


@pytest.mark.gpu
def test_delayed_recipe_still_builds(transformer_engine):
    from megatron.core.fp8_utils import get_fp8_recipe

    assert get_fp8_recipe(make_config(fp8="e4m3", fp8_recipe="delayed")).backward_override is None


def frozen_linear_step(engine, override):
    """One step of a frozen FP8 linear under Megatron-Core's context: (output, input gradient, weight)."""
    from megatron.core.fp8_utils import get_fp8_context

    torch.manual_seed(0)
    config = make_config(
        fp8="e4m3", fp8_recipe="blockwise", fp8_backward_override=override, bf16=True, params_dtype=torch.bfloat16
    )
    linear = engine.pytorch.Linear(256, 384, bias=False, params_dtype=torch.bfloat16, device="cuda")
    linear.weight.requires_grad_(False)
    x = torch.randn(128, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    grad = torch.randn(128, 384, dtype=torch.bfloat16, device="cuda")
    with get_fp8_context(config):
        out = linear(x)
    out.backward(grad)
    return out.detach(), x.grad, linear.weight.detach(), grad


@pytest.mark.gpu
def test_override_changes_the_backward_only(transformer_engine):
    out, grad_fp8, weight, grad = frozen_linear_step(transformer_engine, None)
    out_high, grad_high, _, _ = frozen_linear_step(transformer_engine, "high_precision")
    out_dequantized, grad_dequantized, _, _ = frozen_linear_step(transformer_engine, "dequantized")

    assert torch.equal(out, out_high) and torch.equal(out, out_dequantized)
    expected = grad.float() @ weight.float()
    error = {
        name: ((got.float() - expected).norm() / expected.norm()).item()
        for name, got in (("fp8", grad_fp8), ("high", grad_high), ("dequantized", grad_dequantized))
    }
    # bf16 operands; the FP8 weight in bf16 (its rounding, 2.65 %); FP8 weight and gradient
    assert error["high"] < 0.005 < error["dequantized"] < 0.032 < error["fp8"] < 0.06, error
