"""Rotary position embedding: the torch reference.

RoFormer, Su et al. 2021. Dimension i pairs with i + rotary_dim / 2 (the half-split layout of the Hugging Face Llama),
or dimension 2i with 2i + 1 (interleaved: GLM-4, and the paper). Dimensions from rotary_dim on stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """x [tokens, heads, head_dim], cos and sin [tokens, 1, rotary_dim / 2] fp32 → rotated x, new, of x's dtype."""
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        rotated = apply_rotary(x[..., :rotary_dim], cos, sin, interleaved=interleaved)
        return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
    if interleaved:
        first, second = x[..., 0::2].float(), x[..., 1::2].float()
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(x.dtype)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
