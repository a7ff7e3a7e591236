"""The gated activation of Llama's MLP: the torch reference. SwiGLU, Shazeer 2020."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [tokens, intermediate] → silu(gate) · up, a new tensor."""
    return F.silu(gate).mul_(up)
