"""GLM-4: half of each head rotates, in pairs of neighbours. GLM-4-0414 has norms of the blocks' outputs besides.

ChatGLM, Team GLM 2024.
"""

from __future__ import annotations

from dataclasses import replace

from minisgl_backend.models.family import Family
from minisgl_backend.models.fields import ConfigFields
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.weight_names import WeightNames

_DEFAULTS = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}


def _glm(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    """The output product has no bias, whatever attention_bias says."""
    ropes = tuple(replace(rope, interleaved=True) for rope in spec.ropes)
    return replace(spec, ropes=ropes, qkv_bias=fields.flag("attention_bias"))


GLM = Family(
    architecture="GlmForCausalLM",
    model_type="glm",
    models="GLM-4-9B (the checkpoints named -hf)",
    defaults=_DEFAULTS,
    declare=_glm,
    names=WeightNames(gate_up="mlp.gate_up_proj"),
)

GLM4 = Family(
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    models="GLM-4-0414, GLM-Z1",
    defaults=_DEFAULTS,
    declare=_glm,
    names=WeightNames(
        attention_out_norm="post_self_attn_layernorm",
        mlp_out_norm="post_mlp_layernorm",
        gate_up="mlp.gate_up_proj",
    ),
)
