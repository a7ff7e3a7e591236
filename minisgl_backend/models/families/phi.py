"""Phi-3 and Phi-4: q, k, v in one tensor and gate, up in another; a share of each head rotates, stretched by LongRoPE.

Phi-3 Technical Report, 2024; Phi-4-Mini Technical Report, 2025.
"""

from __future__ import annotations

from minisgl_backend.models.families.mistral import one_window
from minisgl_backend.models.family import Family
from minisgl_backend.models.weight_names import WeightNames

PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    models="Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (text)",
    defaults={
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
    },
    declare=one_window,
    names=WeightNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
)
