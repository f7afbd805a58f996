# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""From arguments to provider fields: renames, negations and derived values.

The special cases are those of ``core_transformer_config_from_args`` and ``validate_args`` in Megatron's training code,
written as tables so that a test can hold each of them against the real parser.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from megatron.bridge.runtime_args.arguments import RuntimeArgs
from megatron.bridge.runtime_args.compare import same_value, to_field_value
from megatron.bridge.runtime_args.fields import ALWAYS_FIELDS


RENAMED: Mapping[str, str] = {
    "fp4_param": "fp4_param_gather",
    "fp8_param": "fp8_param_gather",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "num_moe_experts": "num_experts",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "seq_length_dec": "decoder_seq_length",
}
"""Provider field to the argparse destination with another name and the same meaning."""

NEGATED: Mapping[str, str] = {
    "batch_p2p_comm": "overlap_p2p_comm",
    "persist_layer_norm": "no_persist_layer_norm",
    "share_embeddings_and_output_weights": "untie_embeddings_and_output_weights",
}
"""Provider field to the argparse destination with the opposite meaning."""


class Request(NamedTuple):
    """One provider field that the arguments decide.

    Attributes:
        field: provider field.
        value: what it shall be, in the provider's type.
        sources: argparse destinations (or field names) it comes from.
        typed: False for a parallel size that nobody typed.
    """

    field: str
    value: Any
    sources: tuple[str, ...]
    typed: bool


class Asked(NamedTuple):
    """All requests, by field, and the given names that produced one."""

    requests: dict[str, Request]
    consumed: frozenset[str]


@dataclass(frozen=True)
class _Derived:
    """A field computed from given destinations; `compute` returns ``_NOTHING`` where the rule does not apply."""

    sources: tuple[str, ...]
    compute: Callable[[RuntimeArgs, Any], Any]


_NOTHING = object()
_PRECISION = ("bf16", "fp16", "params_dtype")
_CUDA_GRAPH = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
_RECIPE = ("kitchen_config_file", "kitchen_recipe_number", "te_precision_config_file")
_VIRTUAL_PIPELINE = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
)


def _given(args: RuntimeArgs, name: str) -> Any:
    """The value of a name that the user gave, else None. Validation deletes some names; then the typed one is left."""
    return args.value(name) if args.gives(name) else None


def _dtype(args: RuntimeArgs) -> torch.dtype:
    if _given(args, "fp16"):
        return torch.float16
    if _given(args, "bf16"):
        return torch.bfloat16
    if args.gives("params_dtype"):
        return to_field_value("params_dtype", args.explicit["params_dtype"])
    return torch.float32


def _autocast_dtype(args: RuntimeArgs, provider: Any) -> Any:
    return _NOTHING if provider.autocast_dtype is None or args.gives("autocast_dtype") else _dtype(args)


def _pipeline_dtype(args: RuntimeArgs, provider: Any) -> Any:
    return _NOTHING if args.gives("pipeline_dtype") else _dtype(args)


def _recompute_granularity(args: RuntimeArgs, provider: Any) -> Any:
    return "selective" if _given(args, "recompute_activations") else _NOTHING


def _cuda_graph_impl(args: RuntimeArgs, provider: Any) -> Any:
    if _given(args, "enable_cuda_graph"):
        return "local"
    return "transformer_engine" if _given(args, "external_cuda_graph") else _NOTHING


def _cuda_graph_modules(args: RuntimeArgs, provider: Any) -> Any:
    name = "cuda_graph_scope_deprecated" if args.gives("cuda_graph_scope_deprecated") else "cuda_graph_scope"
    value = args.explicit.get(name)
    return _NOTHING if value is None else value


def _use_te_rng_tracker(args: RuntimeArgs, provider: Any) -> Any:
    """CUDA graphs need Transformer Engine's tracker; ``validate_args`` turns it on with them."""
    if args.gives("te_rng_tracker"):
        return args.value("te_rng_tracker")
    return True if args.ambient.get("te_rng_tracker") else _NOTHING


def _uses_swiglu(provider: Any) -> bool:
    return bool(provider.gated_linear_unit) and provider.activation_func is F.silu


def _bias_activation_fusion(args: RuntimeArgs, provider: Any) -> Any:
    name = "bias_swiglu_fusion" if _uses_swiglu(provider) else "bias_gelu_fusion"
    return args.value(name) if args.gives(name) else _NOTHING


def _activation_func(args: RuntimeArgs, provider: Any) -> Any:
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    for name, function in (("squared_relu", squared_relu), ("quick_geglu", quick_gelu), ("swiglu", F.silu)):
        if _given(args, name):
            return function
    return _NOTHING


def _true_if_given(*names: str) -> Callable[[RuntimeArgs, Any], Any]:
    return lambda args, provider: True if any(_given(args, name) for name in names) else _NOTHING


def _init_method(args: RuntimeArgs, provider: Any) -> Any:
    return torch.nn.init.xavier_uniform_ if _given(args, "init_method_xavier_uniform") else _NOTHING


