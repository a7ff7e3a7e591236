"""Models without files, in the shapes that a GPU is measured with: their weights are made where they are used.

On `meta` they have shapes and no memory: a step over them launches what it would launch on a GPU and computes nothing
(tests/gpu/launches.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minisgl_backend.attention.gpu_backend import GpuAttention
from minisgl_backend.attention.interface import AttentionVariant
from minisgl_backend.attention.step_metadata import Ints
from minisgl_backend.attention.triton_phases import TritonChunks, TritonDecode
from minisgl_backend.config import Quantization
from minisgl_backend.kernels.gpu.kernels import TritonKernels
from minisgl_backend.kvpool.paged import PagedKvPool
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.folder import parse_model_spec
from minisgl_backend.models.load import build_decoder
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensors import expected_tensors

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 500,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
    "tiny-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 500,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
}
"""config.json of the published checkpoints, as far as it shapes the model; the tiny ones are ours, to run dry."""


def spec_of(config: Mapping[str, Any], layers: int = 0) -> ModelSpec:
    """layers: how many of the first ones are kept; 0: all."""
    spec = parse_model_spec(dict(config), {})
    return replace(spec, num_layers=layers, layers=spec.layers[:layers]) if layers else spec


class DeviceRandom:
    """A TensorSource of random weights that are made on the device: gigabytes in seconds. See RandomTensors."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self._shapes = dict(expected_tensors(spec))
        self._places = {name: place for place, name in enumerate(self._shapes)}
        self._device = device
        self._dtype = dtype
        self._seed = seed

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        values = torch.empty(shape, dtype=self._dtype, device=self._device)
        if self._device.type == "meta":
            return values
        generator = torch.Generator(self._device).manual_seed(self._seed * 1_000_003 + self._places[name])
        if len(shape) > 1:  # activations keep their size through the layers
            return values.normal_(0.0, shape[-1] ** -0.5, generator=generator)
        return values.normal_(1.0, 0.1, generator=generator)


def triton_attention(pool: PagedKvPool, variants: Sequence[AttentionVariant], heads: int) -> GpuAttention:
    """Both phases by our own kernels. Arrays go to the pool's device one by one, and the host waits for each."""
    device = pool.layer(0)[0].device

    def upload(arrays: Sequence[Ints]) -> list[Tensor]:
        return [torch.from_numpy(array).to(device) for array in arrays]

    chunks, decode = TritonChunks(pool, variants, heads), TritonDecode(pool, variants)
    return GpuAttention(pool, variants, chunks=chunks, decode=decode, upload=upload)


def build_model(
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    context_tokens: int,
    quantization: Quantization = "none",
) -> Decoder:
    """With random weights and our Triton kernels."""
    source = DeviceRandom(spec, device, dtype)
    return build_decoder(spec, source, device, dtype, context_tokens, quantization, TritonKernels())
