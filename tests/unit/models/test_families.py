"""The declarations: what each family reads of a config.json, what it refuses, and that they stay declarations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fakes.family_cases import FAMILY_CASES
from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.models import families
from minisgl_backend.models.folder import parse_model_spec
from minisgl_backend.models.registry import FAMILIES
from minisgl_backend.models.spec import ModelSpec

SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def parse(architecture: str, **fields: Any) -> ModelSpec:
    return parse_model_spec({"architectures": [architecture], **SHAPE, **fields}, {})


def windows(architecture: str, **fields: Any) -> list[int]:
    return [layer.window for layer in parse(architecture, **fields).layers]


def test_every_registered_architecture_has_a_case_that_is_compared_with_transformers() -> None:
    assert {case.architecture for case in FAMILY_CASES.values()} == set(FAMILIES)


def test_every_declaration_is_registered_once() -> None:
    code = Path(families.__path__[0])
    written = sum(file.read_text().count(" = Family(\n") for file in code.glob("*.py"))
    assert written == len(FAMILIES)


def test_declarations_load_no_torch() -> None:
    modules = [f"minisgl_backend.models.families.{file.stem}" for file in Path(families.__path__[0]).glob("[a-z]*.py")]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert modules and subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_null_is_no_default_and_what_is_left_out_is() -> None:
    assert parse("MistralForCausalLM", sliding_window=None).layers[0].window == 0
    assert parse("MistralForCausalLM").layers[0].window == 4096
    assert parse("MistralForCausalLM", num_key_value_heads=None).num_kv_heads == 4
    with pytest.raises(ModelUnsupported, match="max_position_embeddings must be a positive integer, got None"):
        parse("MistralForCausalLM", max_position_embeddings=None)


def test_one_window_of_mistral_is_in_all_layers() -> None:
    assert windows("MistralForCausalLM", sliding_window=8) == [8] * 4
    assert windows("MistralForCausalLM", sliding_window=8, layer_types=["sliding_attention"] * 4) == [8] * 4


def test_layer_types_of_ministral_say_which_layers_have_the_window() -> None:
    types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert windows("MinistralForCausalLM", sliding_window=8, layer_types=types) == [0, 8, 8, 0]
    assert windows("MinistralForCausalLM", sliding_window=None) == [0] * 4


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_windows_of_qwen_begin_at_a_layer_and_only_where_they_are_asked_for(architecture: str) -> None:
    assert windows(architecture, sliding_window=8, max_window_layers=0) == [0] * 4
    assert windows(architecture, use_sliding_window=True, sliding_window=8, max_window_layers=3) == [0, 0, 0, 8]
    assert windows(architecture, use_sliding_window=True, sliding_window=None, max_window_layers=0) == [0] * 4
    types = ["full_attention", "sliding_attention"] * 2
    assert windows(architecture, use_sliding_window=True, sliding_window=8, layer_types=types) == [0, 8, 0, 8]


SLIDING = ["sliding_attention"] * 4


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("MistralForCausalLM", {"layer_types": ["full_attention", *SLIDING[1:]]}, "layer_types contradicts sliding_w"),
        ("MistralForCausalLM", {"sliding_window": None, "layer_types": SLIDING}, "sliding_window must be a positive"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
        ("MinistralForCausalLM", {"layer_types": SLIDING[1:]}, "layer_types has 3 entries, num_hidden_layers is 4"),
        ("MinistralForCausalLM", {"layer_types": ["chunked_attention"] * 4}, "layer_types entry 'chunked_attention'"),
        ("MinistralForCausalLM", {"layer_types": "full_attention"}, "layer_types must be a list of strings"),
        ("Qwen2ForCausalLM", {"layer_types": SLIDING}, "layer_types has windows, but use_sliding_window is false"),
        ("Gemma3ForConditionalGeneration", {}, "takes images or audio beside text"),
    ],
)
def test_what_a_family_can_not_honour_is_refused_by_name(
    architecture: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelUnsupported, match=message):
        parse(architecture, **fields)
