"""What the peer benchmark asks: cases, and the prompts of each round, the same for every engine."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from minisgl_backend.text.tokenizer import Tokenizer

_CASE = re.compile(r"(?:(\d+)\+)?(\d+)/(\d+)@(\d+(?:,\d+)*)")
_WORDS = " time year people way day man thing life child world school group country problem hand part place case week"


@dataclass(frozen=True)
class Case:
    """So many requests at once."""

    shared: int  # tokens that begin every prompt of a round
    own: int  # tokens after them, different in every prompt
    output: int  # tokens of an answer
    streams: int

    def __str__(self) -> str:
        return f"{f'{self.shared}+' if self.shared else ''}{self.own}/{self.output}@{self.streams}"

    @property
    def context(self) -> int:
        """Tokens of one sequence at its end."""
        return self.shared + self.own + self.output


DEFAULT = ("128/128@1,4,16,32", "512/128@1,4,16,32", "512+32/32@32")


def parse_cases(texts: Sequence[str]) -> list[Case]:
    """`INPUT/OUTPUT@STREAMS,…`; an input of `512+32` has 512 tokens that all prompts share and 32 of its own."""
    cases = []
    for text in texts:
        found = _CASE.fullmatch(text)
        if not found:
            raise ValueError(f"case {text!r} is not INPUT/OUTPUT@STREAMS,… such as 128/128@1,4 or 512+32/32@32")
        shared, own, output = (int(part or 0) for part in found.group(1, 2, 3))
        streams = [int(part) for part in found.group(4).split(",")]
        if min(own, output, *streams) < 1:
            raise ValueError(f"case {text!r}: own input, output and streams must be at least 1")
        cases += [Case(shared, own, output, number) for number in streams]
    return cases


def make_prompts(words: Sequence[int], case: Case, seed: str) -> list[list[int]]:
    """One prompt of token ids for each stream. Another seed, another prompt: no engine finds an old one in its cache.

    The seed is the case and the round.
    """
    chance = random.Random(f"{seed} {case}")
    shared = chance.choices(words, k=case.shared)
    return [shared + chance.choices(words, k=case.own) for _ in range(case.streams)]


def word_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids that are a word each with its space: joined, their text is tokenised to themselves again."""
    ids = [tokenizer.encode(f" {word}", add_special_tokens=False) for word in _WORDS.split()]
    return [one[0] for one in ids if len(one) == 1]
