# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Block FP8 in and out: one launch a module. Triton on CUDA, the same formula in plain torch elsewhere.

    scale     = 448 / amax(block)           fp32; 1 where that is infinite (a block of zeros)
    q[i, j]   = e4m3(w[i, j] * scale)       scale_inv = 1 / scale is what is stored
    w'[i, j]  = bf16(fp32(q[i, j]) * scale_inv)

The same bytes on every device. Transformer Engine's block quantiser computes the scale with another rounding (one unit
in the last place on some blocks, 0.01 % of the bytes); a conversion runs once, so exactness is worth more than speed.

Shapes: G weights of a module, M out rows, K in columns, m = ceil(M / 128), k = ceil(K / 128).
"""

from __future__ import annotations

import torch

from .types import BLOCK, FP8_DTYPE, FP8_MAX

try:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
except ImportError:
    HAVE_TRITON = False


def num_blocks(length: int) -> int:
    """Blocks that cover `length` elements."""
    return -(-length // BLOCK)


def quantize_blocks(weight_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise one weight to e4m3 with one fp32 scale for each 128x128 block, on its own device.

    Args:
        weight_MK: [M, K] bfloat16 or float32. Read only, not kept. Ragged M and K are allowed.

    Returns:
        q_MK: [M, K] float8_e4m3fn, contiguous; scale_inv_mk: [m, k] float32, multiply to get back.

    Raises:
        ValueError: not 2-D, or not bfloat16 or float32, or it holds a NaN or an infinity.
    """
    if weight_MK.dim() != 2 or weight_MK.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"weight: expected a 2-D bfloat16 or float32 tensor, got {tuple(weight_MK.shape)} {weight_MK.dtype}"
        )
    rows, cols = weight_MK.shape
    device = weight_MK.device
    q_MK = torch.empty(rows, cols, dtype=FP8_DTYPE, device=device)
    scale_inv_mk = torch.empty(num_blocks(rows), num_blocks(cols), dtype=torch.float32, device=device)
    for top in range(0, rows, _QUANTIZE_ROWS):  # bounds the fp32 temporaries
        part = slice(top, min(top + _QUANTIZE_ROWS, rows))
        blocks = slice(top // BLOCK, num_blocks(part.stop))
        _quantize_rows(weight_MK[part], q_MK[part], scale_inv_mk[blocks])
    if not bool(torch.isfinite(scale_inv_mk).all()):
        raise ValueError("weight: a NaN or an infinity cannot be quantised")
    return q_MK, scale_inv_mk


_QUANTIZE_ROWS = 32 * BLOCK


def _quantize_rows(weight_RK: torch.Tensor, q_RK: torch.Tensor, scale_inv_rk: torch.Tensor) -> None:
    """Quantise whole rows of blocks: [R, K] in, q [R, K] and scale_inv [r, k] filled."""
    rows, cols = weight_RK.shape
    r, k = scale_inv_rk.shape
    padded = torch.zeros(r * BLOCK, k * BLOCK, dtype=torch.float32, device=weight_RK.device)
    padded[:rows, :cols] = weight_RK
    blocks = padded.view(r, BLOCK, k, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3))
    scale = FP8_MAX / amax
    scale = torch.where(torch.isinf(scale), torch.ones_like(scale), scale)  # zeros, or so small that they become zeros
    blocks.mul_(scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    q_RK.copy_(padded[:rows, :cols])
    # an infinity gives scale 0, a NaN stays one: neither reciprocal is finite
    scale_inv_rk.copy_(scale.reciprocal())


def dequantize_blocks(
    q_GMK: torch.Tensor, scale_inv_Gmk: torch.Tensor, out_GMK: torch.Tensor | None = None
) -> torch.Tensor:
    """Expand the block-FP8 weights of one module to bf16 in one launch on the current stream.

    Args:
        q_GMK: [G, M, K] float8_e4m3fn, contiguous. Read only, not kept.
        scale_inv_Gmk: [G, m, k] float32, same device, unit stride along k (Transformer Engine pads the rows).
        out_GMK: [G, M, K] bfloat16, contiguous, to fill; None allocates 2 * G * M * K bytes.

    Returns:
        [G, M, K] bfloat16, owned by the caller; `out_GMK` itself when given.

    Raises:
        ValueError: names the argument, with expected and actual shape, dtype or device.
    """
    _check_blocks(q_GMK, scale_inv_Gmk)
    if out_GMK is None:
        out_GMK = torch.empty(q_GMK.shape, dtype=torch.bfloat16, device=q_GMK.device)
    elif out_GMK.shape != q_GMK.shape or out_GMK.dtype != torch.bfloat16 or not out_GMK.is_contiguous():
        raise ValueError(
            f"out: expected contiguous {tuple(q_GMK.shape)} bfloat16, got {tuple(out_GMK.shape)} {out_GMK.dtype}"
        )
    if q_GMK.is_cuda and HAVE_TRITON:
        _launch_dequantize(q_GMK, scale_inv_Gmk, out_GMK)
    else:
        _dequantize_torch(q_GMK, scale_inv_Gmk, out_GMK)
    return out_GMK


def _check_blocks(q_GMK: torch.Tensor, scale_inv_Gmk: torch.Tensor) -> None:
    if q_GMK.dim() != 3 or q_GMK.dtype != FP8_DTYPE or not q_GMK.is_contiguous():
        raise ValueError(f"q: expected contiguous [G, M, K] {FP8_DTYPE}, got {tuple(q_GMK.shape)} {q_GMK.dtype}")
    num, rows, cols = q_GMK.shape
    expected = (num, num_blocks(rows), num_blocks(cols))
    if tuple(scale_inv_Gmk.shape) != expected or scale_inv_Gmk.dtype != torch.float32:
        raise ValueError(
            f"scale_inv: expected {expected} float32 for q {tuple(q_GMK.shape)}, "
            f"got {tuple(scale_inv_Gmk.shape)} {scale_inv_Gmk.dtype}"
        )
    if scale_inv_Gmk.device != q_GMK.device or scale_inv_Gmk.stride(-1) != 1:
        raise ValueError(
            f"scale_inv: expected unit stride along k on {q_GMK.device}, "
            f"got stride {scale_inv_Gmk.stride()} on {scale_inv_Gmk.device}"
        )


def _dequantize_torch(q_GMK: torch.Tensor, scale_inv_Gmk: torch.Tensor, out_GMK: torch.Tensor) -> None:
    _, rows, cols = q_GMK.shape
    for q_MK, scale_mk, out_MK in zip(q_GMK, scale_inv_Gmk, out_GMK, strict=True):
        scale = scale_mk.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
        out_MK.copy_(q_MK.to(torch.float32) * scale)


if HAVE_TRITON:

    @triton.jit
    def _dequantize_kernel(
        q_ptr,  # [G, M, K] e4m3, strides (M * K, K, 1)
        scale_ptr,  # [G, m, k] f32, strides (scale_stride_G, scale_stride_m, 1)
        out_ptr,  # [G, M, K] bf16, strides as q
        M,
        K,
        scale_stride_G,
        scale_stride_m,
        BLOCK_SIZE: tl.constexpr,
        ROWS: tl.constexpr,  # divides BLOCK_SIZE: the rows of a program share their scales
        COLS: tl.constexpr,
    ):
        row_tile = tl.program_id(0)
        weight = tl.program_id(2)
        rows = row_tile * ROWS + tl.arange(0, ROWS)
        cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
        # ragged M and K: the last tiles reach over the edge
        inside = (rows[:, None] < M) & (cols[None, :] < K)
        # int64: G * M * K passes 2**31 for a grouped linear
        offsets = weight.to(tl.int64) * M * K + rows[:, None].to(tl.int64) * K + cols[None, :]
        scale_row = weight.to(tl.int64) * scale_stride_G + (row_tile * ROWS // BLOCK_SIZE) * scale_stride_m
        scale = tl.load(scale_ptr + scale_row + cols // BLOCK_SIZE, mask=cols < K, other=0.0)
        q = tl.load(q_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + offsets, (q * scale[None, :]).to(tl.bfloat16), mask=inside)


# measured best of twelve tilings over the shapes of the 2.6 B and 35B-A3B models on an H200
_ROWS, _COLS, _WARPS = 64, 256, 8


def _launch_dequantize(q_GMK: torch.Tensor, scale_inv_Gmk: torch.Tensor, out_GMK: torch.Tensor) -> None:
    num, rows, cols = q_GMK.shape
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(cols, _COLS), num)
    _dequantize_kernel[grid](
        q_GMK,
        scale_inv_Gmk,
        out_GMK,
        rows,
        cols,
        scale_inv_Gmk.stride(0),
        scale_inv_Gmk.stride(1),
        BLOCK_SIZE=BLOCK,
        ROWS=_ROWS,
        COLS=_COLS,
        num_warps=_WARPS,
    )
