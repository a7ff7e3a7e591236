"""The real small model: as safetensors, as the GGUF file, and with the file's weights packed, the text is the same."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_backend.llm import LLM
from minisgl_backend.models.folder import read_model_spec
from minisgl_backend.models.locate import locate_model
from minisgl_backend.text.parameters import SamplingParams
from minisgl_backend.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

PROMPTS = ["The old lighthouse stood", "def f(x):\n    ", "但是没有人听见。"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
CHAT = [{"role": "user", "content": "Name three colours."}]


def answers(model: str, **settings: Any) -> list[tuple[int, ...]]:
    inline: dict[str, Any] = {"executor": "inline", "threads": 1}  # torch is here already
    with LLM(model, dtype="fp32", kv_bytes=64 << 20, max_running=8, **inline, **settings) as llm:
        return [one.token_ids for one in llm.generate([*PROMPTS, CHAT], GREEDY, progress=False)]


def test_the_folder_and_the_file_packed_or_not_give_the_same_tokens() -> None:
    folder = answers("smollm2")
    assert all(len(tokens) == 8 for tokens in folder)
    assert answers("smollm2-gguf") == folder
    assert answers("smollm2-gguf", quantization="gguf") == folder


def test_the_file_says_of_the_model_and_its_text_what_the_folder_says() -> None:
    folder, file = locate_model("smollm2"), locate_model("smollm2-gguf")
    assert read_model_spec(file) == read_model_spec(folder)
    ours, theirs = Tokenizer.load(file), Tokenizer.load(folder)
    text = "naïve 日本語 😀 12345\n\n\t<|im_start|>user isn't   it"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.all_bytes == theirs.all_bytes and ours.eos_token_ids == theirs.eos_token_ids
    assert ours.render_chat(CHAT) == theirs.render_chat(CHAT)
