# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The stored weight: a tensor that says it is bf16 [M, K] and holds FP8 and scales.

[Note: who owns the bytes]
A module's weights share one slab, `FrozenFp8Slab`: q [G, M, K] and scale_inv [G, m, k]. Each Parameter is a
`FrozenFp8Weight` that points into the slab. Nothing else keeps a bf16 copy: a reader outside forward gets one by
`dequantize()`, or by any operator, which dequantises first; the copy dies with the reader.
"""

from __future__ import annotations

import copy
import weakref

import torch
from torch.utils._pytree import tree_map

from .kernels import dequantize_blocks, num_blocks, quantize_blocks
from .types import FP8_DTYPE

_aten = torch.ops.aten
_SET_DATA = torch.Tensor.data.__set__


class FrozenFp8Slab:
    """The weights of one module: G equal [M, K] matrices as block FP8.

    Attributes:
        q_GMK: [G, M, K] float8_e4m3fn, contiguous.
        padded_scale_inv: [G, m, ceil(k / 4) * 4] float32: the layout of Transformer Engine's GEMM.
        scale_inv_Gmk: [G, m, k] float32, the view of it that counts.
        per_layer_free: True: autograd saves a handle and backward dequantises again; False: the graph keeps the bf16.
        dtype: what `materialize` gives: bfloat16.
    """

    def __init__(self, q_GMK: torch.Tensor, padded_scale_inv: torch.Tensor, per_layer_free: bool = False) -> None:
        self.q_GMK = q_GMK
        self.padded_scale_inv = padded_scale_inv
        self.scale_inv_Gmk = padded_scale_inv[:, :, : num_blocks(q_GMK.size(2))]
        self.per_layer_free = per_layer_free
        self.dtype = torch.bfloat16
        self.in_forward = False
        self.active: torch.Tensor | None = None  # the materialised weight while the module's forward runs
        self._last: weakref.ref | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of payload and scales."""
        return self.q_GMK.nbytes + self.padded_scale_inv.nbytes

    @torch.no_grad()
    def materialize(self) -> torch.Tensor:
        """[G, M, K] bfloat16 on the current stream, read only: shared while a previous result is still alive.

        Backward asks once for each saved weight: the first call dequantises, the others get the same tensor.
        """
        alive = self._last() if self._last is not None else None
        if alive is None:
            alive = dequantize_blocks(self.q_GMK, self.scale_inv_Gmk)
            self._last = weakref.ref(alive)
        return alive

    def activate(self) -> torch.Tensor:
        """`materialize`, kept alive until the forward that asked for it ends."""
        self.active = self.materialize()
        return self.active

    @torch.no_grad()
    def dequantize_one(self, index: int) -> torch.Tensor:
        """[M, K] bfloat16 of one weight, owned by the caller."""
        one = slice(index, index + 1)
        return dequantize_blocks(self.q_GMK[one], self.scale_inv_Gmk[one])[0]

    @torch.no_grad()
    def fill(self, index: int, source_MK: torch.Tensor) -> None:
        """Replace weight `index`: a frozen FP8 weight byte for byte, anything else quantised on the slab's device.

        Raises:
            ValueError: another shape, or values that cannot be quantised.
        """
        if tuple(source_MK.shape) != tuple(self.q_GMK.shape[1:]):
            raise ValueError(f"weight: expected shape {tuple(self.q_GMK.shape[1:])}, got {tuple(source_MK.shape)}")
        q_MK, scale_inv_mk = _payload(source_MK, self.q_GMK.device)
        self.q_GMK[index].copy_(q_MK)
        self.scale_inv_Gmk[index].copy_(scale_inv_mk)
        self._last = None  # a result that is still alive shows the old bytes


