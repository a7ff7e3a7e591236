"""Control tokens in what a client wrote: they stay words.

Where it stands in the flow: `Tokenizer.encode_chat` hides the texts of special tokens ("<|im_end|>") that stand in
messages behind marks, renders the template, whose own control tokens are real, and encodes the marks as plain text.
So nobody ends their turn and speaks as another role from within a message (case CT-05). `text_input` is a raw prompt,
in which control tokens are meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_MARK = "\U0010fffd"  # the last private character: no text of a person holds it, and where one does it is hidden too


class ControlWords:
    """The texts of a model's special tokens, and how to find them."""

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted({text for text in texts if text} | {_MARK}, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def hide(self, value: Any, found: list[str]) -> Any:
        """The value with a mark in place of each control word in its strings, at any depth; the words join `found`.

        The value itself is left as it was.
        """
        if isinstance(value, str):
            return self._pattern.sub(lambda match: _mark(match[0], found), value)
        if isinstance(value, Mapping):
            return {self.hide(key, found): self.hide(member, found) for key, member in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(member, found) for member in value]
        return value


def _mark(word: str, found: list[str]) -> str:
    found.append(word)
    return f"{_MARK}{len(found) - 1}{_MARK}"


def pieces(text: str, found: list[str]) -> list[tuple[str, bool]]:
    """A rendered text as (text of the template and of messages, False) and (control word of a message, True)."""
    split = re.split(f"{_MARK}([0-9]+){_MARK}", text)
    return [
        (found[int(piece)] if index % 2 and int(piece) < len(found) else piece, bool(index % 2))
        for index, piece in enumerate(split)
        if piece
    ]
