"""RMS norms on a GPU, with the sum before them: see kernels/norm.py for what is computed, and where it is rounded.

A vector is read once and stays in registers, as in the fused norm of Triton's tutorials and of vLLM.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.gpu.tiles import row_tile


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [tokens, size] or [tokens, heads, size], with gaps between vectors, weight [size] → like x, new, no gaps."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, None, out, eps)
    return out


def add_rms_norm_triton(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, added [tokens, size] without gaps → x + added, rms_norm(x + added)."""
    assert x.is_contiguous() and added.is_contiguous() and x.shape == added.shape, (x.shape, added.shape)
    total, out = torch.empty_like(x), torch.empty_like(x)
    _launch(x, added, weight, total, out, eps)
    return total, out


def _launch(x: Tensor, added: Tensor | None, weight: Tensor, total: Tensor | None, out: Tensor, eps: float) -> None:
    size = x.shape[-1]
    assert x.stride(-1) == 1 or size == 1, "numbers of a vector lie side by side"
    rows, heads = x.numel() // max(size, 1), x.shape[1] if x.dim() == 3 else 1
    if rows == 0:
        return
    tile = row_tile(rows, size)
    _rms_norm[(triton.cdiv(rows, tile.rows),)](
        x, added, weight, total, out, rows, heads, x.stride(0), x.stride(-2) if heads > 1 else 0, eps,
        SIZE=size, ADD=added is not None, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x, added, weight, total, out, rows, heads, token_stride, head_stride, eps,
    SIZE: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS vectors."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (at < SIZE)[None, :]
    begin = (row // heads).to(tl.int64) * token_stride + (row % heads) * head_stride
    target = row.to(tl.int64)[:, None] * SIZE + at[None, :]
    wide = tl.load(x + begin[:, None] + at[None, :], inside, 0.0).to(tl.float32)
    if ADD:
        summed = (wide + tl.load(added + target, inside, 0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + target, summed, inside)
        wide = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
    factor = tl.load(weight + at, at < SIZE, 0.0)
    tl.store(out + target, weighted(wide * scale[:, None], factor[None, :], out.dtype.element_ty), inside)


@triton.jit
def weighted(scaled, factor, DTYPE: tl.constexpr):
    """scaled fp32, times factor → DTYPE. A factor of that type is multiplied after the rounding to it."""
    if factor.dtype == tl.float32:
        return (scaled * factor).to(DTYPE)
    else:
        return (scaled.to(DTYPE).to(tl.float32) * factor.to(tl.float32)).to(DTYPE)
