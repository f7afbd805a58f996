# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Turn the selected weights into FP8, one module at a time: the conversion's own peak is one module."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import torch

from .select import has_layers, select_frozen_linears, summarise, unconverted_linears
from .tensor import FrozenFp8Slab, FrozenFp8Weight, allocate_slab
from .types import ConversionReport, FrozenLinear

logger = logging.getLogger(__name__)


@torch.no_grad()
def convert_frozen_base(
    model: torch.nn.Module | Sequence[torch.nn.Module], *, per_layer_free: bool = False
) -> ConversionReport:
    """Store every frozen base linear weight of `model` as block FP8 and drop its bf16 copy.

    Call it after the checkpoint is loaded and the model is wrapped (Float16Module, DDP), before any copy of the
    weights is taken elsewhere.

    Args:
        model: one model chunk or the list of this rank's chunks.
        per_layer_free: False keeps a module's bf16 from its forward to its backward (fewest dequantisations); True
            frees it after each use and dequantises again in backward, so that at most one module's bf16 is alive.

    Returns:
        Counts and bytes; also logged.

    Raises:
        ValueError: nothing to convert (the base is not frozen), a weight that is already converted, is not finite or
            has no data yet (meta device), or mixed weights.
        NotImplementedError: a module whose weight is used outside its forward, named.
    """
    selected = select_frozen_linears(model)
    if not selected:
        raise ValueError(
            "no frozen base linear found: expected a model whose base is frozen (requires_grad False) with trainable "
            "adapters; apply the adapters before the conversion, and convert once"
        )
    _refuse_meta(selected)
    _refuse_not_finite(selected)  # all of them before the first swap: a refused model stays as it was
    summary = summarise(selected)
    for linear in selected:
        convert_module(linear, per_layer_free)
    by_class = Counter(type(s.module).__name__ for s in selected for _ in s.params)
    report = ConversionReport(summary, per_layer_free, dict(by_class))
    logger.info("FP8 frozen base: %s", report)
    return report


def convert_if_configured(model: torch.nn.Module | Sequence[torch.nn.Module]) -> ConversionReport | None:
    """`convert_frozen_base` when the model's config has `fp8_frozen_base_store` and it is not converted yet.

    None where there is nothing to do: the flag is off, it was done before, or this pipeline stage has no layers.

    What the training loops call once a model is built, wrapped and loaded.
    """
    from megatron.core.utils import get_model_config

    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    config = get_model_config(chunks[0])
    if not getattr(config, "fp8_frozen_base_store", False) or not has_layers(chunks):
        return None
    if any("_frozen_fp8_slab" in m.__dict__ for chunk in chunks for m in chunk.modules()):
        _refuse_half_converted(chunks)
        return None
    return convert_frozen_base(chunks, per_layer_free=config.fp8_frozen_base_per_layer_free)


def _refuse_half_converted(chunks: Sequence[torch.nn.Module]) -> None:
    left = unconverted_linears(chunks)
    if left:
        raise ValueError(
            f"a part of the frozen base is converted and {len(left)} linears are not, first {left[0]}: an earlier "
            "conversion failed half-way; build and load the model again"
        )


def _refuse_meta(selected: Sequence[FrozenLinear]) -> None:
    for linear in selected:
        for name in linear.params:
            if linear.module._parameters[name].is_meta:
                raise ValueError(
                    f"{linear.name}.{name}: expected loaded weights, got the meta device; load the model "
                    "before the conversion (select_frozen_linears and summarise work on the meta device)"
                )


def _refuse_not_finite(selected: Sequence[FrozenLinear]) -> None:
    for linear in selected:
        for name in linear.params:
            if not bool(torch.isfinite(linear.module._parameters[name].data).all()):
                raise ValueError(f"{linear.name}.{name}: weight: a NaN or an infinity cannot be quantised")


def convert_module(linear: FrozenLinear, per_layer_free: bool) -> FrozenFp8Slab:
    """Convert one module. The Parameters are replaced; their attributes and names stay."""
    module = linear.module
    device = module._parameters[linear.params[0]].device
    slab = allocate_slab(len(linear.params), linear.shape, device, per_layer_free)
    native = _is_transformer_engine(module)
    for index, name in enumerate(linear.params):
        try:
            slab.fill(index, module._parameters[name].data)
        except ValueError as error:
            raise ValueError(f"{linear.name}.{name}: {error}") from error
    for index, name in enumerate(linear.params):
        module._parameters[name] = _replacement(slab, index, module._parameters[name], native)
    module.__dict__["_frozen_fp8_slab"] = slab
    return slab


def _is_transformer_engine(module: torch.nn.Module) -> bool:
    return any(c.__module__.startswith("transformer_engine.") for c in type(module).__mro__)


def _replacement(slab: FrozenFp8Slab, index: int, old: torch.nn.Parameter, native: bool) -> torch.nn.Parameter:
    if native:
        from .te import frozen_parameter

        new = frozen_parameter(slab, index)
    else:
        new = torch.nn.Parameter(FrozenFp8Weight(slab, index), requires_grad=False)
    for key, value in old.__dict__.items():
        if key not in new.__dict__:
            setattr(new, key, value)
    return new
