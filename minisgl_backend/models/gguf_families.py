"""What llama.cpp calls the parts of a model, a declaration for each of its architectures that we run. Pure, no torch.

    metadata ──► gguf_config.py ──► config.json ──► folder.py ──► ModelSpec
    names of tensors: the declaration's beside those of our family (`tensors.expected_tensors`), in the same order

A file whose architecture is not here is refused by name. Sources: the converters of llama.cpp (`conversion/*.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from minisgl_backend.models.weight_names import WeightNames


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """One value of `general.architecture`."""

    architecture: str  # as in `architectures` of config.json: a key of registry.FAMILIES
    names: WeightNames
    fields: Mapping[str, str] = field(default_factory=dict)  # more of config.json → key of the metadata
    constants: Mapping[str, object] = field(default_factory=dict)  # of config.json, which the metadata leaves out
    rotary_pairs: bool = False  # rows of q and k stand in pairs that rotate together, not half a head apart
    norm_shift: float = 0.0  # the converter has added it to every norm
    scaled_by_width: int = 0  # layers of the one model whose scores are divided by the root of hidden size / heads


_LLAMA_NAMES = WeightNames(
    embedding="token_embd",
    final_norm="output_norm",
    head="output",
    layer="blk.{layer}",
    attention_in_norm="attn_norm",
    mlp_in_norm="ffn_norm",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    o="attn_output",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    sinks="attn_sinks.weight",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    router="ffn_gate_inp",
    expert_gate="ffn_gate_exps.{expert}",  # one tensor of three dimensions: gguf_tensors.py takes it apart
    expert_up="ffn_up_exps.{expert}",
    expert_down="ffn_down_exps.{expert}",
    shared_gate="ffn_gate_shexp",
    shared_up="ffn_up_shexp",
    shared_down="ffn_down_shexp",
    shared_switch="ffn_gate_inp_shexp",
    unused=(),
)
_GEMMA_NAMES = replace(_LLAMA_NAMES, attention_out_norm="post_attention_norm", mlp_out_norm="post_ffw_norm")
_OLMO_NAMES = replace(_GEMMA_NAMES, attention_in_norm="", mlp_in_norm="")
_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}

GGUF_FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily(architecture="LlamaForCausalLM", names=_LLAMA_NAMES, rotary_pairs=True),
    "qwen2": GgufFamily(architecture="Qwen2ForCausalLM", names=_LLAMA_NAMES),
    "qwen3": GgufFamily(architecture="Qwen3ForCausalLM", names=_LLAMA_NAMES),
    "gemma2": GgufFamily(
        architecture="Gemma2ForCausalLM",
        names=_GEMMA_NAMES,
        fields={
            "sliding_window": "attention.sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        constants={"hidden_activation": "gelu_pytorch_tanh"},
        norm_shift=1.0,
        scaled_by_width=46,  # 27B
    ),
    "gemma3": GgufFamily(
        architecture="Gemma3ForCausalLM",
        names=_GEMMA_NAMES,
        fields={
            "sliding_window": "attention.sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        constants={"hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": 10000.0},
        norm_shift=1.0,
        scaled_by_width=62,  # 27B
    ),
    "olmo2": GgufFamily(architecture="Olmo2ForCausalLM", names=_OLMO_NAMES),
    "qwen3moe": GgufFamily(
        architecture="Qwen3MoeForCausalLM",
        names=_LLAMA_NAMES,
        fields=_EXPERTS,
        constants={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
}
"""`general.architecture` → its declaration."""
