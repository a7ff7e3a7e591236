"""Runs a model over one sequence without runner or scheduler: logits of every position, in any chunking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.attention.interface import AttentionBackend, AttentionVariant, StepRows
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.config import Quantization, resolve_config
from minisgl_backend.distributed.group import RankGroup
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool
from minisgl_backend.models.folder import read_model_spec
from minisgl_backend.models.limits import context_limit
from minisgl_backend.models.load import WITH_TORCH, LoadKernels, load_model
from minisgl_backend.models.model import Model
from minisgl_backend.worker.torch_runner import attention_variants


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    context_tokens: int = 0,
    quantization: Quantization = "none",
    kernels: LoadKernels = WITH_TORCH,
    group: RankGroup | None = None,
) -> Model:
    """The model of a folder or GGUF file for a context limit: as in the settings, 0 is the model's own."""
    spec = read_model_spec(folder)
    limit = context_limit(resolve_config({"context_tokens": context_tokens}), folder)
    return load_model(spec, folder, torch.device(device), dtype, limit, quantization, kernels, group)


@torch.inference_mode()
def logits_of(
    model: Model,
    tokens: Sequence[int],
    chunks: Sequence[int],
    page_size: int,
    dtype: torch.dtype,
    attention_of: Callable[[PagedKvPool, Sequence[AttentionVariant]], AttentionBackend] = TorchAttention,
) -> Tensor:
    """tokens in chunks of the given lengths (their sum is len(tokens)) → [tokens, vocab] on the model's device."""
    spec = model.spec
    device = model.norm.weight.device  # type: ignore[attr-defined]
    num_pages = -(-len(tokens) // page_size)
    pool = PagedKvPool(KvShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype), num_pages, page_size, device)
    backend = attention_of(pool, attention_variants(spec))
    table = torch.arange(num_pages, device=device).flip(0)[None]  # backwards: not the identity
    assert sum(chunks) == len(tokens)
    parts, start = [], 0
    for length in chunks:
        positions = torch.arange(start, start + length, device=device)
        ids = torch.tensor(tokens[start : start + length], device=device)
        attention = backend.begin(StepRows(np.array([start]), np.array([length]), table))
        parts.append(model.forward(ids, positions, attention, torch.arange(length, device=device)))
        start += length
    return torch.cat(parts)
