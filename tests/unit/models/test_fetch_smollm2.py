"""The real SmolLM2 in the user's cache, as `minisgl fetch smollm2` left it: strings and their ids, and its prose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from fakes.llama_cpp import plain_encode
from minisgl_backend.models.locate import locate_model

pytestmark = pytest.mark.slow

IDS = {
    "Hello world": [19556, 905],
    "1234567890": [33, 34, 35, 36, 37, 38, 39, 40, 41, 32],
    "In 1999, 3.14159 is pi.": [788, 216, 33, 41, 41, 41, 28, 216, 35, 30, 33, 36, 33, 37, 41, 314, 16916, 30],
    "abc123def 45": [25276, 33, 34, 35, 1604, 216, 36, 37],
    " 12 ": [216, 33, 34, 216],
    "  leading": [216, 2899],
    "trailing   ": [4861, 4966, 333],
    "\n\n\ttabs\n": [1116, 197, 100, 7366, 198],
    "a\r\nb": [81, 201, 198, 82],
    "x = [1, 22, 333]": [104, 446, 933, 33, 28, 216, 34, 34, 28, 216, 35, 35, 35, 77],
    "def f(n):\n    return n ** 2  # comment\n": [
        *(1604, 275, 24, 94, 727, 472, 1003, 304, 1903, 216, 34, 216, 907, 5189, 198)
    ],
    "don't we'll I'm they've he'd": [12420, 982, 392, 3060, 339, 5248, 502, 3543, 384, 6737],
    "日本語のテキスト": [23274, 115, 40993, 179, 120, 248, 26453, 11100, 224, 10391, 251, 10391, 134, 11100, 226],
    "😀 👨‍👩‍👧 ok": [10813, 242, 218, 15107, 235, 118, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117, 10907],
    "½ ² Ⅷ ٣٤": [16738, 216, 19133, 216, 173, 223, 117, 216, 164, 113, 164, 114],
    "naïve café": [3546, 46494, 37366],
    "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
    "a<|im_end|>b <|endoftext|>": [81, 2, 82, 216, 0],
    "1,000,000": [33, 28, 32, 32, 32, 28, 32, 32, 32],
    "0x1F": [32, 104, 33, 54],
    "": [],
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return locate_model("smollm2")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_smollm2_gives_each_string_its_known_ids(tokenizer: Tokenizer) -> None:
    assert {text: tokenizer.encode(text).ids for text in IDS} == IDS


def test_smollm2_tokenizes_by_llama_cpps_rules(folder: Path, tokenizer: Tokenizer) -> None:
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [" ".join(merge) for merge in model["merges"]]
    specials = [tokens[i] for i in range(17)]
    assert {text: plain_encode(text, tokens, merges, specials) for text in IDS} == IDS


def test_transformers_loads_the_folder_and_it_speaks_english(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert {text: tokenizer.encode(text) for text in IDS} == IDS
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
