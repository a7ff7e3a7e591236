"""Gated activations and capped logits on a GPU: see kernels/activation.py for what is computed, and where rounded."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.gpu.tiles import RowTile, cut_tile

SILU = tl.constexpr(0)
GELU_TANH = tl.constexpr(1)


def silu_mul_triton(gate: Tensor, up: Tensor) -> Tensor:
    """See GatedActivation. Rows may have gaps between them, and numbers none."""
    return _gated(gate, up, SILU)


def gelu_tanh_mul_triton(gate: Tensor, up: Tensor) -> Tensor:
    """See GatedActivation. Rows may have gaps between them, and numbers none."""
    return _gated(gate, up, GELU_TANH)


def softcap_triton(x: Tensor, cap: float) -> Tensor:
    """tanh(x / cap) · cap, new. x without gaps."""
    assert x.is_contiguous(), "x lies without gaps"
    out = torch.empty_like(x)
    if x.numel():
        tile = cut_tile(1, x.numel())
        _softcap[(triton.cdiv(x.numel(), tile.columns),)](
            x, out, x.numel(), cap, COLUMNS=tile.columns, num_warps=tile.warps
        )
    return out


def _gated(gate: Tensor, up: Tensor, kind: tl.constexpr) -> Tensor:
    (rows, size), out = gate.shape, torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    assert gate.shape == up.shape and (size == 1 or gate.stride(1) == up.stride(1) == 1), (gate.shape, up.shape)
    if gate.numel():
        tile = cut_tile(rows, size)
        _activate_and_multiply[_grid(rows, size, tile)](
            gate, up, out, rows, size, gate.stride(0), up.stride(0),
            KIND=kind.value, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps,
        )  # fmt: skip
    return out


def _grid(rows: int, size: int, tile: RowTile) -> tuple[int, int]:
    return triton.cdiv(rows, tile.rows), triton.cdiv(size, tile.columns)


@triton.jit(do_not_specialize=["rows"])
def _activate_and_multiply(
    gate, up, out, rows, size, gate_stride, up_stride, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Some rows × some columns."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < size)
    value = activated(tl.load(gate + row * gate_stride + column, inside, 0.0).to(tl.float32), KIND)
    value = value.to(out.dtype.element_ty).to(tl.float32)
    value *= tl.load(up + row * up_stride + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * size + column, value.to(out.dtype.element_ty), inside)


@triton.jit
def activated(gate, KIND: tl.constexpr):
    """fp32 → silu or gelu of it, fp32. tanh(z) = 2 · sigmoid(2z) - 1, so gelu needs one sigmoid, and loses nothing."""
    if KIND == SILU:
        return gate * tl.sigmoid(gate)
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(2 * inner)


@triton.jit(do_not_specialize=["elements"])
def _softcap(x, out, elements, cap, COLUMNS: tl.constexpr):
    """Some numbers."""
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    value = (tl.load(x + at, at < elements, 0.0).to(tl.float32) / cap).to(out.dtype.element_ty)
    value = tanh(value.to(tl.float32)).to(out.dtype.element_ty).to(tl.float32) * cap
    tl.store(out + at, value.to(out.dtype.element_ty), at < elements)


@triton.jit
def tanh(x):
    """fp32, to a few units in the last place: near zero by its series, where the quotient would lose what it shows."""
    square = x * x
    series = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    small = tl.exp(-2 * tl.abs(x))
    quotient = (1 - small) / (1 + small)
    return tl.where(tl.abs(x) < 0.1, series, tl.where(x < 0, -quotient, quotient))
