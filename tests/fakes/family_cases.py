"""A tiny model of every architecture that is served, in every form that its config class can give it.

A new family is one entry here: tests/numeric/test_families.py compares it with transformers, and tests/unit/models
asks for at least one case of each registered architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakes.tiny_model import make_tiny_model

WINDOW = 32


@dataclass(frozen=True, slots=True)
class FamilyCase:
    """fields: of transformers' config class, over `tiny_model.TINY`."""

    architecture: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        return make_tiny_model(folder, self.architecture, **self.fields)


FAMILY_CASES: Mapping[str, FamilyCase] = {
    "llama": FamilyCase("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "mistral": FamilyCase("MistralForCausalLM", {"sliding_window": None, "head_dim": 24}),
    "ministral": FamilyCase("MinistralForCausalLM", {"head_dim": 16, "layer_types": ["full_attention"] * 3}),
    "qwen2": FamilyCase("Qwen2ForCausalLM"),
    "qwen2_with_unused_windows": FamilyCase("Qwen2ForCausalLM", {"sliding_window": WINDOW, "max_window_layers": 0}),
    "qwen3": FamilyCase("Qwen3ForCausalLM", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3_with_biases": FamilyCase("Qwen3ForCausalLM", {"head_dim": 16, "attention_bias": True}),
    "olmo2": FamilyCase("Olmo2ForCausalLM"),
    "olmo2_with_biases": FamilyCase("Olmo2ForCausalLM", {"attention_bias": True, "num_key_value_heads": None}),
}
