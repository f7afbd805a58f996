# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Refuse misspelt provider attributes.

A provider is configured by assignment (``provider.recompute_granularity = "full"``). Python accepts any name there, so
a misspelt one is lost without a trace. Until ``finalize()`` only names that the provider knows are accepted.
"""

from dataclasses import is_dataclass
from typing import Any

from megatron.bridge.runtime_args.apply import closest
from megatron.bridge.runtime_args.fields import is_classified


FINALIZED_KEY = "_runtime_args_finalized"
"""Private provider attribute that ``finalize()`` sets; afterwards, what builds the model may attach any name."""

EXTRA_ATTRIBUTES = frozenset(
    """
    activation_func_clamp_value_shared_expert actual_vocab_size apply_dsa_kernel_fusion bias_dropout_add_fusion
    class_token_len cp_partition_mode csa_compress_ratios csa_compress_rotary_base csa_window_size
    enable_hyper_connections full_model grid mhc_sinkhorn_iterations moe_a2a_overlap moe_n_hash_layers
    mtp_eval_in_bf16 norm_topk_prob num_residual_streams o_groups o_lora_rank rope_scaling_high_freq_factor
    rope_scaling_low_freq_factor rope_scaling_original_max_position_embeddings rotary_percents swiglu_limits
    swiglu_limits_shared use_fused_mhc
    """.split()
)
"""Names that Bridge's own model bridges and recipes set and no dataclass declares (most belong to a newer core)."""


def _knows(provider: Any, name: str) -> bool:
    return (
        name in type(provider).__dataclass_fields__
        or name in EXTRA_ATTRIBUTES
        or is_classified(name)  # bridges also set fields that only other providers declare
        or name in vars(provider)
        or hasattr(type(provider), name)
    )


def check_attribute(provider: Any, name: str) -> None:
    """Raise if `name` is a public name that `provider` does not know and it is not finalized.

    Known are dataclass fields (of this provider or any other), class attributes, properties and methods of the class
    and its bases, attributes that the instance already has, and `EXTRA_ATTRIBUTES`. Names with a leading underscore
    are never refused. To attach another public name on purpose, declare it in a subclass, or write
    ``vars(provider)[name] = value``.

    Raises:
        AttributeError: names the closest known field.
    """
    if name.startswith("_") or not is_dataclass(provider) or _knows(provider, name) or FINALIZED_KEY in vars(provider):
        return
    raise AttributeError(
        f"{type(provider).__name__} has no attribute {name!r}{closest(name, type(provider).__dataclass_fields__)} "
        "(before finalize() a provider takes known names only)"
    )
