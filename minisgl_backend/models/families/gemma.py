"""Gemma 2 and 3, text: norms around both blocks that multiply by 1 + weight, scaled embeddings, windows in most layers.

Gemma 2, Gemma Team 2024; Gemma 3 Technical Report, 2025.
"""

from __future__ import annotations

from dataclasses import replace

from minisgl_backend.models.family import Family
from minisgl_backend.models.fields import ConfigFields
from minisgl_backend.models.layer_types import with_local_ropes, with_windows
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.weight_names import WeightNames

_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

_NAMES = WeightNames(
    attention_out_norm="post_attention_layernorm",
    mlp_in_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)


def _gemma(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    fields.refuse("use_bidirectional_attention", "tokens that see later ones can not be cached")
    bias = fields.flag("attention_bias")
    return replace(
        spec,
        qkv_bias=bias,
        output_bias=bias,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        norm_offset=1.0,
        norm_in_fp32=True,
        embedding_scale=spec.hidden_size**0.5,
        final_softcap=fields.number_or_none("final_logit_softcapping") or 0.0,
    )


def _gemma2(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    """Every other layer has the window, beginning with the first."""
    spec = with_windows(fields, _gemma(fields, spec), lambda layer: layer % 2 == 0)
    return replace(spec, attention_softcap=fields.number_or_none("attn_logit_softcapping") or 0.0)


def _gemma3(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    """All layers but each sliding_window_pattern-th have the window, and rotate by frequencies of their own."""
    fields.refuse("attn_logit_softcapping", "Gemma 3 has norms of q and k instead")
    pattern = fields.positive("sliding_window_pattern")
    spec = with_windows(fields, _gemma(fields, spec), lambda layer: (layer + 1) % pattern != 0)
    return replace(with_local_ropes(spec), qk_norm="head")


GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    models="Gemma 2",
    defaults={
        **_DEFAULTS,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    declare=_gemma2,
    names=_NAMES,
)

GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    models="Gemma 3, text (1B, 270M and text models of the others)",
    defaults={
        **_DEFAULTS,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
    },
    declare=_gemma3,
    names=_NAMES,
)
