# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Forward of local-spec linears on a frozen FP8 weight: what `linear_with_frozen_weight` calls."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Iterator

import torch

from .saved_tensors import frozen_forward
from .tensor import FrozenFp8Weight


def dequantised(weight: torch.Tensor):
    """A context that gives the [M, K] bf16 weight to compute with; any tensor but a `FrozenFp8Weight` as it is."""
    return _dequantised(weight) if isinstance(weight, FrozenFp8Weight) else nullcontext(weight)


@contextmanager
def _dequantised(weight: FrozenFp8Weight) -> Iterator[torch.Tensor]:
    with frozen_forward(weight.slab) as slab:
        yield slab.activate()[weight.index]
