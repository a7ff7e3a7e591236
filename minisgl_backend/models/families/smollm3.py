"""SmolLM3: Llama in which every fourth layer does not rotate (NoPE; RoPE to NoPE and Back Again, Yang et al. 2025)."""

from __future__ import annotations

from dataclasses import replace

from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.models.family import Family
from minisgl_backend.models.fields import ConfigFields
from minisgl_backend.models.layer_types import with_windows
from minisgl_backend.models.spec import ModelSpec


def _smollm3(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    """no_rope_layers has a 1 for each layer that does rotate. Windows, if any, are in those that do not."""
    interval = fields.positive("no_rope_layer_interval")
    rotates = fields.flags("no_rope_layers")
    if rotates is None:
        rotates = tuple((layer + 1) % interval != 0 for layer in range(spec.num_layers))
    if len(rotates) != spec.num_layers:
        raise ModelUnsupported(
            f"{fields.place}: no_rope_layers has {len(rotates)} entries, num_hidden_layers is {spec.num_layers}"
        )
    layers = tuple(replace(layer, rope=0 if turns else None) for layer, turns in zip(spec.layers, rotates, strict=True))
    slides = fields.flag("use_sliding_window") and fields.get("sliding_window") is not None
    spec = with_windows(fields, replace(spec, layers=layers), lambda layer: slides and not rotates[layer])
    bias = fields.flag("attention_bias")
    return replace(spec, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    models="SmolLM3",
    defaults={
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    declare=_smollm3,
)
