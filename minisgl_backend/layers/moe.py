"""The sparse MLP: a router picks a few of many experts for each token. Stands where a dense MLP stands (layers/mlp.py).

Shazeer et al. 2017; the softmax router of Mixtral (Jiang et al. 2024), with Qwen's shared expert and gpt-oss's biases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.kernels.interface import Kernels
from minisgl_backend.kernels.moe import NO_EXPERT, ExpertActivation, ExpertsOp, ExpertWeights, Routing
from minisgl_backend.kernels.torch_kernels import TORCH_KERNELS
from minisgl_backend.layers.linear import LinearOp
from minisgl_backend.layers.mlp import Mlp


@dataclass(frozen=True, slots=True)
class Router:
    """A token's logits over the experts → its top_k experts and their weights.

    A choice is a function of the token's own row. Products sum in an order that depends on the size of the batch, so
    logits in fp32 would differ in their last bits, and with them, between two close experts, the choice. These are
    summed in fp64 and rounded to fp32, which is coarser than any order of summing. Equal logits: see `choose_experts`.
    """

    weight: Tensor  # [experts, hidden] fp64
    bias: Tensor | None  # [experts] fp64
    top_k: int
    renormalise: bool  # the chosen weights add up to one: a softmax over the chosen; else they are of one over all
    kernels: Kernels = TORCH_KERNELS

    def __call__(self, x: Tensor, padding: Tensor | None = None) -> Routing:
        """x [tokens, hidden]. padding [tokens] bool: True where a row is no token and must reach no expert."""
        logits = self.kernels.router_logits(x, self.weight, self.bias)
        routing = self.kernels.choose_experts(logits, self.top_k, renormalise=self.renormalise)
        if padding is None:
            return routing
        return Routing(routing.experts.masked_fill(padding[:, None], NO_EXPERT), routing.weights)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP that every token goes through beside those it chose."""

    mlp: Mlp
    switch: LinearOp | None  # out: one logit, how much of the output a token takes; None: all

    def __call__(self, x: Tensor) -> Tensor:
        out = self.mlp(x)
        return out if self.switch is None else torch.sigmoid(self.switch(x)).mul(out)


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """See Mlp. The rows of x are all tokens; a batch that is padded gives `padding`."""

    router: Router
    experts: ExpertWeights
    activation: ExpertActivation
    op: ExpertsOp
    shared: SharedExpert | None = None

    def __call__(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """padding: see Router. A padding row's output is the shared expert's, or zero."""
        mixed = self.op(x, self.router(x, padding), self.experts, self.activation)
        return mixed if self.shared is None else mixed + self.shared(x)
