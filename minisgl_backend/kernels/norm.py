"""Root mean square normalisation: the torch reference. Zhang and Sennrich 2019."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size], weight [size] → x / sqrt(mean(x²) + eps) · weight, a new tensor like x. Accumulates in fp32.

    A weight of x's dtype is multiplied after the rounding to it, one in fp32 before: families differ in that.
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight).to(x.dtype) if weight.dtype == torch.float32 else scaled.to(x.dtype) * weight
