"""llama.cpp's file → Hugging Face folder: names, row order, tokenizer, configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from fakes.llama_cpp import SPECIALS, TEMPLATE, permuted, plain_encode, tiny_vocabulary, write_tiny_gguf
from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.models.gguf_tensors import unpaired
from minisgl_backend.models.gguf_tokenizer import tokenizer_json
from minisgl_backend.models.smollm2 import convert_smollm2

TEXTS = (
    "the 12 12",
    "1212",
    " the the",
    "  the",
    "\n\n\t the\n",
    "don't we'll",
    "½ ² Ⅷ ٣٤",
    "naïve 日本語 😀 👨‍👩‍👧",
    "<|im_start|>the<|im_end|>\n",
    "a<|im_end|>b <|endoftext|>",
    "   ",
    "",
)


def tiny_tokenizer() -> Tokenizer:
    tokens, merges = tiny_vocabulary()
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
    }
    return Tokenizer.from_str(tokenizer_json(metadata, "tiny.gguf"))


def test_rows_that_llama_cpp_rotates_together_go_half_a_head_apart() -> None:
    two_heads_of_four = torch.arange(8).reshape(8, 1)
    assert unpaired(two_heads_of_four, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_undoing_the_permutation_gives_the_rows_back() -> None:
    weight = np.random.default_rng(0).standard_normal((48, 5), dtype=np.float32)
    assert np.array_equal(unpaired(torch.from_numpy(permuted(weight, 3)), 3).numpy(), weight)


def test_each_digit_is_a_token_of_its_own_although_a_merge_would_join_two() -> None:
    assert tiny_tokenizer().encode("1212").tokens == ["1", "2", "1", "2"]


def test_a_space_before_a_digit_stands_alone_and_before_a_letter_it_does_not() -> None:
    assert tiny_tokenizer().encode(" 1 the").tokens == ["Ġ", "1", "Ġthe"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_says_what_llama_cpps_rules_say(text: str) -> None:
    tokens, merges = tiny_vocabulary()
    assert tiny_tokenizer().encode(text).ids == plain_encode(text, tokens, merges, SPECIALS)


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_comes_back_from_its_tokens(text: str) -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_are_skipped_when_asked() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode("<|im_start|>the<|im_end|>").ids, skip_special_tokens=True) == "the"


def test_a_converted_folder_holds_exactly_the_weights_of_the_file(tmp_path: Path) -> None:
    expected = write_tiny_gguf(tmp_path / "tiny.gguf")
    calls: list[tuple[int, int]] = []
    convert_smollm2(tmp_path / "tiny.gguf", tmp_path, lambda done, total: calls.append((done, total)))
    made = load_file(tmp_path / "model.safetensors")
    assert made.keys() == expected.keys()
    assert all(np.array_equal(made[name], weight) for name, weight in expected.items())
    assert calls == [(n + 1, len(expected)) for n in range(len(expected))]


def test_a_converted_folder_says_what_the_file_says(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    convert_smollm2(tmp_path / "tiny.gguf", tmp_path, lambda done, total: None)
    config = json.loads((tmp_path / "config.json").read_text())
    expected: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "model_type": "llama",
        "max_position_embeddings": 512,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    assert {key: config[key] for key in expected} == expected
    tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (tokenizer["bos_token"], tokenizer["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer["chat_template"] == TEMPLATE
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("12").tokens == ["1", "2"]


def test_a_file_that_an_engine_would_refuse_is_not_converted(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", architecture="mamba")
    with pytest.raises(ModelUnsupported, match="'mamba'"):
        convert_smollm2(tmp_path / "tiny.gguf", tmp_path, lambda done, total: None)
    assert not (tmp_path / "model.safetensors").exists()
