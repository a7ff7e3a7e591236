"""The gated activations of MLPs: the torch references. Variants of GLU, Shazeer 2020."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

GatedActivation = Callable[[Tensor, Tensor], Tensor]
"""gate, up [tokens, intermediate] → [tokens, intermediate], a new tensor."""


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) · up, gelu by its tanh formula (Hendrycks and Gimpel 2016)."""
    return F.gelu(gate, approximate="tanh").mul_(up)


GATED_ACTIVATIONS: Mapping[str, GatedActivation] = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}
"""By the field `activation` of a ModelSpec."""
