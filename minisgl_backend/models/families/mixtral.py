"""Mixtral: Mistral with experts in every layer. Jiang et al. 2024."""

from __future__ import annotations

from dataclasses import replace

from minisgl_backend.models.families.mistral import one_window
from minisgl_backend.models.family import MOST_EXPERTS, Family
from minisgl_backend.models.fields import ConfigFields
from minisgl_backend.models.spec import ModelSpec, MoeSpec
from minisgl_backend.models.weight_names import WeightNames


def _mixtral(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    num_experts = fields.positive("num_local_experts", at_most=MOST_EXPERTS)
    moe = MoeSpec(
        num_experts=num_experts,
        top_k=fields.positive("num_experts_per_tok", at_most=num_experts),
        intermediate_size=spec.intermediate_size,
        renormalise=True,
    )
    spec = one_window(fields, spec)
    return replace(spec, moe=moe, layers=tuple(replace(layer, sparse=True) for layer in spec.layers))


MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    models="Mixtral 8x7B and 8x22B",
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    declare=_mixtral,
    names=WeightNames(
        router="block_sparse_moe.gate",
        expert_gate="block_sparse_moe.experts.{expert}.w1",
        expert_up="block_sparse_moe.experts.{expert}.w3",
        expert_down="block_sparse_moe.experts.{expert}.w2",
    ),
)
