# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""When two spellings of a provider field mean the same.

An argument and a provider rarely spell a value alike: ``"fp32"`` and ``torch.float32``, ``"flash"`` and
``AttnBackend.flash``, ``None`` and the default that ``finalize()`` puts there, ``1`` and ``[1, 1, 1, 1]`` for a layer
frequency. Each rule here is one that Megatron-Core applies itself; nothing else is taken as equal.
"""

import enum
from collections.abc import Callable, Mapping
from typing import Any

import torch


_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
_DTYPE_FIELDS = frozenset({"params_dtype", "pipeline_dtype", "autocast_dtype", "mamba_training_ssm_states_dtype"})
_SINGLE_ITEM_LISTS = frozenset({"cp_comm_type", "moe_aux_loss_coeff", "moe_router_load_balancing_type"})


def _attention_backend(value: Any) -> Any:
    from megatron.core.transformer.enums import AttnBackend

    return AttnBackend[value] if isinstance(value, str) and value in AttnBackend.__members__ else value


def to_field_value(name: str, value: Any) -> Any:
    """Convert an argument's value to the type that the provider field `name` holds, as Megatron's own copy does.

    Dtype names become ``torch.dtype``, a one-item list becomes its item where the config wants a scalar, the name of
    an attention backend becomes the enum member. Everything else is returned as it is.
    """
    if name in _DTYPE_FIELDS and isinstance(value, str):
        return _DTYPES.get(value, value)
    if name in _SINGLE_ITEM_LISTS and isinstance(value, (list, tuple)) and len(value) == 1:
        return value[0]
    if name == "attention_backend":
        return _attention_backend(value)
    return value


def _layer_pattern(value: Any, config: Any) -> Any:
    """Expand an integer frequency: every `value`-th layer is 1, from the first layer on (``moe_layer_freq``)."""
    num_layers = getattr(config, "num_layers", None)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0 and num_layers:
        return [1 if index % value == 0 else 0 for index in range(num_layers)]
    return value


def _last_of_group_pattern(value: Any, config: Any) -> Any:
    """Expand an integer frequency: every `value`-th layer is 1, the last of its group (``no_rope_freq``)."""
    num_layers = getattr(config, "num_layers", None)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0 and num_layers:
        return [1 if (index + 1) % value == 0 else 0 for index in range(num_layers)]
    return value


def _linear_attention_pattern(value: Any, config: Any) -> Any:
    """Expand an integer frequency: every `value`-th is 0 (``linear_attention_freq``, ``window_attn_skip_freq``)."""
    pattern = _last_of_group_pattern(value, config)
    return [1 - item for item in pattern] if pattern is not value else value


def _quant_recipe(value: Any, config: Any) -> Any:
    if not hasattr(value, "matchers"):
        return value
    return value.configs, [(type(matcher).__name__, vars(matcher)) for matcher in value.matchers]


def _pipeline_layout(value: Any, config: Any) -> Any:
    """Compare layouts by their stages, whether or not they are parsed; the number of ranks is compared by itself."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    if isinstance(value, PipelineParallelLayerLayout):
        value = value.input_data
    return PipelineParallelLayerLayout.parse_str_to_list(value) if isinstance(value, str) else value


def _cuda_graph_modules(value: Any, config: Any) -> Any:
    from megatron.core.transformer.cuda_graph_config import normalize_cuda_graph_modules

    return normalize_cuda_graph_modules(value)[0]


def _inference_cuda_graph_scope(value: Any, config: Any) -> Any:
    from megatron.core.transformer.cuda_graph_config import normalize_inference_cuda_graph_scope

    return normalize_inference_cuda_graph_scope(value, config.cuda_graph_impl)


def _or_default(default: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda value, config: default(config) if value is None else value


def _kv_channels(config: Any) -> Any:
    if config.hidden_size and config.num_attention_heads:
        return config.hidden_size // config.num_attention_heads
    return None


_CANONICAL: Mapping[str, Callable[[Any, Any], Any]] = {
    "cuda_graph_modules": _cuda_graph_modules,
    "ffn_hidden_size": _or_default(lambda config: 4 * config.hidden_size),
    "hybrid_layer_pattern": lambda value, config: value.replace("|", "") if isinstance(value, str) else value,
    "inference_cuda_graph_scope": _inference_cuda_graph_scope,
    "kv_channels": _or_default(_kv_channels),
    "linear_attention_freq": _linear_attention_pattern,
    "moe_expert_capacity_factor": lambda value, config: None if value is not None and value < 0 else value,
    "moe_ffn_hidden_size": _or_default(lambda config: config.ffn_hidden_size),
    "moe_layer_freq": _layer_pattern,
    "moe_router_topk_scaling_factor": _or_default(lambda config: 1.0),
    "mtp_num_layers": lambda value, config: value or None,
    "no_rope_freq": _last_of_group_pattern,
    "num_moe_experts": lambda value, config: value or None,
    "num_query_groups": _or_default(lambda config: config.num_attention_heads),
    "pipeline_model_parallel_layout": _pipeline_layout,
    "quant_recipe": _quant_recipe,
    "virtual_pipeline_model_parallel_size": lambda value, config: None if value == 1 else value,
    "window_attn_skip_freq": _linear_attention_pattern,
}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _equal(left: Any, right: Any) -> bool:
    if left is right:
        return True
    plain_left, plain_right = _plain(left), _plain(right)
    try:
        if bool(plain_left == plain_right):
            return True
    except (RuntimeError, ValueError):  # tensors and arrays have no single truth value
        return False
    if callable(left) and callable(right):
        return getattr(left, "__name__", left) == getattr(right, "__name__", right)
    if isinstance(left, enum.Enum) or isinstance(right, enum.Enum):
        return getattr(left, "value", left) == getattr(right, "value", right)
    return False


def same_value(name: str, left: Any, right: Any, config: Any) -> bool:
    """Tell whether two values of field `name` mean the same on `config`.

    Args:
        name: provider field.
        left: one value, in the argument's or the provider's spelling.
        right: the other value.
        config: the provider, or a built model's config; supplies layer counts and defaults. Only read.
    """
    left, right = to_field_value(name, left), to_field_value(name, right)
    if _equal(left, right):
        return True
    canonical = _CANONICAL.get(name)
    if canonical is None:
        return False
    try:
        return _equal(canonical(left, config), canonical(right, config))
    except (AssertionError, KeyError):  # not a value of this field at all; finalize() says so once it is set
        return False
