# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Which modules hold the frozen base: pure, explicit, counted. Works on a model built on the meta device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch

from .kernels import num_blocks
from .types import FrozenLinear, StorageSummary

# The base linears of decoder, MTP and vision tower by the last part of their name, as mcore's specs build them.
# Not here, on purpose: router and gate weights (tiny, fp32-sensitive), eh_proj, patch embedding,
# word embeddings and output_layer (tied or read outside forward), norms.
BASE_NAMES = frozenset(
    {
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
        "in_proj",
        "out_proj",
        "linear_q_proj",
        "linear_q_down_proj",
        "linear_q_up_proj",
        "linear_kv_down_proj",
        "linear_kv_up_proj",
        "linear_qkv_down_proj",
    }
)
# These run their linears' weights themselves, past the linears' forward.
BYPASSING_PARENTS = frozenset(
    {"TEFusedMLP", "TEFusedMLPWithGroupedLinear", "FusedSharedExpertMLP", "TEFusedLoRALinear", "InferenceGroupedMLP"}
)
_BYPASSING_FLAGS = (
    "use_transformer_engine_op_fuser",
    "defer_embedding_wgrad_compute",
    "cpu_offloading_weights",
    "qk_clip",
    "cache_mla_latents",
)
# A projector between towers (vision merger, deepstack mergers) names its linears linear_fc1 and linear_fc2 too, but
# is no transformer layer: it is small, often trained, and stays as it is.
_IN_A_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
_WEIGHT = re.compile(r"weight\d*")
_ADAPTER = re.compile(r"(^|\.)adapters?(\.|$)")
_SUPPORTED_DTYPE = torch.bfloat16


def linear_classes() -> tuple[type, ...]:
    """The module classes whose forward this package can serve: local parallel linears and Transformer Engine's."""
    # not at the top of the file: layers.py imports this package
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    classes: list[type] = [ColumnParallelLinear, RowParallelLinear]
    try:
        from megatron.core.extensions import transformer_engine as te
    except ImportError:
        return tuple(classes)
    for name in ("TELinear", "TELayerNormColumnParallelLinear", "TEGroupedLinear"):
        found = getattr(te, name, None)
        if isinstance(found, type):  # without Transformer Engine these are placeholders, not classes
            classes.append(found)
    return tuple(classes)


def select_frozen_linears(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[FrozenLinear]:
    """Every frozen base linear of `model` (one chunk or a list of chunks), in module order.

    Selected is a module of a known linear class inside a transformer layer (`layers.N.` in its name), whose name ends
    in one of `BASE_NAMES` (a LoRA wrapper's `.to_wrap` aside), outside any adapter, all of whose 2-D weights are
    frozen.

    Raises:
        ValueError: a selected module mixes frozen and trainable weights, weights of several shapes, or another dtype
            than bfloat16.
        NotImplementedError: a selected module's weight is used by a path that bypasses its forward.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    found: list[FrozenLinear] = []
    seen: set[int] = set()
    for chunk in chunks:
        bypassing: list[tuple[str, str]] = []
        for name, module in chunk.named_modules():
            kind = BYPASSING_PARENTS.intersection(c.__name__ for c in type(module).__mro__)
            if kind:
                bypassing.append((f"{name}.", min(kind)))
            if id(module) in seen or not _is_base_linear(name, module):
                continue
            seen.add(id(module))
            selected = _frozen_linear(name, module)
            if selected is not None:
                _refuse_parent(name, bypassing)
                found.append(selected)
    return found


def has_layers(model: Sequence[torch.nn.Module]) -> bool:
    """Whether there is any transformer layer: a pipeline stage may hold the embedding or the loss alone."""
    return any(_IN_A_LAYER.search(name) for chunk in model for name, _ in chunk.named_modules())


def _refuse_parent(name: str, bypassing: Sequence[tuple[str, str]]) -> None:
    for prefix, kind in bypassing:
        if name.startswith(prefix):
            raise NotImplementedError(
                f"{name}: {kind} uses this weight outside the linear's forward; the FP8 frozen base cannot serve it"
            )


def _is_base_linear(name: str, module: torch.nn.Module) -> bool:
    if not isinstance(module, linear_classes()) or _ADAPTER.search(name) or not _IN_A_LAYER.search(name):
        return False
    return name.removesuffix(".to_wrap").rpartition(".")[2] in BASE_NAMES


def unconverted_linears(chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Names of the frozen base linears that are still stored as they were loaded."""
    return [
        name
        for chunk in chunks
        for name, module in chunk.named_modules()
        if _is_base_linear(name, module)
        and "_frozen_fp8_slab" not in module.__dict__
        and any(_WEIGHT.fullmatch(n) and p is not None and not p.requires_grad for n, p in module._parameters.items())
    ]


def _frozen_linear(name: str, module: torch.nn.Module) -> FrozenLinear | None:
    if getattr(getattr(module, "config", None), "moe_single_grouped_weight", False):
        raise NotImplementedError(
            f"{name}: moe_single_grouped_weight holds all experts in one tensor; the FP8 frozen base needs it off"
        )
    params = {n: p for n, p in module._parameters.items() if p is not None and _WEIGHT.fullmatch(n) and p.dim() == 2}
    frozen = [n for n, p in params.items() if not p.requires_grad]
    if not frozen:
        return None
    if "_frozen_fp8_slab" in module.__dict__:
        raise ValueError(f"{name}: already converted to the FP8 frozen base; convert a model once")
    if len(frozen) != len(params):
        trainable = sorted(set(params) - set(frozen))
        raise ValueError(f"{name}: expected all weights frozen or none; frozen {frozen}, trainable {trainable}")
    shapes = {tuple(params[n].shape) for n in frozen}
    dtypes = {params[n].dtype for n in frozen}
    if len(shapes) != 1 or dtypes != {_SUPPORTED_DTYPE}:
        raise ValueError(
            f"{name}: expected weights of one shape in {_SUPPORTED_DTYPE}, "
            f"got shapes {sorted(shapes)}, dtypes {dtypes}"
        )
    _refuse_bypass(name, module)
    (shape,) = shapes
    return FrozenLinear(name, module, tuple(frozen), (shape[0], shape[1]))


def _refuse_bypass(name: str, module: torch.nn.Module) -> None:
    config = getattr(module, "config", None)
    for field in _BYPASSING_FLAGS:
        if getattr(config, field, False):
            raise NotImplementedError(
                f"{name}: {field} uses the weight outside the module's forward; the FP8 frozen base needs it off"
            )
    shards = getattr(config, "gtp_weight_remat_size", 1) or 1
    if shards > 1:
        raise NotImplementedError(
            f"{name}: GTP shards the weight; the FP8 frozen base needs gtp_weight_remat_size 1, got {shards}"
        )


def summarise(selected: Iterable[FrozenLinear]) -> StorageSummary:
    """Counts and bytes of `selected`, from shapes alone."""
    modules = list(selected)
    num = [len(s.params) for s in modules]
    elements = [s.shape[0] * s.shape[1] for s in modules]
    scales = [num_blocks(s.shape[0]) * num_blocks(s.shape[1]) for s in modules]
    return StorageSummary(
        num_tensors=sum(num),
        num_modules=len(modules),
        bf16_bytes=sum(2 * n * e for n, e in zip(num, elements, strict=True)),
        fp8_bytes=sum(n * (e + 4 * s) for n, e, s in zip(num, elements, scales, strict=True)),
    )
