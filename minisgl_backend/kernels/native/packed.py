"""The layout in which native products take a weight: packed once, when a model is loaded.

    fp32 [strips][depth][16]          bf16 [strips][depth / 2][16][2]

A strip is 16 outputs. Outputs are padded with zeros to whole strips, and the depth of bf16 to a multiple of 32; why is
said in src/linear.h. Packing needs no native library.
"""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUT = 1
"""Raised when the layout changes, or what a source makes of its weights: part of the name of what is kept packed."""

PACKED_DTYPES = (torch.float32, torch.bfloat16)
"""Others (fp16) are multiplied by torch."""

_STRIP = 16
_BF16_DEPTH = 32
_STRIPS_AT_ONCE = 64


def pack(weight: Tensor, into: Tensor) -> None:
    """weight [outputs, depth], of any float dtype, is written to `into`: of packed_shape, one of PACKED_DTYPES.

    Some strips at a time: beside the two there is no third matrix.
    """
    depth = weight.shape[1]
    pairs = into.view(torch.int32).squeeze(-1)  # of bf16: two values move as one. Of fp32: the values
    strips, deep = pairs.shape[:2]
    inner = into[0].numel() // _STRIP
    for first in range(0, strips, _STRIPS_AT_ONCE):
        target = pairs[first : first + _STRIPS_AT_ONCE]
        rows = weight[first * _STRIP : (first + len(target)) * _STRIP].to(into.dtype)
        if rows.shape != (len(target) * _STRIP, inner):
            padded = rows.new_zeros(len(target) * _STRIP, inner)
            padded[: len(rows), :depth] = rows
            rows = padded
        target.copy_(rows.view(torch.int32).view(len(target), _STRIP, deep).transpose(1, 2))


def unpack(packed: Tensor, outputs: int, depth: int) -> Tensor:
    """The weight [outputs, depth] that was packed, a new tensor: the reference multiplies with it."""
    strips = packed.shape[0]
    rows = packed.unsqueeze(-1) if packed.dim() == 3 else packed
    return rows.transpose(1, 2).reshape(strips * _STRIP, -1)[:outputs, :depth].contiguous()


def packed_shape(outputs: int, depth: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Raises ValueError for another dtype."""
    strips = -(-outputs // _STRIP)
    if dtype == torch.float32:
        return strips, depth, _STRIP
    if dtype == torch.bfloat16:
        return strips, -(-depth // _BF16_DEPTH) * _BF16_DEPTH // 2, _STRIP, 2
    raise ValueError(f"{dtype} is not packed, {PACKED_DTYPES} are")
