"""OLMo 2: norms after the blocks instead of before them, and of all heads of q or k at once.

2 OLMo 2 Furious, Team OLMo 2025.
"""

from __future__ import annotations

from dataclasses import replace

from minisgl_backend.models.family import Family
from minisgl_backend.models.fields import ConfigFields
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.weight_names import WeightNames


def _olmo2(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    bias = fields.flag("attention_bias")
    return replace(spec, qkv_bias=bias, output_bias=bias, qk_norm="all", norm_in_fp32=True)


OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    models="OLMo 2",
    defaults={
        "vocab_size": 50304,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
    declare=_olmo2,
    names=WeightNames(
        attention_in_norm="",
        attention_out_norm="post_attention_layernorm",
        mlp_in_norm="",
        mlp_out_norm="post_feedforward_layernorm",
    ),
)
