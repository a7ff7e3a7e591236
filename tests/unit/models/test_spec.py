"""config.json → ModelSpec: every place a field was ever written to, and every refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.config import resolve_config
from minisgl_backend.errors import ConfigError, ModelNotFound, ModelUnsupported
from minisgl_backend.models.folder import parse_model_spec, read_model_spec
from minisgl_backend.models.limits import context_limit
from minisgl_backend.models.rope import RopeSpec
from minisgl_backend.models.spec import ModelSpec

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def parse(generation: dict[str, Any] | None = None, **fields: Any) -> ModelSpec:
    return parse_model_spec({**CONFIG, **fields}, generation or {})


def test_what_is_absent_takes_the_defaults_of_the_llama_config() -> None:
    spec = parse()
    assert (spec.num_kv_heads, spec.head_dim, spec.context_tokens, spec.rms_norm_eps) == (4, 8, 2048, 1e-6)
    assert (spec.tie_embeddings, spec.qkv_bias, spec.mlp_bias) == (False, False, False)
    assert spec.ropes == (RopeSpec(10000.0, 8),) and spec.dtype == "float32" and spec.eos_token_ids == ()


def test_a_given_head_dim_is_not_derived() -> None:
    assert parse(head_dim=24).head_dim == 24


def test_dtype_is_read_from_either_place() -> None:
    assert parse(torch_dtype="bfloat16").dtype == "bfloat16"
    assert parse(dtype="float16").dtype == "float16"


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        (None, [9, 3], (3, 9)),
        (2, [2, 7], (2, 7)),
        ([5, 1], 4, (1, 4, 5)),
        (None, None, ()),
        (0, 0, (0,)),
    ],
)
def test_end_tokens_are_the_union_of_both_files(config: Any, generation: Any, expected: tuple[int, ...]) -> None:
    assert parse({"eos_token_id": generation}, eos_token_id=config).eos_token_ids == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; supported are: LlamaFor"),
        ({"architectures": []}, r"architectures must name one architecture, got \[\]; supported are: LlamaForCausalLM"),
        ({"architectures": None}, "architectures must name one"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map asks for code"),
        ({"auto_map": {"AutoModel": "x.Y"}, "model_type": "my_llama"}, "auto_map asks for code"),
        ({"auto_map": {"AutoModel": "x.Y"}, "architectures": ["Mine"], "model_type": "llama"}, "auto_map asks for co"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "no multiple of num_key_value_heads"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"hidden_size": "big"}, "hidden_size must be a positive integer, got 'big'"),
        ({"vocab_size": None}, "vocab_size must be a positive integer, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a small number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be an id"),
        ({"eos_token_id": [1, -2]}, "eos_token_id must be an id"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1000"),
        ({"vocab_size": 10**30}, "vocab_size must be a positive integer"),
        ({"vocab_size": 10**9}, "vocab_size must be at most 16777216"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
        ({"rope_theta": float("nan")}, "rope_theta must be a positive number"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e308}}, "rope_scaling: factor must be a positive number"),
        (
            {"architectures": ["GptOssForCausalLM"], "num_key_value_heads": 4, "num_local_experts": 10**9},
            "num_local_experts must be at most",
        ),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 10**9}, "num_experts must be at most"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelUnsupported, match=message):
        parse(**fields)


def test_code_that_a_folder_brings_for_a_family_that_is_here_is_not_needed() -> None:
    assert parse(auto_map={"AutoConfig": "configuration_llama.LlamaConfig"}, model_type="llama") == parse()


def test_a_folder_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no model folder"):
        read_model_spec(tmp_path / "none")


def test_a_folder_without_config_or_with_a_broken_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"has no config\.json"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelUnsupported, match=r"config\.json can not be read"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ModelUnsupported, match=r"config\.json can not be read: maximum recursion depth"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelUnsupported, match=r"config\.json must hold a JSON object"):
        read_model_spec(tmp_path)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelUnsupported, match=r"has no config\.json"):
        read_model_spec(tmp_path)


def test_the_context_limit_is_the_models_unless_a_smaller_one_is_set(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert context_limit(resolve_config(), tmp_path) == 2048
    assert context_limit(resolve_config({"context_tokens": 512}), tmp_path) == 512
    with pytest.raises(ConfigError, match="'context_tokens' is 2049, but the model ends at 2048"):
        context_limit(resolve_config({"context_tokens": 2049}), tmp_path)


def test_reading_a_spec_loads_no_torch() -> None:
    """The host and the command line read specs."""
    code = "import sys, minisgl_backend.models.limits; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
