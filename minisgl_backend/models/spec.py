"""What a model is: its shape, and where it differs from Llama. Pure, no torch.

Where it stands in the flow: made once by `folder.py` out of a model's folder, read by whoever needs the shape, the
context limit or the end tokens (text actor, scheduler's start-up, worker), and by the one decoder of `decoder.py`,
which has no other source of what to compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minisgl_backend.models.rope import RopeSpec

Activation = Literal["silu", "gelu_tanh"]
QkNorm = Literal["none", "head", "all"]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer does differently from its neighbours."""

    window: int = 0  # positions a token attends to, itself among them; 0: all before it
    rope: int | None = 0  # place in ModelSpec.ropes; None: this layer does not rotate
    sparse: bool = False  # experts (ModelSpec.moe) instead of the dense MLP


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A sparse MLP: a router picks top_k of num_experts gated MLPs for each token."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert
    renormalise: bool  # the chosen experts' weights add up to one; else they are those of the softmax over all
    shared_intermediate_size: int = 0  # of an expert that every token goes through; 0: there is none
    shared_gate: bool = False  # the shared expert's output times a sigmoid of its own of the input
    biases: bool = False  # router and experts have biases
    swiglu_alpha: float = 0.0  # gpt-oss: (up + 1) · gate · sigmoid(alpha · gate); 0: the model's activation
    swiglu_limit: float = 0.0  # gpt-oss: gate is clamped from above, up from both sides; 0: not clamped


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shape, differences and ends of one model. Field names are ours, values are the checkpoint's.

    The defaults are Llama's.
    """

    architecture: str  # a key of registry.FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the dense MLP
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_tokens: int  # prompt + output the model was made for
    tie_embeddings: bool  # the LM head is the embedding
    layers: tuple[LayerSpec, ...]  # num_layers of them
    ropes: tuple[RopeSpec, ...]
    dtype: str  # of the checkpoint: "float32", "float16" or "bfloat16"
    eos_token_ids: tuple[int, ...]  # sorted union of config.json and generation_config.json; may be empty

    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output product
    mlp_bias: bool = False  # gate, up and down have one
    activation: Activation = "silu"
    qk_norm: QkNorm = "none"  # RMS norm of q and k before they rotate: of each head, or over all heads at once
    attention_scale: float  # of q · k before the softmax
    attention_softcap: float = 0.0  # scores become cap · tanh(score / cap); 0: they stay
    attention_sinks: bool = False  # a learned logit a head that takes part in the softmax and has no value
    norm_offset: float = 0.0  # norms multiply by offset + weight
    norm_in_fp32: bool = False  # norms multiply before they round to the model's dtype, not after
    embedding_scale: float = 1.0
    final_softcap: float = 0.0  # of the logits, as attention_softcap
    moe: MoeSpec | None = None
