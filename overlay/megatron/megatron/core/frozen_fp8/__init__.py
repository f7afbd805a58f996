# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Frozen base weights as block FP8: half the bytes of bf16, dequantised only where autograd needs them.

    from megatron.core.frozen_fp8 import convert_frozen_base
    report = convert_frozen_base(model_chunks, per_layer_free=True)     # after the checkpoint is loaded

Import order, top to bottom: types, kernels, tensor, select, saved_tensors, linear, te, convert, readers.
"""

from .convert import convert_frozen_base, convert_if_configured
from .readers import dequantised_base
from .select import select_frozen_linears, summarise
from .tensor import FrozenFp8Weight, frozen_slab, is_frozen_fp8
from .types import BLOCK, ConversionReport, FrozenLinear, StorageSummary

__all__ = [
    "BLOCK",
    "ConversionReport",
    "FrozenFp8Weight",
    "FrozenLinear",
    "StorageSummary",
    "convert_frozen_base",
    "convert_if_configured",
    "dequantised_base",
    "frozen_slab",
    "is_frozen_fp8",
    "select_frozen_linears",
    "summarise",
]
