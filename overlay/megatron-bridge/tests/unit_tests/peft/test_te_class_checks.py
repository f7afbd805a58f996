# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors

"""Where Megatron-Core has mocks for want of Transformer Engine, PEFT sees missing classes, not mocks."""

import sys
from types import ModuleType
from unittest.mock import MagicMock

import pytest
import torch


MODULE = "te_extension_for_class_checks"


@pytest.fixture
def extension(monkeypatch):
    """A module with a class and a mock, as Megatron-Core's Transformer Engine extension has them."""

    module = ModuleType(MODULE)
    module.HAVE_TE = False
    module.RealLinear = type("RealLinear", (torch.nn.Module,), {})
    module.MockedLinear = MagicMock()
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


@pytest.fixture
def no_te():
    """Skip where Transformer Engine is there: Megatron-Core then has classes, not mocks."""
    from megatron.core.extensions import transformer_engine

    if transformer_engine.HAVE_TE:
        pytest.skip("Transformer Engine is installed: Megatron-Core has no mocks to tell apart")


def test_mock_counts_as_missing(extension):
    from megatron.bridge.utils.import_utils import safe_import_from

    symbol, found = safe_import_from(MODULE, "MockedLinear")
    assert not found and symbol.__name__ == "MockedLinear" and symbol != torch.nn.Linear
    assert not isinstance(torch.nn.Linear(1, 1, device="cpu"), symbol)
    with pytest.raises(ImportError, match=rf"{MODULE}.MockedLinear: .*Transformer Engine"):
        symbol(1, 1)


def test_subclass_of_missing_class_raises_too(extension):
    from megatron.bridge.utils.import_utils import safe_import_from

    base, _ = safe_import_from(MODULE, "MockedLinear")

    class ScaledLinear(base):
        """As models/common/te_layers.py builds its layers."""

        def __init__(self, scale):
            super().__init__()
            self.scale = scale

    with pytest.raises(ImportError, match=rf"{MODULE}.MockedLinear: .*Transformer Engine"):
        ScaledLinear(2.0)


def test_alternative_is_used_for_a_mock(extension):
    from megatron.bridge.utils.import_utils import safe_import_from

    assert safe_import_from(MODULE, "MockedLinear", alt=torch.nn.Linear) == (torch.nn.Linear, False)


def test_real_classes_and_present_engine_are_left_alone(extension):
    from megatron.bridge.utils.import_utils import safe_import_from

    assert safe_import_from(MODULE, "RealLinear") == (extension.RealLinear, True)
    extension.HAVE_TE = True
    assert safe_import_from(MODULE, "MockedLinear") == (extension.MockedLinear, True)


def test_have_te_flags_tell_the_truth(no_te):
    from megatron.bridge.peft import module_matcher, utils

    assert not utils.HAVE_TE
    assert not module_matcher.HAVE_TE


@pytest.mark.parametrize("linear", [torch.nn.Linear(4, 4, device="cpu"), torch.nn.LayerNorm(4, device="cpu")])
def test_matcher_without_targets(no_te, linear):
    from megatron.bridge.peft.module_matcher import ModuleMatcher

    matched = ModuleMatcher(target_modules=[]).match(linear, "layer", "block")
    assert (matched is not None) == isinstance(linear, torch.nn.Linear)


def test_adapter_attributes_of_local_linear(no_te):
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from megatron.bridge.peft.utils import get_adapter_attributes_from_linear

    linear = ColumnParallelLinear.__new__(ColumnParallelLinear)  # attributes only: no process group needed
    torch.nn.Module.__init__(linear)
    linear.config = ModelParallelConfig()
    linear.input_size, linear.output_size, linear.tp_group = 4, 8, None
    attributes = get_adapter_attributes_from_linear(linear)
    assert (attributes.in_features, attributes.out_features) == (4, 8)
    assert not attributes.input_is_parallel


def test_unknown_linear_is_refused_by_name(no_te):
    from megatron.core.model_parallel_config import ModelParallelConfig

    from megatron.bridge.peft.utils import get_adapter_attributes_from_linear

    module = torch.nn.Identity()
    module.config = ModelParallelConfig()
    with pytest.raises(NotImplementedError, match="Identity"):
        get_adapter_attributes_from_linear(module)
