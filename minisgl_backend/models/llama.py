"""LlamaForCausalLM: Llama 2 and 3, SmolLM2 and others of the same architecture.

LLaMA, Touvron et al. 2023; grouped-query attention, Ainslie et al. 2023. Tensor names are those of Hugging Face.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.attention.interface import StepAttention
from minisgl_backend.layers.attention import SelfAttention
from minisgl_backend.layers.embedding import Embedding
from minisgl_backend.layers.linear import Linear
from minisgl_backend.layers.mlp import GatedMlp
from minisgl_backend.layers.norm import RmsNorm
from minisgl_backend.layers.rotary import RotaryTable, build_rotary_table
from minisgl_backend.models.checkpoint import TensorSource, check_tensors
from minisgl_backend.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One block: attention and MLP, each behind a norm and around a residual."""

    attention_norm: RmsNorm
    attention: SelfAttention
    mlp_norm: RmsNorm
    mlp: GatedMlp

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: StepAttention) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, attention)
        return x + self.mlp(self.mlp_norm(x))


@dataclass(frozen=True, slots=True)
class LlamaModel:
    """See Model."""

    spec: ModelSpec
    embedding: Embedding
    rotary: RotaryTable
    layers: tuple[LlamaLayer, ...]
    norm: RmsNorm
    lm_head: Linear

    def forward(self, tokens: Tensor, positions: Tensor, attention: StepAttention, sampled: Tensor) -> Tensor:
        """See Model."""
        return self.head(self.hidden(tokens, positions, attention)[sampled])

    def hidden(self, tokens: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """See Model."""
        x = self.embedding(tokens)
        cos, sin = self.rotary.at(positions)
        for layer in self.layers:
            x = layer(x, cos, sin, attention)
        return x

    def head(self, hidden: Tensor) -> Tensor:
        """See Model."""
        return self.lm_head(self.norm(hidden))


def load_llama(
    spec: ModelSpec, source: TensorSource, device: torch.device, dtype: torch.dtype, context_tokens: int
) -> LlamaModel:
    """Checks every tensor's name and shape, then reads them one by one.

    A tensor that has the wanted dtype on the CPU stays a view of its file; any other is converted alone, so at most
    one tensor exists twice. context_tokens: positions the rotary table covers. Raises ModelUnsupported.
    """
    check_tensors(llama_tensors(spec), source.shapes(), _unused_tensors(spec))

    def take(name: str) -> Tensor:
        return source.read(name).to(device=device, dtype=dtype)

    def linear(name: str, bias: bool) -> Linear:
        return Linear(take(f"{name}.weight"), take(f"{name}.bias") if bias else None)

    def layer(index: int) -> LlamaLayer:
        at = f"model.layers.{index}"
        q, k, v, o = (linear(f"{at}.self_attn.{part}_proj", spec.attention_bias) for part in "qkvo")
        gate, up, down = (linear(f"{at}.mlp.{part}_proj", spec.mlp_bias) for part in ("gate", "up", "down"))
        return LlamaLayer(
            RmsNorm(take(f"{at}.input_layernorm.weight"), spec.rms_norm_eps),
            SelfAttention(index, spec.head_dim, q, k, v, o),
            RmsNorm(take(f"{at}.post_attention_layernorm.weight"), spec.rms_norm_eps),
            GatedMlp(gate, up, down),
        )

    embedding = Embedding(take("model.embed_tokens.weight"))
    return LlamaModel(
        spec=spec,
        embedding=embedding,
        rotary=build_rotary_table(spec.rope.frequencies(spec.head_dim), context_tokens, device),
        layers=tuple(layer(index) for index in range(spec.num_layers)),
        norm=RmsNorm(take("model.norm.weight"), spec.rms_norm_eps),
        lm_head=Linear(embedding.weight) if spec.tie_embeddings else linear("lm_head", bias=False),
    )


def llama_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor a checkpoint of this spec must hold."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    matrices = {
        "self_attn.q_proj": (q_size, hidden, spec.attention_bias),
        "self_attn.k_proj": (kv_size, hidden, spec.attention_bias),
        "self_attn.v_proj": (kv_size, hidden, spec.attention_bias),
        "self_attn.o_proj": (hidden, q_size, spec.attention_bias),
        "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
        "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for index in range(spec.num_layers):
        at = f"model.layers.{index}"
        shapes[f"{at}.input_layernorm.weight"] = (hidden,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, bias) in matrices.items():
            shapes[f"{at}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{at}.{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def _unused_tensors(spec: ModelSpec) -> list[str]:
    """A tied LM head stored a second time, and the rotary buffers of early Llama checkpoints (we compute our own)."""
    buffers = [f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(spec.num_layers)]
    return [*buffers, "lm_head.weight"] if spec.tie_embeddings else buffers
