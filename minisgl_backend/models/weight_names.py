"""What a family's checkpoints call their tensors. Pure, no torch.

A name that is empty says that there is no such tensor: which norms there are is what places them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """Names without `.weight` and `.bias`. The defaults are Llama's. Below `layer` they are relative to it."""

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{layer}"

    attention_in_norm: str = "input_layernorm"  # before the attention
    attention_out_norm: str = ""  # of the attention's output, before the residual is added
    mlp_in_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = ""

    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str = ""  # q, k and v stacked in one tensor, instead of the three
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"  # read when the spec has a qk_norm
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"  # a whole name: it has no `.weight`

    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = ""  # gate and up stacked in one tensor, instead of the two
    down: str = "mlp.down_proj"

    router: str = "mlp.gate"
    expert_gate: str = "mlp.experts.{expert}.gate_proj"
    expert_up: str = "mlp.experts.{expert}.up_proj"
    expert_down: str = "mlp.experts.{expert}.down_proj"
    experts_gate_up: str = ""  # of all experts in one tensor, instead of the three an expert; see experts.py
    experts_down: str = ""  # likewise; both are whole names, with `_bias` those of their biases
    shared_gate: str = "mlp.shared_expert.gate_proj"
    shared_up: str = "mlp.shared_expert.up_proj"
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_switch: str = "mlp.shared_expert_gate"  # [1, hidden]: how much of the shared expert a token takes

    unused: tuple[str, ...] = ("model.layers.{layer}.self_attn.rotary_emb.inv_freq",)
    """Tensors that old checkpoints hold and nobody reads; `{layer}` stands for every layer."""
