"""Mistral: Llama with one window for all layers, or none. Ministral: with a window in some layers.

Mistral 7B, Jiang et al. 2023.
"""

from __future__ import annotations

from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.models.family import Family
from minisgl_backend.models.fields import ConfigFields
from minisgl_backend.models.layer_types import with_windows
from minisgl_backend.models.spec import ModelSpec

_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}


def all_or_none(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    """A window in every layer, unless `sliding_window` is null."""
    return with_windows(fields, spec, lambda _: fields.get("sliding_window") is not None)


def one_window(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    """`all_or_none`, refusing a `layer_types` that says otherwise: transformers' class would not look at it."""
    spec = all_or_none(fields, spec)
    if any(bool(layer.window) != (fields.get("sliding_window") is not None) for layer in spec.layers):
        raise ModelUnsupported(
            f"{fields.place}: layer_types contradicts sliding_window, which {spec.architecture} has in all layers or "
            "in none; as MinistralForCausalLM each layer is what layer_types says"
        )
    return spec


MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    models="Mistral 7B, Nemo, Small (text)",
    defaults=_DEFAULTS,
    declare=one_window,
)

MINISTRAL = Family(
    architecture="MinistralForCausalLM",
    model_type="ministral",
    models="Ministral 8B",
    defaults=_DEFAULTS,
    declare=all_or_none,
)
