"""Prompts of an exact number of tokens, out of random words: for benchmarks whose engines are given texts."""

from __future__ import annotations

import random

from minisgl_backend.models.locate import locate_model
from minisgl_backend.text.tokenizer import Tokenizer


def make_prompts(model: str, number: int, tokens: int) -> list[str]:
    """Different texts of exactly `tokens` tokens each: random words, the same at every call."""
    tokenizer = Tokenizer.load(locate_model(model))
    chance = random.Random(0)
    words = ("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "group")
    prompts = []
    for _ in range(number):
        text = "The"
        while (length := len(tokenizer.encode(text))) < tokens:
            text += "".join(" " + chance.choice(words) for _ in range(tokens - length))
        assert length == tokens, f"a prompt of {length} tokens instead of {tokens}"
        prompts.append(text)
    return prompts
