"""A Hugging Face folder of a random Llama without transformers: any shape, also large ones, in any dtype.

`tiny_model` asks transformers for its weights, so that it can be the reference; this one needs only what the engine
itself needs, for worker tests and for the GPU smoke test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fakes.tiny_model import EOS_ID, write_tokenizer
from minisgl_backend.models.checkpoint import RandomTensors
from minisgl_backend.models.folder import parse_model_spec
from minisgl_backend.models.tensors import expected_tensors

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": EOS_ID,
}


def write_random_llama(folder: Path, *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
    """config.json, model.safetensors and the tiny tokenizer. overrides: fields of config.json."""
    config = {**SHAPE, "dtype": dtype, **overrides}
    spec = parse_model_spec(config, {})
    source = RandomTensors(expected_tensors(spec), seed, getattr(torch, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file({name: source.read(name) for name in source.shapes()}, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder, vocab=spec.vocab_size, context=spec.context_tokens)
    return folder
