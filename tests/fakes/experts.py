"""Random experts and routings, for tests of the expert kernels."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.moe import ExpertWeights, Routing


def random_experts(
    num_experts: int, hidden: int, inner: int, *, biases: bool = False, dtype: torch.dtype = torch.float32
) -> ExpertWeights:
    """Weights with which outputs are about as large as inputs. Always the same."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(num_experts, *shape, generator=generator) * std).to(dtype)

    return ExpertWeights(
        normal(2 * inner, hidden, std=hidden**-0.5),
        normal(hidden, inner, std=inner**-0.5),
        normal(2 * inner, std=0.5) if biases else None,
        normal(hidden, std=0.5) if biases else None,
    )


def random_tokens(tokens: int, hidden: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)


def random_routing(tokens: int, num_experts: int, top_k: int) -> Routing:
    """Each token's experts differ; weights are positive."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(tokens, num_experts, generator=generator)
    return Routing(scores.argsort(dim=-1)[:, :top_k].contiguous(), torch.rand(tokens, top_k, generator=generator))
