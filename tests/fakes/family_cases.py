"""A tiny model of every architecture that is served, in every form that its config class can give it.

A new family is one entry here: tests/numeric/test_families.py compares it with transformers, and tests/unit/models
asks for at least one case of each registered architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakes.tiny_model import make_tiny_model

WINDOW = 32


@dataclass(frozen=True, slots=True)
class FamilyCase:
    """fields: of transformers' config class, over `tiny_model.TINY`."""

    architecture: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        return make_tiny_model(folder, self.architecture, **self.fields)


GEMMA: Mapping[str, Any] = {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
    "initializer_range": 0.08,  # embeddings are scaled
}

LONGROPE: Mapping[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.8, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0],
}
"""For heads of 16. Which factors apply is decided by the context limit of 1024: the same for every length, as here."""

QWEN2_MOE: Mapping[str, Any] = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}

QWEN3_MOE: Mapping[str, Any] = {"head_dim": 24, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}

GPT_OSS: Mapping[str, Any] = {
    "head_dim": 16,
    "intermediate_size": 48,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "swiglu_limit": 0.5,  # so low that it clamps many gates
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 16.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}

FAMILY_CASES: Mapping[str, FamilyCase] = {
    "llama": FamilyCase("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "mistral": FamilyCase("MistralForCausalLM", {"sliding_window": None, "head_dim": 24}),
    "mistral_with_windows": FamilyCase("MistralForCausalLM", {"sliding_window": WINDOW}),
    "ministral": FamilyCase("MinistralForCausalLM", {"head_dim": 16, "layer_types": ["full_attention"] * 3}),
    "ministral_with_windows": FamilyCase(
        "MinistralForCausalLM",
        {
            "sliding_window": WINDOW,
            "head_dim": 16,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "qwen2": FamilyCase("Qwen2ForCausalLM"),
    "qwen2_with_unused_windows": FamilyCase("Qwen2ForCausalLM", {"sliding_window": WINDOW, "max_window_layers": 0}),
    "qwen2_with_windows": FamilyCase(
        "Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "qwen3": FamilyCase("Qwen3ForCausalLM", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3_with_biases": FamilyCase("Qwen3ForCausalLM", {"head_dim": 16, "attention_bias": True}),
    "qwen3_with_windows": FamilyCase(
        "Qwen3ForCausalLM",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "olmo2": FamilyCase("Olmo2ForCausalLM"),
    "olmo2_with_biases": FamilyCase("Olmo2ForCausalLM", {"attention_bias": True, "num_key_value_heads": None}),
    "olmo3": FamilyCase("Olmo3ForCausalLM", {"sliding_window": WINDOW, "num_hidden_layers": 4}),
    "olmo3_stretched": FamilyCase(
        "Olmo3ForCausalLM",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "gemma2": FamilyCase(
        "Gemma2ForCausalLM",
        {
            **GEMMA,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,  # so low that they bend most scores
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma2_without_caps": FamilyCase(
        "Gemma2ForCausalLM",
        {
            **GEMMA,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3": FamilyCase("Gemma3ForCausalLM", {**GEMMA, "sliding_window_pattern": 2, "attention_bias": True}),
    "gemma3_with_a_stretched_rope_of_full_attention": FamilyCase(
        "Gemma3ForCausalLM",
        {
            **GEMMA,
            "final_logit_softcapping": 10.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "phi3": FamilyCase("Phi3ForCausalLM"),
    "phi3_with_windows": FamilyCase("Phi3ForCausalLM", {"sliding_window": WINDOW}),
    "phi4_mini": FamilyCase(
        "Phi3ForCausalLM",
        {"tie_word_embeddings": True, "partial_rotary_factor": 0.75, "num_attention_heads": 2},
    ),
    "phi3_with_short_factors": FamilyCase(
        "Phi3ForCausalLM",
        {"original_max_position_embeddings": 1024, "rope_parameters": {**LONGROPE, "factor": 4.0}},
    ),
    "phi3_with_long_factors": FamilyCase(
        "Phi3ForCausalLM", {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE}
    ),
    "glm": FamilyCase("GlmForCausalLM", {"head_dim": 16}),
    "glm4": FamilyCase("Glm4ForCausalLM", {"head_dim": 32}),
    "glm4_without_biases": FamilyCase(
        "Glm4ForCausalLM", {"head_dim": 16, "attention_bias": False, "partial_rotary_factor": 0.25}
    ),
    "smollm3": FamilyCase("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "smollm3_with_windows": FamilyCase(
        "SmolLM3ForCausalLM",
        {
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "qwen2_moe": FamilyCase("Qwen2MoeForCausalLM", QWEN2_MOE),
    "qwen2_moe_with_windows_and_dense_layers": FamilyCase(
        "Qwen2MoeForCausalLM",
        {
            **QWEN2_MOE,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3_moe": FamilyCase("Qwen3MoeForCausalLM", {**QWEN3_MOE, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3_moe_with_windows_and_biases": FamilyCase(
        "Qwen3MoeForCausalLM",
        {**QWEN3_MOE, "attention_bias": True, "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "mixtral": FamilyCase("MixtralForCausalLM", {"intermediate_size": 48, "num_local_experts": 4}),
    "mixtral_with_windows": FamilyCase(
        "MixtralForCausalLM",
        {"intermediate_size": 48, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": WINDOW},
    ),
    "gpt_oss": FamilyCase("GptOssForCausalLM", GPT_OSS),
    "gpt_oss_with_windows_everywhere": FamilyCase(
        "GptOssForCausalLM",
        {**GPT_OSS, "layer_types": ["sliding_attention"] * 3, "attention_bias": False, "swiglu_alpha": 1.2},
    ),
}
