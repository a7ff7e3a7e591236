"""The table of rotary angles: one for each way in which the layers of a model rotate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.kernels.rotary import apply_rotary


@dataclass(frozen=True, slots=True)
class Rotation:
    """Of the tokens of one step. x [tokens, heads, head_dim] → rotated, a new tensor."""

    cos: Tensor  # [tokens, 1, rotary_dim / 2] fp32
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return apply_rotary(x, self.cos, self.sin)


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos, sin [positions, rotary_dim / 2] fp32."""

    cos: Tensor
    sin: Tensor

    def at(self, positions: Tensor) -> Rotation:
        """positions [tokens] int64."""
        return Rotation(self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1))


def build_rotary_table(frequencies: Sequence[float], context_tokens: int, device: torch.device) -> RotaryTable:
    """frequencies: radians per position of each pair of dimensions.

    The angles are taken in fp64 and only cos and sin are rounded: at position 100,000 an fp32 angle is off by 0.004.
    """
    positions = torch.arange(context_tokens, dtype=torch.float64)
    angles = torch.outer(positions, torch.tensor(frequencies, dtype=torch.float64))
    return RotaryTable(angles.cos().float().to(device), angles.sin().float().to(device))