def _quant_recipe(args: RuntimeArgs, provider: Any) -> Any:
    from megatron.core.quantization.utils import kitchen_quantization_recipe_config, load_quantization_recipe

    given = {name: _given(args, name) for name in _RECIPE if _given(args, name) is not None}
    if len(given) > 1:
        raise ValueError(f"one quantisation recipe at a time; got {given}")
    if "kitchen_recipe_number" in given:
        return kitchen_quantization_recipe_config(given["kitchen_recipe_number"])
    return load_quantization_recipe(next(iter(given.values()))) if given else _NOTHING


def _position_embedding_type(args: RuntimeArgs, provider: Any) -> Any:
    return "rope" if _given(args, "use_rotary_position_embeddings") else _NOTHING


def _num_layers(args: RuntimeArgs, provider: Any) -> Any:
    return _NOTHING if hasattr(provider, "encoder_num_layers") else args.value("encoder_num_layers")


def _seq_length(args: RuntimeArgs, provider: Any) -> Any:
    """Megatron sizes learned position embeddings by --max-position-embeddings, Bridge by ``seq_length``."""
    if sizes_position_embeddings(provider):
        return args.value("max_position_embeddings") if args.gives("max_position_embeddings") else _NOTHING
    return args.value("encoder_seq_length") if args.gives("encoder_seq_length") else _NOTHING


def _hybrid_layer_pattern(args: RuntimeArgs, provider: Any) -> Any:
    if not getattr(provider, "hybrid_layer_pattern", None):
        return _NOTHING
    return args.explicit["hybrid_override_pattern"]


def _experimental_attention_variant(args: RuntimeArgs, provider: Any) -> Any:
    from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

    pattern = _given(args, "hybrid_layer_pattern") or ""
    return "dsa" if Symbols.DS_ATTENTION in pattern else _NOTHING


def _yarn(name: str) -> Callable[[RuntimeArgs, Any], Any]:
    return lambda args, provider: args.value(name) if _is_plain_yarn(provider) else _NOTHING


def _is_plain_yarn(provider: Any) -> bool:
    return provider.position_embedding_type == "yarn" and not provider.multi_latent_attention


DERIVED: Mapping[str, _Derived] = {
    "activation_func": _Derived(("quick_geglu", "squared_relu", "swiglu"), _activation_func),
    "autocast_dtype": _Derived(_PRECISION, _autocast_dtype),
    "bf16": _Derived(_PRECISION, lambda args, provider: _dtype(args) == torch.bfloat16),
    "bias_activation_fusion": _Derived(("bias_gelu_fusion", "bias_swiglu_fusion"), _bias_activation_fusion),
    "cpu_offloading": _Derived(
        ("cpu_offloading_num_layers",), lambda args, provider: args.value("cpu_offloading_num_layers") > 0
    ),
    "cuda_graph_impl": _Derived(_CUDA_GRAPH[1:], _cuda_graph_impl),
    "cuda_graph_modules": _Derived(("cuda_graph_scope", "cuda_graph_scope_deprecated"), _cuda_graph_modules),
    "experimental_attention_variant": _Derived(("hybrid_layer_pattern",), _experimental_attention_variant),
    "fp16": _Derived(_PRECISION, lambda args, provider: _dtype(args) == torch.float16),
    "gated_linear_unit": _Derived(("quick_geglu", "swiglu"), _true_if_given("quick_geglu", "swiglu")),
    "hybrid_layer_pattern": _Derived(("hybrid_override_pattern",), _hybrid_layer_pattern),
    "inference_sampling_seed": _Derived(("seed",), lambda args, provider: args.value("seed")),
    "init_method": _Derived(("init_method_xavier_uniform",), _init_method),
    "is_hybrid_model": _Derived(
        ("hybrid_layer_pattern", "hybrid_override_pattern"),
        _true_if_given("hybrid_layer_pattern", "hybrid_override_pattern"),
    ),
    "num_layers": _Derived(("encoder_num_layers",), _num_layers),
    "params_dtype": _Derived(_PRECISION, lambda args, provider: _dtype(args)),
    "pipeline_dtype": _Derived(_PRECISION, _pipeline_dtype),
    "position_embedding_type": _Derived(("use_rotary_position_embeddings",), _position_embedding_type),
    "quant_recipe": _Derived(_RECIPE, _quant_recipe),
    "recompute_granularity": _Derived(("recompute_activations",), _recompute_granularity),
    "seq_length": _Derived(("encoder_seq_length", "max_position_embeddings"), _seq_length),
    "use_kitchen": _Derived(_RECIPE[:2], _true_if_given(*_RECIPE[:2])),
    "use_te_rng_tracker": _Derived(("te_rng_tracker", *_CUDA_GRAPH), _use_te_rng_tracker),
    "yarn_mscale": _Derived(("mscale",), _yarn("mscale")),
    "yarn_mscale_all_dim": _Derived(("mscale_all_dim",), _yarn("mscale_all_dim")),
    "yarn_rotary_scaling_factor": _Derived(("rotary_scaling_factor",), _yarn("rotary_scaling_factor")),
}
"""Provider field to the rule that computes it from other destinations."""


