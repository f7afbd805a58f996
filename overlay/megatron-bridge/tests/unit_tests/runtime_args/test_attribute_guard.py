# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors

"""Misspelt provider attributes are refused, and nothing that Bridge itself does is."""

import ast
import copy
import dataclasses
import pickle
from pathlib import Path

import pytest


def small(cls_name="GPTModelProvider"):
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.mla_provider import MLAModelProvider

    cls = {"GPTModelProvider": GPTModelProvider, "MLAModelProvider": MLAModelProvider}[cls_name]
    return cls(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256)


@pytest.mark.parametrize("cls_name", ["GPTModelProvider", "MLAModelProvider"])
def test_a_misspelt_attribute_is_refused_with_the_closest_name(cls_name):
    provider = small(cls_name)
    with pytest.raises(AttributeError, match="'recompute_granularty'; did you mean 'recompute_granularity'"):
        provider.recompute_granularty = "full"
    with pytest.raises(AttributeError, match="no attribute 'zzzz' "):
        provider.zzzz = 1
    assert "recompute_granularty" not in vars(provider)


def test_known_and_private_names_are_accepted():
    provider = small()
    provider.recompute_granularity = "full"
    provider._anything = 1
    provider.provide = lambda *args, **kwargs: None  # a method of the class
    provider.moe_a2a_overlap = False  # a recipe's name, see EXTRA_ATTRIBUTES
    vars(provider)["on_purpose"] = 1
    provider.on_purpose = 2
    assert provider.on_purpose == 2 and provider._anything == 1


def test_construction_copies_and_pickles_keep_working():
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    provider = small()
    vars(provider)["attached"] = [1]
    for twin in (copy.copy(provider), copy.deepcopy(provider), pickle.loads(pickle.dumps(provider))):
        assert twin == provider and twin.attached == [1]
        with pytest.raises(AttributeError):
            twin.recompute_granularty = "full"
    assert copy.deepcopy(provider).attached is not provider.attached
    assert dataclasses.replace(provider, num_layers=4).num_layers == 4
    with pytest.raises(TypeError):
        GPTModelProvider(recompute_granularty="full")


def test_after_finalize_the_model_code_may_attach_names():
    provider = small()
    provider.finalize()
    provider.materialize_only_last_token_logits = True
    twin = copy.deepcopy(provider)
    twin.another = 1
    assert twin.materialize_only_last_token_logits is True


def test_subclasses_properties_and_plain_providers():
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.model_provider import ModelProviderMixin

    @dataclasses.dataclass
    class Mine(GPTModelProvider):
        knob: int = 0

        @property
        def doubled(self):
            return 2 * self.knob

        @doubled.setter
        def doubled(self, value):
            self.knob = value // 2

    mine = Mine()
    mine.doubled = 8
    assert mine.knob == 4
    with pytest.raises(AttributeError, match="did you mean 'knob'"):
        mine.knobb = 1

    class Plain(ModelProviderMixin):
        def __init__(self):
            self.whatever = 1

        def provide(self, pre_process=None, post_process=None, vp_stage=None):
            return None

        def finalize(self):
            return None

    assert Plain().whatever == 1


def test_configs_that_are_no_providers_are_not_guarded():
    from megatron.bridge.models.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
    config.vision_thing = 1
    config.finalize()
    assert copy.deepcopy(config).vision_thing == 1 and "_runtime_args_finalized" not in vars(config)


def assignments(tree):
    """Yield (receiver, attribute) of each plain attribute assignment."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            for target in targets:
                if isinstance(target, ast.Attribute):
                    yield ast.unparse(target.value), target.attr


RECEIVERS = {
    "provider",
    "model_provider",
    "cfg.model",
    "config.model",
    "model_cfg",
    "model_config",
    "language_provider",
}


def test_no_name_that_bridge_sets_on_a_provider_is_refused():
    """Every public name that Bridge assigns to a provider is a field or in EXTRA_ATTRIBUTES, and vice versa."""
    import megatron.bridge
    from megatron.bridge.models.model_provider import ModelProviderMixin
    from megatron.bridge.runtime_args.fields import ALWAYS_FIELDS, IGNORED_FIELDS, MODEL_FIELDS, RUNTIME_FIELDS
    from megatron.bridge.runtime_args.guard import EXTRA_ATTRIBUTES

    fields = {*MODEL_FIELDS, *RUNTIME_FIELDS, *ALWAYS_FIELDS, *IGNORED_FIELDS}
    # DistillationProvider keeps the model on itself; the others are set on copies of a provider during the build.
    assigned = {"full_model", "class_token_len", "activation_func_clamp_value_shared_expert"}
    for path in Path(megatron.bridge.__file__).parent.rglob("*.py"):
        found = assignments(ast.parse(path.read_text()))
        assigned |= {name for receiver, name in found if receiver in RECEIVERS and not name.startswith("_")}
    extra = {name for name in assigned - fields if not hasattr(ModelProviderMixin, name)}
    assert extra == set(EXTRA_ATTRIBUTES)


def test_names_that_providers_set_on_themselves_are_known():
    """The same for ``self.name = ...`` in the classes below a provider."""
    import megatron.bridge
    from megatron.bridge.models.model_provider import ModelProviderMixin
    from megatron.bridge.runtime_args.fields import ALWAYS_FIELDS, IGNORED_FIELDS, MODEL_FIELDS, RUNTIME_FIELDS

    fields = {*MODEL_FIELDS, *RUNTIME_FIELDS, *ALWAYS_FIELDS, *IGNORED_FIELDS, "full_model"}
    unknown = {}
    for path in Path(megatron.bridge.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Provider") and "Data" not in node.name:
                names = {name for receiver, name in assignments(node) if receiver == "self"}
                unknown |= {
                    (node.name, name): path.name
                    for name in names - fields
                    if not name.startswith("_") and not hasattr(ModelProviderMixin, name)
                }
    assert not unknown
