# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Frozen FP8 weights of Transformer Engine modules: its own block-FP8 tensor on our slab, and a grouped forward.

[Note: one launch a module]
Transformer Engine's linears call `dequantize()` on a quantised weight when the compute is bf16. Inside the module's
forward that call returns a view of the slab, dequantised by one launch for all weights of the module.
"""

from __future__ import annotations

from functools import partial

import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer, Float8BlockwiseQTensor

from .tensor import FrozenFp8Slab

_FP8 = tex.DType.kFloat8E4M3


def quantizer() -> Float8BlockQuantizer:
    """128x128 blocks, rowwise only, fp32 scales."""
    return Float8BlockQuantizer(
        fp8_dtype=_FP8, rowwise=True, columnwise=False, force_pow_2_scales=False, amax_epsilon=0.0, block_scaling_dim=2
    )


def frozen_parameter(slab: FrozenFp8Slab, index: int) -> torch.nn.Parameter:
    """Weight `index` of `slab` as a frozen Parameter in Transformer Engine's form; the bytes are shared, not copied.

    The class is exactly `Float8BlockwiseQTensor`: the C++ side of Transformer Engine knows no subclass of it. The two
    methods that must know the slab are set on the object.
    """
    tensor = Float8BlockwiseQTensor(
        shape=slab.q_GMK.shape[1:],
        dtype=slab.dtype,
        fp8_dtype=_FP8,
        rowwise_data=slab.q_GMK[index].view(torch.uint8),
        rowwise_scale_inv=slab.padded_scale_inv[index],
        columnwise_data=None,
        columnwise_scale_inv=None,
        quantizer=quantizer(),
        is_2D_scaled=True,
        requires_grad=False,
        device=slab.q_GMK.device,
    )
    param = torch.nn.Parameter(tensor, requires_grad=False)
    param._frozen_fp8_slab, param._frozen_fp8_index = slab, index
    param.dequantize = partial(_dequantize, slab, index)
    param.quantize_ = partial(_fill, slab, index)
    return param


def _dequantize(slab: FrozenFp8Slab, index: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[M, K] bfloat16 (or `dtype`). Inside the module's forward a shared view to read; else the caller's own."""
    out = slab.activate()[index] if slab.in_forward else slab.dequantize_one(index)
    return out if dtype in (None, out.dtype) else out.to(dtype)


def _fill(slab: FrozenFp8Slab, index: int, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> None:
    """What `copy_` from a checkpoint does."""
    if noop_flag is not None:
        raise NotImplementedError("noop_flag: a frozen FP8 weight is not updated conditionally")
    slab.fill(index, tensor)


class _FrozenGroupedLinear(torch.autograd.Function):
    """Forward and dgrad of a grouped linear with frozen weights, by the same grouped GEMM as the stock module."""

    @staticmethod
    def forward(ctx, inp_TK: torch.Tensor, slab: FrozenFp8Slab, m_splits: list[int]) -> torch.Tensor:
        weight_GMK = slab.materialize()
        out_TM = torch.empty(inp_TK.size(0), weight_GMK.size(1), dtype=inp_TK.dtype, device=inp_TK.device)
        _grouped_gemm(weight_GMK, inp_TK, out_TM, m_splits, layout="TN", grad=False)
        ctx.slab, ctx.m_splits = slab, m_splits
        if not slab.per_layer_free:
            ctx.save_for_backward(weight_GMK)  # [Note: who frees the bf16 weight]: kept until backward
        return out_TM

    @staticmethod
    def backward(ctx, grad_out_TM: torch.Tensor):
        weight_GMK = ctx.slab.materialize()
        grad_TM = grad_out_TM.contiguous()
        grad_in_TK = torch.empty(grad_TM.size(0), weight_GMK.size(2), dtype=grad_TM.dtype, device=grad_TM.device)
        _grouped_gemm(weight_GMK, grad_TM, grad_in_TK, ctx.m_splits, layout="NN", grad=True)
        return grad_in_TK, None, None


def _grouped_gemm(weight_GMK, rows, out, m_splits: list[int], *, layout: str, grad: bool) -> None:
    num = weight_GMK.size(0)
    general_grouped_gemm(
        list(weight_GMK.unbind(0)),
        list(rows.split(m_splits)),
        [out],
        [None] * num,
        out.dtype,
        single_output=True,
        layout=layout,
        m_splits=m_splits,
        grad=grad,
        use_split_accumulator=grad,  # what the stock module passes; bf16 GEMMs ignore it
    )


def grouped_forward(module: torch.nn.Module, inp: torch.Tensor, m_splits) -> torch.Tensor | None:
    """The frozen grouped forward for a converted module computing in bf16; None where the stock forward must run.

    The stock module hands every weight to autograd by itself: 64 experts are 192 saved slots a call. This one hands
    over the slab.

    Args:
        inp: [T, K] bfloat16, tokens sorted by expert.
        m_splits: tokens of each expert, list or tensor.
    """
    slab = module.__dict__.get("_frozen_fp8_slab")
    if slab is None or slab.q_GMK.size(0) != module.num_gemms or not _plain(module, inp):
        return None
    splits = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
    flat = inp.reshape(-1, inp.size(-1)).contiguous()
    out = _FrozenGroupedLinear.apply(flat, slab, splits)
    return out.view(-1, *inp.shape[1:-1], out.size(-1))


def _plain(module: torch.nn.Module, inp: torch.Tensor) -> bool:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    quantised = FP8GlobalStateManager.is_fp8_enabled() or FP8GlobalStateManager.is_fp8_calibration()
    return inp.dtype == torch.bfloat16 and not quantised and not module.use_bias and not torch.is_autocast_enabled()
