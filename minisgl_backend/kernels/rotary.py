"""Rotary position embedding: the torch reference.

RoFormer, Su et al. 2021, in the half-split layout of the Hugging Face Llama: dimension i pairs with i + head_dim / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim], cos and sin [tokens, 1, head_dim / 2] fp32 → rotated x, new, of x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
