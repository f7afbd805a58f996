# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Nouns of the frozen FP8 base: what is selected, how it is stored, what a conversion reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

BLOCK = 128  # rows and columns that share one scale
FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0
GIB = 2**30


class FrozenLinear(NamedTuple):
    """One module whose weights are to be stored as FP8."""

    name: str  # as in `named_modules` of the chunk it was found in
    module: torch.nn.Module
    params: tuple[str, ...]  # "weight", or "weight0" .. "weightN-1" of a grouped linear
    shape: tuple[int, int]  # [M out rows, K in columns] of each


@dataclass(frozen=True)
class StorageSummary:
    """Bytes of the selected weights, before and after, from shapes alone: it works on meta tensors."""

    num_tensors: int
    num_modules: int
    bf16_bytes: int
    fp8_bytes: int  # payload and scales

    @property
    def saved_gib(self) -> float:
        """GiB a rank that the conversion frees."""
        return (self.bf16_bytes - self.fp8_bytes) / GIB

    def __str__(self) -> str:
        return (
            f"{self.num_tensors} frozen linear weights in {self.num_modules} modules: "
            f"{self.bf16_bytes / GIB:.3f} GiB bf16 -> {self.fp8_bytes / GIB:.3f} GiB block FP8, "
            f"{self.saved_gib:.3f} GiB a rank freed"
        )


@dataclass
class ConversionReport:
    """What `convert_frozen_base` did."""

    summary: StorageSummary
    per_layer_free: bool
    by_class: dict[str, int] = field(default_factory=dict)  # module class name -> weights converted

    def __str__(self) -> str:
        classes = ", ".join(f"{count} in {name}" for name, count in sorted(self.by_class.items()))
        when = "freed after each use" if self.per_layer_free else "kept from forward to backward"
        return f"{self.summary} ({classes}; bf16 {when})"
