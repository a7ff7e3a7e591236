"""A model's folder → the decoder with its weights on a device.

Where it stands in the flow: called once by the worker. Names and shapes are checked before anything is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from minisgl_backend.config import Quantization
from minisgl_backend.kernels.activation import GATED_ACTIVATIONS
from minisgl_backend.layers.attention import QkNorms, SelfAttention
from minisgl_backend.layers.mlp import GatedMlp, Mlp
from minisgl_backend.layers.norm import RmsNorm
from minisgl_backend.layers.rotary import RotaryTable, build_rotary_table
from minisgl_backend.models.checkpoint import Checkpoint, TensorSource, check_tensors
from minisgl_backend.models.decoder import Block, Decoder, DecoderLayer
from minisgl_backend.models.experts import build_sparse_mlp
from minisgl_backend.models.files import is_gguf
from minisgl_backend.models.gguf_tensors import GgufTensors
from minisgl_backend.models.quantization import check_quantization
from minisgl_backend.models.registry import FAMILIES
from minisgl_backend.models.rope import RopeSpec
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensors import expected_tensors, unused_tensors
from minisgl_backend.models.weight_names import WeightNames
from minisgl_backend.models.weights import Weights


def load_model(
    spec: ModelSpec,
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    context_tokens: int,
    quantization: Quantization = "none",
) -> Decoder:
    """Maps the weights of a folder or GGUF file and builds the model on the device. Raises ModelUnsupported."""
    return build_decoder(spec, open_source(spec, path), device, dtype, context_tokens, quantization)


def open_source(spec: ModelSpec, path: Path) -> TensorSource:
    """The tensors of a folder or GGUF file, by the names of the spec's family. Raises ModelUnsupported."""
    return GgufTensors(path, spec) if is_gguf(path) else Checkpoint(path)


def build_decoder(
    spec: ModelSpec,
    source: TensorSource,
    device: torch.device,
    dtype: torch.dtype,
    context_tokens: int,
    quantization: Quantization = "none",
) -> Decoder:
    """Checks every tensor's name and shape, then reads them one by one; see Weights.

    context_tokens: the engine's context limit, up to which the rotary tables go; see rope.py for what else it decides.
    Raises ModelUnsupported.
    """
    check_tensors(expected_tensors(spec), source.shapes(), unused_tensors(spec))
    check_quantization(quantization, spec, gguf=isinstance(source, GgufTensors))
    weights = Weights(source, device, dtype, quantization)
    return _Builder(spec, FAMILIES[spec.architecture].names, weights).decoder(context_tokens)


@dataclass(frozen=True, slots=True)
class _Builder:
    spec: ModelSpec
    names: WeightNames
    weights: Weights

    def decoder(self, context_tokens: int) -> Decoder:
        spec, names, device = self.spec, self.names, self.weights.device
        embedding, tied_head = self.weights.embedding(names.embedding, self._embedding_scale())
        return Decoder(
            spec=spec,
            embedding=embedding,
            rotaries=tuple(rotary_table(rope, context_tokens, device) for rope in spec.ropes),
            layers=tuple(self._layer(index) for index in range(spec.num_layers)),
            norm=self._norm(names.final_norm),
            lm_head=tied_head if spec.tie_embeddings else self.weights.head(names.head),
        )

    def _embedding_scale(self) -> float:
        """Rounded as the families round theirs: to the model's dtype."""
        return torch.tensor(self.spec.embedding_scale, dtype=self.weights.dtype).item()

    def _layer(self, index: int) -> DecoderLayer:
        names, at = self.names, self.names.layer.format(layer=index)
        layer = self.spec.layers[index]
        return DecoderLayer(
            layer.rope,
            self._block(at, names.attention_in_norm, names.attention_out_norm),
            self._attention(index, at),
            self._block(at, names.mlp_in_norm, names.mlp_out_norm),
            self._sparse_mlp(at) if layer.sparse else self._mlp(at),
        )

    def _block(self, at: str, before: str, after: str) -> Block:
        return Block(*(self._norm(f"{at}.{name}") if name else None for name in (before, after)))

    def _norm(self, name: str) -> RmsNorm:
        spec = self.spec
        weight = self.weights.tensor(f"{name}.weight", torch.float32 if spec.norm_in_fp32 else None)
        return RmsNorm(weight + spec.norm_offset if spec.norm_offset else weight, spec.rms_norm_eps)

    def _attention(self, index: int, at: str) -> SelfAttention:
        spec, names, weights = self.spec, self.names, self.weights
        parts = (names.qkv,) if names.qkv else (names.q, names.k, names.v)
        norms = None
        if spec.qk_norm != "none":
            q_norm, k_norm = self._norm(f"{at}.{names.q_norm}"), self._norm(f"{at}.{names.k_norm}")
            norms = QkNorms(q_norm, k_norm, each_head=spec.qk_norm == "head")
        return SelfAttention(
            layer=index,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            qkv=weights.linear([f"{at}.{part}" for part in parts], bias=spec.qkv_bias),
            o=weights.linear([f"{at}.{names.o}"], bias=spec.output_bias),
            norms=norms,
            sinks=weights.tensor(f"{at}.{names.sinks}") if spec.attention_sinks else None,
        )

    def _mlp(self, at: str) -> Mlp:
        spec, names = self.spec, self.names
        parts = (names.gate_up,) if names.gate_up else (names.gate, names.up)
        return GatedMlp(
            self.weights.linear([f"{at}.{part}" for part in parts], bias=spec.mlp_bias),
            self.weights.linear([f"{at}.{names.down}"], bias=spec.mlp_bias),
            GATED_ACTIVATIONS[spec.activation],
        )

    def _sparse_mlp(self, at: str) -> Mlp:
        assert self.spec.moe is not None, "a sparse layer without experts"
        return build_sparse_mlp(self.spec.moe, self.spec, self.names, self.weights, at)


def rotary_table(rope: RopeSpec, context_tokens: int, device: torch.device) -> RotaryTable:
    """Of an engine with that context limit, for all layers that rotate so."""
    return build_rotary_table(
        rope.frequencies(context_tokens),
        context_tokens,
        device,
        attention_factor=rope.attention_factor,
        interleaved=rope.interleaved,
    )