class FrozenFp8Weight(torch.Tensor):
    """One [M, K] weight of a slab. Reports bfloat16, its shape and its device; every operator sees dequantised values.

    `copy_` into it quantises (a checkpoint loaded after the conversion); any other in-place operator raises, as does
    writing to a part of it or assigning its `.data`.
    """

    slab: FrozenFp8Slab
    index: int

    @staticmethod
    def __new__(cls, slab: FrozenFp8Slab, index: int) -> FrozenFp8Weight:
        self = torch.Tensor._make_wrapper_subclass(
            cls, slab.q_GMK.shape[1:], dtype=slab.dtype, device=slab.q_GMK.device, requires_grad=False
        )
        self.slab = slab
        self.index = index
        return self

    def __repr__(self) -> str:
        return f"FrozenFp8Weight(shape={tuple(self.shape)}, device={self.device}, index={self.index})"

    @property
    def rowwise_data(self) -> torch.Tensor:
        """[M, K] float8_e4m3fn, a view of the slab."""
        return self.slab.q_GMK[self.index]

    @property
    def rowwise_scale_inv(self) -> torch.Tensor:
        """[m, k] float32, a view of the slab."""
        return self.slab.scale_inv_Gmk[self.index]

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[M, K] bfloat16 (or `dtype`) that the caller owns."""
        out = self.slab.dequantize_one(self.index)
        return out if dtype is None else out.to(dtype)

    def __reduce_ex__(self, protocol):
        """Pickled as the plain bf16 tensor it stands for: a checkpoint does not need this class to be read."""
        return self.dequantize().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> FrozenFp8Weight:
        """With the bytes; copies of the weights of one module share the copy of its slab."""
        new = memo[id(self)] = FrozenFp8Weight(copy.deepcopy(self.slab, memo), self.index)
        new.__dict__.update(copy.deepcopy({k: v for k, v in self.__dict__.items() if k not in new.__dict__}, memo))
        return new

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == _SET_DATA and getattr(args[1], "slab", None) is not args[0].slab:
            raise NotImplementedError(
                f".data of {args[0]!r}: a frozen FP8 weight cannot be replaced, moved or cast; "
                "use copy_, which quantises"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (_aten.detach.default, _aten.alias.default):
            return cls(args[0].slab, args[0].index)
        if func is _aten.copy_.default and isinstance(args[0], cls):
            args[0].slab.fill(args[0].index, args[1])
            return args[0]
        if func._schema.is_mutable and any(isinstance(a, cls) for a in _mutated(func, args, kwargs)):
            raise NotImplementedError(
                f"{func}: a frozen FP8 weight cannot be changed in place; use copy_, which quantises"
            )
        unwrapped_args, unwrapped_kwargs = tree_map(_dequantized, args), tree_map(_dequantized, kwargs)
        out = func(*unwrapped_args, **unwrapped_kwargs)
        return _read_only(out) if func.overloadpacket in _PARTS else out


# Views of a part. Loaders write into them piece by piece and rely on the whole having changed. A whole weight in
# another shape, or split up, is a dequantised copy like any other result: loaders load that one and hand it on.
_PARTS = (_aten.slice, _aten.select, _aten.narrow, _aten.as_strided)


class _DequantisedPart(torch.Tensor):
    """A part of a frozen FP8 weight: dequantised values to read. A write would be lost, so it raises."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable and any(isinstance(a, cls) for a in _mutated(func, args, kwargs)):
            raise NotImplementedError(
                f"{func}: a part of a frozen FP8 weight cannot be written; copy_ the whole weight, or load before the "
                "conversion"
            )
        with torch._C._DisableTorchDispatch():
            out = func(*args, **kwargs)
        return _read_only(out) if any(r.alias_info is not None for r in func._schema.returns) else out


def _read_only(out: torch.Tensor) -> torch.Tensor:
    return out.as_subclass(_DequantisedPart) if type(out) is torch.Tensor else out


def _payload(source_MK: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    slab = frozen_slab(source_MK)
    if slab is None:
        return quantize_blocks(source_MK.to(device))
    index = source_MK.index if isinstance(source_MK, FrozenFp8Weight) else source_MK._frozen_fp8_index
    return slab.q_GMK[index], slab.scale_inv_Gmk[index]


def frozen_slab(tensor: torch.Tensor) -> FrozenFp8Slab | None:
    """The slab that holds `tensor`, None for a tensor that is not a frozen FP8 weight."""
    if isinstance(tensor, FrozenFp8Weight):
        return tensor.slab
    return getattr(tensor, "_frozen_fp8_slab", None)


def _dequantized(value: object) -> object:
    return value.dequantize() if isinstance(value, FrozenFp8Weight) else value


def _mutated(func, args, kwargs):
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(argument.name)


def is_frozen_fp8(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is stored by this package, as its own class or as Transformer Engine's."""
    return frozen_slab(tensor) is not None


def allocate_slab(
    num: int, shape: tuple[int, int], device: torch.device, per_layer_free: bool = False
) -> FrozenFp8Slab:
    """An unfilled slab for `num` weights of `shape` [M, K] on `device`.

    The scale rows are padded to a multiple of 4, which Transformer Engine's GEMM layout asks for.
    """
    rows, cols = shape
    k = num_blocks(cols)
    q_GMK = torch.empty(num, rows, cols, dtype=FP8_DTYPE, device=device)
    padded = torch.zeros(num, num_blocks(rows), -(-k // 4) * 4, dtype=torch.float32, device=device)
    return FrozenFp8Slab(q_GMK, padded, per_layer_free)
