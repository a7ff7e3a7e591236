"""The tensors of a sparse MLP → its layer, the experts stacked one by one.

Where it stands in the flow: called by load.py for each sparse layer. Beside the stack there is never more than one
tensor of the source, and that is mapped, not copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl_backend.kernels.moe import ExpertActivation, ExpertWeights
from minisgl_backend.layers.mlp import GatedMlp
from minisgl_backend.layers.moe import Router, SharedExpert, SparseMlp
from minisgl_backend.models.spec import ModelSpec, MoeSpec
from minisgl_backend.models.weight_names import WeightNames
from minisgl_backend.models.weights import Weights


def build_sparse_mlp(moe: MoeSpec, spec: ModelSpec, names: WeightNames, weights: Weights, at: str) -> SparseMlp:
    """The MLP of the layer whose names begin with `at`. Experts are not quantised (quantization.py)."""
    stack = _Stack(moe, spec.hidden_size, weights)
    return SparseMlp(
        _router(moe, names, weights, at),
        stack.from_one_each(names, at) if not names.experts_gate_up else stack.from_stacked(names, at),
        _activation(moe, spec),
        weights.kernels.mix_experts,
        _shared(moe, spec, names, weights, at),
    )


def _router(moe: MoeSpec, names: WeightNames, weights: Weights, at: str) -> Router:
    wide = torch.float64
    weight = weights.tensor(f"{at}.{names.router}.weight", wide)
    bias = weights.tensor(f"{at}.{names.router}.bias", wide) if moe.biases else None
    return Router(weight, bias, moe.top_k, moe.renormalise, weights.kernels)


def _activation(moe: MoeSpec, spec: ModelSpec) -> ExpertActivation:
    if moe.swiglu_alpha:
        return ExpertActivation("clamped_swiglu", moe.swiglu_alpha, moe.swiglu_limit)
    return ExpertActivation(spec.activation)


def _shared(moe: MoeSpec, spec: ModelSpec, names: WeightNames, weights: Weights, at: str) -> SharedExpert | None:
    if not moe.shared_intermediate_size:
        return None
    mlp = GatedMlp(
        weights.linear([f"{at}.{names.shared_gate}", f"{at}.{names.shared_up}"], bias=False),
        weights.linear([f"{at}.{names.shared_down}"], bias=False),
        weights.kernels.gated(spec.activation),
    )
    switch = weights.plain_linear([f"{at}.{names.shared_switch}"], bias=False) if moe.shared_gate else None
    return SharedExpert(mlp, switch)


class _Stack:
    """Room for the experts of one layer, to be filled."""

    def __init__(self, moe: MoeSpec, hidden: int, weights: Weights) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty((moe.num_experts, *shape), dtype=weights.dtype, device=weights.device)

        inner = moe.intermediate_size
        self._weights = weights
        self._experts = ExpertWeights(
            empty(2 * inner, hidden),
            empty(hidden, inner),
            empty(2 * inner) if moe.biases else None,
            empty(hidden) if moe.biases else None,
        )

    def from_one_each(self, names: WeightNames, at: str) -> ExpertWeights:
        """Three tensors an expert, [out, in] as in every linear layer."""
        into = self._experts
        pairs = ((into.gate_up, into.down, "weight"), (into.gate_up_bias, into.down_bias, "bias"))
        for gate_up, down, kind in pairs:
            if gate_up is None or down is None:
                continue
            for expert in range(len(down)):
                gate, up = gate_up[expert].chunk(2)
                for target, name in (
                    (gate, names.expert_gate),
                    (up, names.expert_up),
                    (down[expert], names.expert_down),
                ):
                    target.copy_(self._weights.read(f"{at}.{name.format(expert=expert)}.{kind}"))
        return into

    def from_stacked(self, names: WeightNames, at: str) -> ExpertWeights:
        """gpt-oss: two tensors for all experts, [experts, in, out], with the columns of gate and up taking turns."""
        into, read = self._experts, self._weights.read
        gate_up, down = read(f"{at}.{names.experts_gate_up}"), read(f"{at}.{names.experts_down}")
        for expert in range(len(down)):
            gate, up = into.gate_up[expert].chunk(2)
            gate.copy_(gate_up[expert, :, 0::2].T)
            up.copy_(gate_up[expert, :, 1::2].T)
            into.down[expert].copy_(down[expert].T)
        if into.gate_up_bias is not None and into.down_bias is not None:
            bias = read(f"{at}.{names.experts_gate_up}_bias")
            into.gate_up_bias.copy_(torch.cat((bias[:, 0::2], bias[:, 1::2]), dim=1))
            into.down_bias.copy_(read(f"{at}.{names.experts_down}_bias"))
        return into
