"""The experts of a sparse MLP against the reference in fp32."""

from __future__ import annotations

import torch

from fakes.experts import random_experts, random_routing, random_tokens
from minisgl_backend.kernels.gpu.moe import mix_experts_triton
from minisgl_backend.kernels.moe import (
    NO_EXPERT,
    ExpertActivation,
    ExpertWeights,
    Routing,
    mix_experts_reference,
)
from tests.gpu.checks import ROUNDING, Found, Place, Report, compare

ACTIVATIONS = (ExpertActivation("silu"), ExpertActivation("clamped_swiglu", alpha=1.702, limit=7.0))


def run(report: Report, place: Place) -> None:
    sizes = place.pick([(1, 64, 8, 768, 512), (100, 20, 4, 200, 120), (3000, 32, 4, 512, 384)], [(5, 6, 2, 40, 24)])
    for dtype in place.dtypes:
        for size in sizes:
            for activation in ACTIVATIONS:
                name = f"experts {size} {activation.kind} {str(dtype).removeprefix('torch.')}"
                report.check(name, _Case(place, dtype, activation, *size).check)


class _Case:
    def __init__(
        self,
        place: Place,
        dtype: torch.dtype,
        activation: ExpertActivation,
        tokens: int,
        experts: int,
        top_k: int,
        hidden: int,
        inner: int,
    ) -> None:
        self.place, self.dtype, self.activation = place, dtype, activation
        self.sizes = tokens, experts, top_k, hidden, inner

    def check(self) -> Found:
        """One row in three has no expert."""
        tokens, experts, top_k, hidden, inner = self.sizes
        weights = random_experts(experts, hidden, inner, biases=self.activation.alpha > 0, dtype=self.dtype)
        x, routing = random_tokens(tokens, hidden, self.dtype), random_routing(tokens, experts, top_k)
        routing.experts[1::3] = NO_EXPERT
        wide = ExpertWeights(*(None if w is None else w.float() for w in _parts(weights)))  # type: ignore[arg-type]
        expected = mix_experts_reference(x.float(), routing, wide, self.activation)
        to = self.place.device
        got = mix_experts_triton(
            x.to(to),
            Routing(routing.experts.to(to), routing.weights.to(to)),
            ExpertWeights(*(None if w is None else w.to(to) for w in _parts(weights))),  # type: ignore[arg-type]
            self.activation,
        )
        tolerance = 4 * ROUNDING[self.dtype]
        return compare(got, expected, rms=tolerance, most=20 * tolerance)


def _parts(weights: ExpertWeights) -> tuple[torch.Tensor | None, ...]:
    return weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias
