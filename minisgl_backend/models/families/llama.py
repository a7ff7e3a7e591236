"""Llama, and those that are Llama but for a field.

LLaMA, Touvron et al. 2023; grouped-query attention, Ainslie et al. 2023.
"""

from __future__ import annotations

from dataclasses import replace

from minisgl_backend.models.family import Family
from minisgl_backend.models.fields import ConfigFields
from minisgl_backend.models.spec import ModelSpec


def _llama(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    """One flag for the biases of q, k, v and o."""
    bias = fields.flag("attention_bias")
    return replace(spec, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))


LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    models="Llama 2 and 3, SmolLM2, Yi, TinyLlama and others of Llama's architecture",
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    },
    declare=_llama,
)
