"""OLMo 2 and 3: norms after the blocks instead of before them, and of all heads of q or k at once. OLMo 3 has windows.

2 OLMo 2 Furious, Team OLMo 2025; Olmo 3, Team OLMo 2025.
"""

from __future__ import annotations

from dataclasses import replace

from minisgl_backend.models.family import Family
from minisgl_backend.models.fields import ConfigFields
from minisgl_backend.models.layer_types import with_local_ropes, with_windows
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.weight_names import WeightNames

_DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}

_NAMES = WeightNames(
    attention_in_norm="",
    attention_out_norm="post_attention_layernorm",
    mlp_in_norm="",
    mlp_out_norm="post_feedforward_layernorm",
)


def _olmo2(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    bias = fields.flag("attention_bias")
    return replace(spec, qkv_bias=bias, output_bias=bias, qk_norm="all", norm_in_fp32=True)


def _olmo3(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    """Three of four layers have the window, and are never stretched."""
    return with_local_ropes(with_windows(fields, _olmo2(fields, spec), lambda layer: (layer + 1) % 4 != 0))


OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    models="OLMo 2",
    defaults=_DEFAULTS,
    declare=_olmo2,
    names=_NAMES,
)

OLMO3 = Family(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    models="OLMo 3",
    defaults={**_DEFAULTS, "rope_theta": 500000.0, "rope_local_base_freq": 500000.0, "sliding_window": 4096},
    declare=_olmo3,
    names=_NAMES,
)
