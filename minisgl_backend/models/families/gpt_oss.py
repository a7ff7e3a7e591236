"""gpt-oss: experts in every layer, sinks in every head's softmax, a window in every other layer. OpenAI 2025.

The hub's checkpoints are packed as MXFP4 and say so in `quantization_config`, for which folder.py refuses them.
"""

from __future__ import annotations

from dataclasses import replace

from minisgl_backend.models.family import MOST_EXPERTS, Family
from minisgl_backend.models.fields import ConfigFields
from minisgl_backend.models.layer_types import with_windows
from minisgl_backend.models.spec import ModelSpec, MoeSpec
from minisgl_backend.models.weight_names import WeightNames


def _gpt_oss(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    bias = fields.flag("attention_bias")
    num_experts = fields.positive("num_local_experts", at_most=MOST_EXPERTS)
    moe = MoeSpec(
        num_experts=num_experts,
        top_k=fields.positive("num_experts_per_tok", at_most=num_experts),
        intermediate_size=spec.intermediate_size,
        renormalise=True,
        biases=True,
        swiglu_alpha=fields.number("swiglu_alpha"),
        swiglu_limit=fields.number("swiglu_limit"),
    )
    spec = with_windows(fields, spec, lambda layer: layer % 2 == 0)
    return replace(
        spec,
        moe=moe,
        layers=tuple(replace(layer, sparse=True) for layer in spec.layers),
        qkv_bias=bias,
        output_bias=bias,
        attention_sinks=True,
        norm_in_fp32=True,
    )


GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    models="gpt-oss in bf16, not in MXFP4",
    defaults={
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    declare=_gpt_oss,
    names=WeightNames(
        router="mlp.router",
        experts_gate_up="mlp.experts.gate_up_proj",
        experts_down="mlp.experts.down_proj",
    ),
)
