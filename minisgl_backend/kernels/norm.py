"""RMS norm: the torch reference. Fast variants are checked against it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [tokens, hidden], weight [hidden] → x / rms(x) · weight, a new tensor like x. Accumulates in fp32.

    Root Mean Square Layer Normalization, Zhang and Sennrich 2019.
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight
