"""The table of rotary angles: one for each way in which the layers of a model rotate, shared by all that do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.kernels.interface import Kernels, Rotation
from minisgl_backend.kernels.torch_kernels import TORCH_KERNELS

_BLOCK_POSITIONS = 8192  # of a table under construction: 16 MiB of fp64 for 128 rotated dimensions


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos, sin [positions, rotary_dim / 2] fp32, times the attention factor.

    4 · rotary_dim bytes a position: with 128 rotated dimensions 64 MiB at 131,072 positions, 512 MiB at 1,048,576.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    kernels: Kernels = TORCH_KERNELS

    def at(self, positions: Tensor) -> Rotation:
        """positions [tokens] int64."""
        cos, sin = (self.kernels.take_rows(table, positions).unsqueeze(1) for table in (self.cos, self.sin))
        return Rotation(cos, sin, self.interleaved)


def build_rotary_table(
    frequencies: Sequence[float],
    context_tokens: int,
    device: torch.device,
    *,
    attention_factor: float = 1.0,
    interleaved: bool = False,
    kernels: Kernels = TORCH_KERNELS,
) -> RotaryTable:
    """frequencies: radians per position of each pair of dimensions. attention_factor: cos and sin are multiplied by it.

    The angles are taken in fp64 and only cos and sin are rounded: at position 100,000 an fp32 angle is off by 0.004.
    On the CPU, in blocks: next to the table it needs no more than those.
    """
    per_position = torch.tensor(frequencies, dtype=torch.float64)
    cos, sin = (torch.empty(context_tokens, len(frequencies), device=device) for _ in range(2))
    for start in range(0, context_tokens, _BLOCK_POSITIONS):
        block = slice(start, min(start + _BLOCK_POSITIONS, context_tokens))
        angles = torch.outer(torch.arange(block.start, block.stop, dtype=torch.float64), per_position)
        cos[block] = (angles.cos() * attention_factor).float()
        sin[block] = (angles.sin() * attention_factor).float()
    return RotaryTable(cos, sin, interleaved, kernels)
