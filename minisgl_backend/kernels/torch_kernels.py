"""The torch reference of the layers' kernels, on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.kernels.activation import GATED_ACTIVATIONS, GatedActivation
from minisgl_backend.kernels.interface import HeadPreparation
from minisgl_backend.kernels.moe import (
    ExpertActivation,
    ExpertWeights,
    Routing,
    choose_experts,
    mix_experts,
    router_logits,
)
from minisgl_backend.kernels.norm import rms_norm
from minisgl_backend.kernels.rotary import apply_rotary


def take_own_rows(
    take_rows: Callable[[Tensor, Tensor, float], Tensor],
    table: Tensor,
    index: Tensor,
    first: int,
    rows: int,
    factor: float,
) -> Tensor:
    """See Kernels. take_rows: that of a set of kernels. Nothing here waits for a device."""
    own = index - first
    theirs = (own < 0) | (own >= rows)
    return take_rows(table, own.masked_fill(theirs, 0), factor).masked_fill_(theirs[:, None], 0.0)


class TorchExperts:
    """What kernels of our own for a CPU leave to torch: routing, experts, weights in int8. See Kernels."""

    __slots__ = ()

    @property
    def int8_product(self) -> None:
        return None

    def router_logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return router_logits(x, weight, bias)

    def choose_experts(self, logits: Tensor, top_k: int, *, renormalise: bool) -> Routing:
        return choose_experts(logits, top_k, renormalise=renormalise)

    def mix_experts(self, x: Tensor, routing: Routing, experts: ExpertWeights, activation: ExpertActivation) -> Tensor:
        return mix_experts(x, routing, experts, activation)


@dataclass(frozen=True, slots=True)
class TorchKernels(TorchExperts):
    """See Kernels."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + added
        return total, rms_norm(total, weight, eps)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def gated(self, activation: str) -> GatedActivation:
        return GATED_ACTIVATIONS[activation]

    def prepare_heads(self, q: Tensor, k: Tensor, preparation: HeadPreparation) -> tuple[Tensor, Tensor]:
        rotation, eps = preparation.rotation, preparation.eps
        if preparation.q_norm is not None and preparation.k_norm is not None:
            q, k = rms_norm(q, preparation.q_norm, eps), rms_norm(k, preparation.k_norm, eps)
        if rotation is None:
            return q, k
        cos, sin, interleaved = rotation.cos, rotation.sin, rotation.interleaved
        return apply_rotary(q, cos, sin, interleaved=interleaved), apply_rotary(k, cos, sin, interleaved=interleaved)

    def take_rows(self, table: Tensor, index: Tensor, factor: float = 1.0) -> Tensor:
        rows = table[index]
        return rows if factor == 1.0 else rows.mul_(factor)

    def take_own_rows(self, table: Tensor, index: Tensor, first: int, rows: int, factor: float = 1.0) -> Tensor:
        return take_own_rows(self.take_rows, table, index, first, rows, factor)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return torch.tanh(x / cap) * cap


TORCH_KERNELS = TorchKernels()
"""Stateless."""
