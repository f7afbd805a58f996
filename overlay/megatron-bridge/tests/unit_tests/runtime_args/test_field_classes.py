# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors

"""Every field of every provider is in exactly one class, and every classified name exists."""

import ast
import dataclasses
import importlib
import pkgutil
from pathlib import Path

import pytest


def class_sets():
    from megatron.bridge.runtime_args import fields

    return {
        "model": set(fields.MODEL_FIELDS),
        "runtime": set(fields.RUNTIME_FIELDS),
        "always": set(fields.ALWAYS_FIELDS),
        "ignored": set(fields.IGNORED_FIELDS),
    }


def import_all(package):
    """Import every module below `package`; those that need something missing here are read as source instead."""
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None):
        try:
            importlib.import_module(module.name)
        except (ImportError, RuntimeError):
            continue


def subclasses(cls):
    for child in cls.__subclasses__():
        yield child
        yield from subclasses(child)


@pytest.fixture(scope="module")
def imported_fields():
    """Field name -> one class that has it, over all provider classes that import here."""
    import megatron.bridge.diffusion
    import megatron.bridge.models
    from megatron.bridge.models.model_provider import ModelProviderMixin
    from megatron.bridge.models.transformer_config import HeterogeneousTransformerConfig, MLATransformerConfig

    import_all(megatron.bridge.models)
    import_all(megatron.bridge.diffusion)
    classes = [*subclasses(ModelProviderMixin), MLATransformerConfig, HeterogeneousTransformerConfig]
    return {
        item.name: cls.__qualname__
        for cls in classes
        if dataclasses.is_dataclass(cls)
        for item in dataclasses.fields(cls)
    }


@pytest.fixture(scope="module")
def source_fields():
    """Field name -> class, read from the source of every class below a provider, so that nothing has to import."""
    import megatron.bridge

    found: dict[str, ast.ClassDef] = {}
    for folder in ("models", "diffusion"):
        for path in Path(megatron.bridge.__file__).parent.joinpath(folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found[node.name] = node

    def base_names(node):
        bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
        return {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in bases}

    providers = {"ModelProviderMixin", "DistillationProvider"}
    while True:
        more = {name for name, node in found.items() if base_names(node) & providers} - providers
        if not more:
            break
        providers |= more
    return {
        item.target.id: name
        for name in providers
        for item in found[name].body
        if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation)
    }


def test_every_field_is_in_one_class(imported_fields, source_fields):
    classified = set().union(*class_sets().values())
    missing = {name: cls for name, cls in (imported_fields | source_fields).items() if name not in classified}
    assert not missing, f"fields in no class; decide what an argument may do to them: {missing}"


def test_no_name_is_in_two_classes():
    sets = list(class_sets().items())
    shared = {(a, b): left & right for i, (a, left) in enumerate(sets) for b, right in sets[i + 1 :] if left & right}
    assert not shared


def test_every_classified_name_exists(imported_fields, source_fields):
    from megatron.bridge.runtime_args.fields import PATCHED_FIELDS

    stale = set().union(*class_sets().values()) - set(imported_fields) - set(source_fields) - PATCHED_FIELDS
    assert not stale, f"classified names that no provider has: {stale}"


def test_a_new_field_is_noticed():
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.runtime_args import RuntimeArgs, apply_runtime_args, classify

    Newer = dataclasses.make_dataclass("Newer", [("brand_new_knob", int, 0)], bases=(GPTModelProvider,))
    with pytest.raises(KeyError, match="'brand_new_knob' is in no class"):
        classify("brand_new_knob")
    with pytest.raises(ValueError, match="'brand_new_knob' is in no class.*or pin it"):
        apply_runtime_args(Newer(), RuntimeArgs.from_mapping({"brand_new_knob": 1}))


def test_the_tables_name_real_fields_and_destinations(parser, imported_fields):
    from megatron.bridge.runtime_args import explicit, sources, verify

    destinations = {action.dest for action in parser._actions}
    # Added by Megatron only where the Kitchen library is installed.
    kitchen = {"kitchen_config_file", "kitchen_recipe_number"}
    for table in (sources.RENAMED, sources.NEGATED, sources.DERIVED, verify.REWRITES):
        assert set(table) <= set(imported_fields)
    assert set(sources.RENAMED.values()) | set(sources.NEGATED.values()) <= destinations
    derived_from = {name for rule in sources.DERIVED.values() for name in rule.sources}
    assert derived_from - destinations - kitchen == {"cuda_graph_scope", "params_dtype"}
    assert destinations >= explicit._FILLED_BY_VALIDATION


def test_every_special_case_of_megatrons_own_copy_is_covered():
    """Each ``kw_args['field'] = ...`` of ``core_transformer_config_from_args`` reads arguments we read, too."""
    from megatron.bridge.runtime_args import compare, sources
    from megatron.training import argument_utils

    tree = ast.parse(Path(argument_utils.__file__).read_text())
    function = next(
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "core_transformer_config_from_args"
    )
    special = {
        node.targets[0].slice.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Subscript)
        and isinstance(node.targets[0].slice, ast.Constant)
    }
    covered = {*sources.RENAMED, *sources.NEGATED, *sources.DERIVED, *compare._SINGLE_ITEM_LISTS}
    same_name = {"config_logger_dir", "kitchen_attention_backend", "moe_latent_size", "num_query_groups"}
    same_name |= {"rotary_interleaved", "use_kitchen_attention"}
    constant = {"deallocate_pipeline_outputs"}
    no_field = {"scaled_init_method"}
    assert special - covered == same_name | constant | no_field


def test_the_patched_field_may_be_absent(imported_fields):
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.runtime_args import FieldClass, RuntimeArgs, apply_runtime_args, classify
    from megatron.bridge.runtime_args.fields import PATCHED_FIELDS

    assert {classify(name) for name in PATCHED_FIELDS} == {FieldClass.RUNTIME}
    args = RuntimeArgs.from_mapping({"fp8_backward_override": "dequantized"})
    if "fp8_backward_override" in imported_fields:
        provider = GPTModelProvider()
        apply_runtime_args(provider, args)
        assert provider.fp8_backward_override == "dequantized"
    else:
        with pytest.raises(ValueError, match="name no field of GPTModelProvider: 'fp8_backward_override'"):
            apply_runtime_args(GPTModelProvider(), args)


def test_class_of_the_module_is_what_the_tables_say():
    from megatron.bridge.runtime_args import classify

    assert {name: classify(name).value for kind, names in class_sets().items() for name in names} == {
        name: kind for kind, names in class_sets().items() for name in names
    }
