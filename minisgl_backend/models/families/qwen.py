"""Qwen2: biases of q, k and v. Qwen3: norms of each head of q and k instead. Both may have windows from a layer on.

Qwen2 Technical Report, 2024; Qwen3 Technical Report, 2025.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.models.family import Family
from minisgl_backend.models.fields import ConfigFields
from minisgl_backend.models.layer_types import with_windows
from minisgl_backend.models.spec import ModelSpec

_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def with_qwen_windows(fields: ConfigFields, spec: ModelSpec, slides: Callable[[int], bool]) -> ModelSpec:
    """`with_windows`, only where `use_sliding_window` says so."""
    uses = fields.flag("use_sliding_window")
    given = uses and fields.get("sliding_window") is not None
    spec = with_windows(fields, spec, lambda layer: given and slides(layer))
    if not uses and any(layer.window for layer in spec.layers):
        raise ModelUnsupported(f"{fields.place}: layer_types has windows, but use_sliding_window is false")
    return spec


def _with_late_windows(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    """In the layers from a certain one on."""
    first = fields.whole("max_window_layers")
    return with_qwen_windows(fields, spec, lambda layer: layer >= first)


def _qwen2(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    return replace(_with_late_windows(fields, spec), qkv_bias=True)


def _qwen3(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    bias = fields.flag("attention_bias")
    return replace(_with_late_windows(fields, spec), qkv_bias=bias, output_bias=bias, qk_norm="head")


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    models="Qwen2, Qwen2.5, QwQ and what was made of them",
    defaults=_DEFAULTS,
    declare=_qwen2,
)

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    models="Qwen3, dense",
    defaults={**_DEFAULTS, "head_dim": 128},
    declare=_qwen3,
)