def sizes_position_embeddings(provider: Any) -> bool:
    """Tell whether ``seq_length`` is the number of rows of a learned position embedding, so part of the model."""
    learned = getattr(provider, "position_embedding_type", None) == "learned_absolute"
    return learned and not hasattr(provider, "max_position_embeddings")


def _takes_own_name(name: str, args: RuntimeArgs, provider: Any) -> bool:
    """Tell whether a given argument with the field's own name means this field on this provider."""
    if not args.gives(name):
        return False
    if name == "seq_length":
        return not sizes_position_embeddings(provider)
    if name == "rotary_scaling_factor":
        return not _is_plain_yarn(provider)
    if name == "hybrid_override_pattern":
        return not getattr(provider, "hybrid_layer_pattern", None)
    if name in _PRECISION:
        return False  # the three decide each other; see DERIVED
    return name not in ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_scope")


def _virtual_pipeline_size(args: RuntimeArgs, provider: Any) -> Any:
    """The number of model chunks a rank, as ``validate_args`` computes it; None without interleaving."""
    name = "virtual_pipeline_model_parallel_size"
    if name in args.ambient or args.gives(name):
        return args.value(name)
    chunks, layers = args.ambient.get(_VIRTUAL_PIPELINE[1]), args.ambient.get(_VIRTUAL_PIPELINE[0])
    if chunks is not None:
        return chunks if chunks > 1 else None
    if layers is not None:
        total = provider.num_layers
        total += int(bool(args.ambient.get("account_for_embedding_in_pipeline_split")))
        total += int(bool(args.ambient.get("account_for_loss_in_pipeline_split")))
        chunks = total // args.ambient["pipeline_model_parallel_size"] // layers
        return chunks if chunks > 1 else None
    return None if _VIRTUAL_PIPELINE[1] in args.ambient and not args.value(_VIRTUAL_PIPELINE[2]) else _NOTHING


def _layout_value(name: str, args: RuntimeArgs, provider: Any) -> Any:
    if name == "virtual_pipeline_model_parallel_size":
        return _virtual_pipeline_size(args, provider)
    if name not in args.ambient and not args.gives(name):
        return _NOTHING
    value = args.value(name)
    if name == "expert_tensor_parallel_size" and value is None:  # Megatron: like the attention; Bridge would take 1
        return args.value("tensor_model_parallel_size", _NOTHING)
    return value


def _layout_request(name: str, args: RuntimeArgs, provider: Any) -> Request | None:
    value = _layout_value(name, args, provider)
    if value is _NOTHING:
        return None
    names = (name, *_VIRTUAL_PIPELINE) if name.startswith("virtual") else (name,)
    sources = tuple(source for source in names if args.gives(source))
    return Request(name, value, sources or (name,), bool(sources))


def _candidates(name: str, args: RuntimeArgs, provider: Any) -> list[Request]:
    found = []
    if _takes_own_name(name, args, provider):
        found.append(Request(name, to_field_value(name, args.value(name)), (name,), True))
    if args.gives(RENAMED.get(name, "")):
        found.append(Request(name, to_field_value(name, args.value(RENAMED[name])), (RENAMED[name],), True))
    if args.gives(NEGATED.get(name, "")):
        found.append(Request(name, not args.value(NEGATED[name]), (NEGATED[name],), True))
    derived = DERIVED.get(name)
    sources = tuple(source for source in derived.sources if args.gives(source)) if derived else ()
    if sources:
        value = derived.compute(args, provider)
        if value is not _NOTHING:
            found.append(Request(name, value, sources, True))
    return found


def _single(name: str, candidates: list[Request], provider: Any) -> Request | None:
    for other in candidates[1:]:
        if not same_value(name, candidates[0].value, other.value, provider):
            raise ValueError(
                f"{'/'.join(candidates[0].sources)} and {'/'.join(other.sources)} ask for different values of "
                f"provider field {name!r}: {candidates[0].value!r} and {other.value!r}; give one of them"
            )
    return candidates[0] if candidates else None


def collect(args: RuntimeArgs, provider: Any) -> Asked:
    """Find, for each field of `provider`, what the arguments ask of it. Pure.

    Raises:
        ValueError: two given arguments ask for different values of one field.
    """
    requests: dict[str, Request] = {}
    consumed: set[str] = set()
    for name in (item.name for item in fields(provider)):
        if name in ALWAYS_FIELDS:
            request = _layout_request(name, args, provider)
            candidates = [request] if request is not None else []
        else:
            candidates = _candidates(name, args, provider)
            request = _single(name, candidates, provider)
        if request is not None:
            requests[name] = request
            consumed.update(source for candidate in candidates for source in candidate.sources)
    return Asked(requests, frozenset(consumed))
