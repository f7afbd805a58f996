# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Keep a materialised weight out of the autograd graph: save where it came from, make it again in backward.

[Note: who frees the bf16 weight]
Autograd holds what forward saves. Inside `frozen_forward` a saved tensor that lives in the materialised weight is
replaced by a `Handle`: the slab, and size, stride and offset of the view. Backward asks for it, the slab is
dequantised again, and the result dies with that node's backward. No hook sits on a graph node and no object of the
graph points back to it, so nothing waits for the garbage collector, whatever the schedule: several microbatches in
flight, recompute nested or not, forward without backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from .tensor import FrozenFp8Slab

Hook = Callable[[Any], Any]
_NOTHING = nullcontext()


class Handle(NamedTuple):
    """What is saved in place of a view of the materialised weight."""

    slab: FrozenFp8Slab
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        """The view, on a weight that is dequantised again (or still alive from a sibling)."""
        return self.slab.materialize().as_strided(self.size, self.stride, self.offset)


class _Outer(NamedTuple):
    """A saved tensor that is not ours, in whatever form the enclosing hooks gave it."""

    packed: Any


class frozen_forward:
    """The context in which a module with a frozen FP8 weight runs its forward.

    The weight is dequantised by the first reader inside (`FrozenFp8Slab.active` keeps it alive until the context
    ends). With `per_layer_free` autograd saves a `Handle` in place of any view of it. Hooks that are active outside
    (activation offload) still see every other tensor: autograd calls the innermost pair of default hooks alone, so
    they are called from here.
    """

    __slots__ = ("_hooks", "_slab")

    def __init__(self, slab: FrozenFp8Slab) -> None:
        self._slab = slab
        self._hooks: AbstractContextManager = _NOTHING

    def __enter__(self) -> FrozenFp8Slab:
        if self._slab.per_layer_free and torch.is_grad_enabled():
            self._hooks = _saving_handles(self._slab)
        self._hooks.__enter__()
        self._slab.in_forward = True
        return self._slab

    def __exit__(self, *exc_info: object) -> None:
        self._hooks.__exit__(*exc_info)
        self._slab.in_forward = False
        self._slab.active = None


def _saving_handles(slab: FrozenFp8Slab) -> AbstractContextManager:
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: torch.Tensor) -> Any:
        active = slab.active
        if active is not None and _shares_storage(tensor, active):
            return Handle(slab, tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset())
        return tensor if outer is None else _Outer(outer[0](tensor))

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, Handle):
            return saved.tensor()
        return outer[1](saved.packed) if isinstance(saved, _Outer) else saved

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _shares_storage(tensor: torch.Tensor, weight: torch.Tensor) -> bool:
    # a wrapper subclass has no storage of its own to compare; none is a view of the weight
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device != weight.device:
        return False
    return tensor.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def forward_context(module: torch.nn.Module) -> AbstractContextManager:
    """`frozen_forward` for a module that was converted, an empty context for any other."""
    slab = module.__dict__.get("_frozen_fp8_slab")
    return _NOTHING if slab is None else frozen_forward(slab)


def frozen_grouped_forward(module: torch.nn.Module, inp: torch.Tensor, m_splits) -> torch.Tensor | None:
    """The output of a converted grouped linear; None for one that must run the stock forward."""
    if "_frozen_fp8_slab" not in module.__dict__:
        return None
    from .te import grouped_forward

    return grouped_forward(module, inp, m_splits)
