"""Qwen's mixtures of experts: Qwen2's and Qwen3's attention, and experts in most layers.

Qwen1.5-MoE and Qwen2 (Technical Report, 2024) have a shared expert that each token takes a part of; Qwen3 (2025) none.
"""

from __future__ import annotations

from dataclasses import replace

from minisgl_backend.models.families.mistral import one_window
from minisgl_backend.models.families.qwen import with_qwen_windows
from minisgl_backend.models.family import MOST_EXPERTS, Family
from minisgl_backend.models.fields import ConfigFields
from minisgl_backend.models.spec import ModelSpec, MoeSpec

_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
}


def _with_experts(fields: ConfigFields, spec: ModelSpec, key: str) -> ModelSpec:
    """Experts in every decoder_sparse_step-th layer but those of mlp_only_layers; `key` says how many."""
    num_experts = fields.positive(key, at_most=MOST_EXPERTS)
    step, dense = fields.positive("decoder_sparse_step"), fields.wholes("mlp_only_layers") or ()
    moe = MoeSpec(
        num_experts=num_experts,
        top_k=fields.positive("num_experts_per_tok", at_most=num_experts),
        intermediate_size=fields.positive("moe_intermediate_size"),
        renormalise=fields.flag("norm_topk_prob"),
    )
    layers = (
        replace(layer, sparse=index not in dense and (index + 1) % step == 0) for index, layer in enumerate(spec.layers)
    )
    return replace(spec, moe=moe, layers=tuple(layers))


def _qwen2_moe(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    end = fields.whole("max_window_layers")
    spec = with_qwen_windows(fields, spec, lambda layer: layer < end and layer % 2 == 0)
    spec = _with_experts(fields, spec, "num_experts")
    assert spec.moe is not None
    shared = fields.positive("shared_expert_intermediate_size")
    moe = replace(spec.moe, shared_intermediate_size=shared, shared_gate=True)
    return replace(spec, moe=moe, qkv_bias=fields.flag("qkv_bias"))


def _qwen3_moe(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    """The number of experts has two names: transformers 5 writes the other one."""
    bias = fields.flag("attention_bias")
    spec = one_window(fields, spec) if fields.flag("use_sliding_window") else spec
    spec = _with_experts(
        fields, spec, "num_experts" if fields.get("num_local_experts") is None else "num_local_experts"
    )
    return replace(spec, qkv_bias=bias, output_bias=bias, qk_norm="head")


QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    models="Qwen1.5-MoE and Qwen2 with experts",
    defaults={
        **_DEFAULTS,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_window_layers": 28,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "qkv_bias": True,
    },
    declare=_qwen2_moe,
)

QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    models="Qwen3 with experts, also Coder",
    defaults={
        **_DEFAULTS,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    declare=_qwen3_moe,
)
