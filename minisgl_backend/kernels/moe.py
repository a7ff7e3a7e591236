"""The experts of a sparse MLP: each token through its own few gated MLPs, and their outputs added up.

A reference in the plainest form, and the one of the layers (see Kernels). `gpu/moe.py` and `gpu/routing.py` hold those
for a GPU.
Mixtures of experts: Shazeer et al. 2017; tokens grouped by expert instead of padded to a capacity: MegaBlocks, Gale et
al. 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.kernels.activation import GATED_ACTIVATIONS

NO_EXPERT = -1
"""In Routing.experts: nothing is computed for this place, and it adds nothing. All places of a padding row hold it."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each token goes through, and what each one's output counts."""

    experts: Tensor  # [tokens, top_k] int64, or NO_EXPERT; a token's experts differ from one another
    weights: Tensor  # [tokens, top_k] fp32


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The gated MLPs of all experts of one layer, stacked. Contiguous, of one dtype."""

    gate_up: Tensor  # [experts, 2 · intermediate, hidden]: gate's rows, then up's
    down: Tensor  # [experts, hidden, intermediate]
    gate_up_bias: Tensor | None = None  # [experts, 2 · intermediate]
    down_bias: Tensor | None = None  # [experts, hidden]; both biases are there, or none

    def run(self, expert: int, x: Tensor, activation: ExpertActivation) -> Tensor:
        """x [n, hidden] through one expert → [n, hidden], a new tensor. Reads the expert's weights where they lie."""
        gate_up = F.linear(x, self.gate_up[expert], None if self.gate_up_bias is None else self.gate_up_bias[expert])
        inner = activation(*gate_up.chunk(2, dim=-1))
        return F.linear(inner, self.down[expert], None if self.down_bias is None else self.down_bias[expert])


@dataclass(frozen=True, slots=True)
class ExpertActivation:
    """A gated activation as data: a fused kernel must know it, not call it.

    clamped_swiglu (gpt-oss, OpenAI 2025): (up + 1) · gate · sigmoid(alpha · gate), with gate clamped from above and up
    from both sides by limit.
    """

    kind: Literal["silu", "gelu_tanh", "clamped_swiglu"]
    alpha: float = 0.0  # of clamped_swiglu, as is limit
    limit: float = 0.0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """See GatedActivation."""
        if self.kind != "clamped_swiglu":
            return GATED_ACTIVATIONS[self.kind](gate, up)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (gate * torch.sigmoid(gate * self.alpha)).mul_(up + 1)


ExpertsOp = Callable[[Tensor, Routing, ExpertWeights, ExpertActivation], Tensor]
"""x [tokens, hidden] → [tokens, hidden] of x's dtype, new: the sums of weight · expert(x), in fp32."""


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [tokens, hidden], weight [experts, hidden] and bias [experts] fp64 → [tokens, experts] fp32, summed in fp64."""
    return F.linear(x.double(), weight, bias).float()


def choose_experts(logits: Tensor, top_k: int, *, renormalise: bool) -> Routing:
    """A router's logits [tokens, experts] fp32 → the top_k experts of each token, the greatest logit first.

    renormalise: their weights are a softmax over the chosen, and add up to one; else they are of one over all. Of equal
    logits the expert with the lower number wins (torch.topk promises no order); NaN is above all.
    """
    ordered, experts = logits.sort(dim=-1, descending=True, stable=True)
    weights = torch.softmax(ordered[:, :top_k] if renormalise else ordered, dim=-1)[:, :top_k]
    return Routing(experts[:, :top_k], weights)


def mix_experts_reference(x: Tensor, routing: Routing, experts: ExpertWeights, activation: ExpertActivation) -> Tensor:
    """See ExpertsOp: every expert in turn asks which tokens chose it."""
    mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(experts.down.shape[0]):
        tokens, places = (routing.experts == expert).nonzero(as_tuple=True)
        weighted = experts.run(expert, x[tokens], activation).float() * routing.weights[tokens, places, None]
        mixed.index_add_(0, tokens, weighted)
    return mixed.to(x.dtype)


def mix_experts(x: Tensor, routing: Routing, experts: ExpertWeights, activation: ExpertActivation) -> Tensor:
    """See ExpertsOp: places sorted by expert, then one pass over those experts that anybody chose. The host asks who.

    No weight is copied, and beside the output nothing is larger than what one expert's tokens need. A token's outputs
    are added in the order of the experts' numbers, whatever other tokens there are.
    """
    mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    by_expert, order = routing.experts.flatten().sort(stable=True)
    tokens = order // routing.experts.shape[1]
    weights = routing.weights.flatten()[order].unsqueeze(1)
    unused, *counts = torch.bincount(by_expert - NO_EXPERT, minlength=experts.down.shape[0] + 1).tolist()
    begin = unused
    for expert, count in enumerate(counts):
        if count:
            span = slice(begin, begin + count)
            begin += count
            out = experts.run(expert, x[tokens[span]], activation)
            mixed.index_add_(0, tokens[span], out.float() * weights[span])
    return mixed.to(x.dtype)
