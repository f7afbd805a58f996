# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""For code that reads base weights outside forward: weights backupers, exporters, checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from .tensor import is_frozen_fp8


@contextmanager
def dequantised_base(
    model: torch.nn.Module | Sequence[torch.nn.Module],
) -> Iterator[dict[str, torch.nn.Parameter]]:
    """Every frozen FP8 weight as a plain bf16 Parameter while the context is open.

    The modules hold the plain Parameters inside, so that code which walks the model sees nothing unusual; the FP8
    weights are put back afterwards and what was written to the plain ones is lost. Needs 2 bytes an element of the
    whole base for as long as it is open: for single weights call `dequantize()` on them instead.

    Yields:
        name in the chunk -> bf16 Parameter, frozen, on the weight's device.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    stored: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    plain: dict[str, torch.nn.Parameter] = {}
    try:
        for chunk in chunks:
            for prefix, module in chunk.named_modules():
                for name, param in list(module._parameters.items()):
                    if param is not None and is_frozen_fp8(param):
                        stored.append((module, name, param))
                        module._parameters[name] = _plain(param)
                        plain[f"{prefix}.{name}" if prefix else name] = module._parameters[name]
        yield plain
    finally:
        for module, name, param in stored:
            module._parameters[name] = param


def _plain(param: torch.nn.Parameter) -> torch.nn.Parameter:
    new = torch.nn.Parameter(param.dequantize(), requires_grad=False)
    for key, value in param.__dict__.items():
        if key not in new.__dict__ and not key.startswith("_frozen_fp8"):
            setattr(new, key, value)
    return new
