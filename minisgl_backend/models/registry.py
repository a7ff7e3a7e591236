"""Architecture name → how to load it. A new architecture is one entry here and one in SUPPORTED_ARCHITECTURES."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from minisgl_backend.models.checkpoint import Checkpoint, TensorSource
from minisgl_backend.models.llama import load_llama
from minisgl_backend.models.model import Model
from minisgl_backend.models.spec import ModelSpec

Loader = Callable[[ModelSpec, TensorSource, torch.device, torch.dtype, int], Model]

LOADERS: Mapping[str, Loader] = {"LlamaForCausalLM": load_llama}


def load_model(spec: ModelSpec, folder: Path, device: torch.device, dtype: torch.dtype, context_tokens: int) -> Model:
    """Maps the folder's weights and builds the model on the device. Raises ModelUnsupported."""
    return LOADERS[spec.architecture](spec, Checkpoint(folder), device, dtype, context_tokens)
