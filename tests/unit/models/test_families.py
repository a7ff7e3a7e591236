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


def test_every_other_layer_of_gemma_2_has_the_window_unless_layer_types_says_otherwise() -> None:
    assert windows("Gemma2ForCausalLM", sliding_window=8) == [8, 0, 8, 0]
    types = ["full_attention"] * 3 + ["sliding_attention"]
    assert windows("Gemma2ForCausalLM", sliding_window=8, layer_types=types) == [0, 0, 0, 8]


def test_gemma_2_has_its_caps_unless_they_are_null() -> None:
    spec = parse("Gemma2ForCausalLM")
    assert (spec.attention_softcap, spec.final_softcap) == (50.0, 30.0)
    spec = parse("Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (spec.attention_softcap, spec.final_softcap) == (0.0, 0.0)


def test_gemma_scales_scores_by_a_field_of_its_own_and_embeddings_by_the_root_of_their_size() -> None:
    spec = parse("Gemma2ForCausalLM", query_pre_attn_scalar=144)
    assert spec.attention_scale == 144**-0.5 and spec.embedding_scale == 32**0.5


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window_pattern": 3},
        {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ],
)
def test_layers_of_gemma_3_with_a_window_rotate_by_frequencies_of_their_own(fields: dict[str, Any]) -> None:
    spec = parse("Gemma3ForCausalLM", sliding_window=8, rope_theta=500.0, rope_local_base_freq=50.0, **fields)
    assert [layer.window for layer in spec.layers] == [8, 8, 0, 8]
    assert [spec.ropes[layer.rope or 0].theta for layer in spec.layers] == [50.0, 50.0, 500.0, 50.0]


def test_only_layers_of_olmo_3_without_a_window_are_stretched() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}
    spec = parse("Olmo3ForCausalLM", sliding_window=8, rope_scaling=yarn)
    assert [layer.window for layer in spec.layers] == [8, 8, 8, 0]
    assert [spec.ropes[layer.rope or 0].kind for layer in spec.layers] == ["default"] * 3 + ["yarn"]


def test_smollm3_does_not_rotate_every_fourth_layer_or_those_that_are_named() -> None:
    assert [layer.rope for layer in parse("SmolLM3ForCausalLM").layers] == [0, 0, 0, None]
    spec = parse("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 0])
    assert [layer.rope for layer in spec.layers] == [None, 0, 0, None]


def test_only_layers_of_smollm3_that_do_not_rotate_have_the_window() -> None:
    fields = {"sliding_window": 8, "no_rope_layers": [1, 0, 1, 0]}
    assert windows("SmolLM3ForCausalLM", use_sliding_window=True, **fields) == [0, 8, 0, 8]
    assert windows("SmolLM3ForCausalLM", **fields) == [0] * 4


@pytest.mark.parametrize("architecture", ["GlmForCausalLM", "Glm4ForCausalLM"])
def test_half_of_a_head_of_glm_rotates_in_pairs_of_neighbours(architecture: str) -> None:
    (rope,) = parse(architecture, head_dim=16).ropes
    assert (rope.rotary_dim, rope.interleaved) == (8, True)


def test_the_original_length_of_phi_3_stands_beside_its_factors() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    fields = {"max_position_embeddings": 131072, "rope_scaling": {"type": "longrope", **factors}}
    (rope,) = parse("Phi3ForCausalLM", original_max_position_embeddings=2048, **fields).ropes
    assert rope.frequencies(4096)[0] == 0.5 and rope.frequencies(2048)[0] == 1.0


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
        ("Gemma2ForCausalLM", {"sliding_window": None}, "sliding_window must be a positive integer, got None"),
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supp"),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": -1.0}, "final_logit_softcapping must be a positive number"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ("Gemma3ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries, num_hidden_layers is 4"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": "none"}, "no_rope_layers must be a list of flags, got 'none'"),
        ("Qwen2ForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        (
            "Gemma3ForConditionalGeneration",
            {},
            r"takes images or audio .*; a checkpoint of its text model alone \(Gemma3ForCausalLM\) does",
        ),
        ("Qwen2_5_VLForConditionalGeneration", {}, "takes images or audio beside text, which this engine does not$"),
    ],
)
def test_what_a_family_can_not_honour_is_refused_by_name(
    architecture: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelUnsupported, match=message):
        parse(architecture, **fields)
