"""Control tokens in what a client wrote: they stay words.

Where it stands in the flow: `Tokenizer.encode_chat` hides the texts of special tokens ("<|im_end|>") that stand in
messages behind marks, renders the template, whose own control tokens are real, and encodes the marks as plain text.
So nobody ends their turn and speaks as another role from within a message (case CT-05). Halves of such a text at the
borders of a string, which a template could join with another string's, are hidden where they did join. `text_input` is
a raw prompt, in which control tokens are meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_MARK = "\U0010fffd"  # the last private character: no text of a person holds it, and where one does it is hidden too


class ControlWords:
    """The texts of a model's special tokens, and how to find them."""

    def __init__(self, texts: Iterable[str]) -> None:
        words = {text for text in texts if text}
        longest_first = sorted(words | {_MARK}, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._heads = {word[:size] for word in words for size in range(1, len(word))}
        self._tails = {word[size:] for word in words for size in range(1, len(word))}
        self._longest_half = max(map(len, self._heads), default=0)

    def hide(self, value: Any, found: list[str], *, halves: bool = False) -> Any:
        """The value with a mark in place of each control word in its strings, at any depth; the words join `found`.

        halves: also in place of the end of one at the beginning of a string, and of its beginning at the end. The value
        itself is left as it was.
        """
        if isinstance(value, str):
            text = self._pattern.sub(lambda match: _mark(match[0], found), value)
            return self._hide_halves(text, found) if halves else text
        if isinstance(value, Mapping):
            return {
                self.hide(key, found, halves=halves): self.hide(member, found, halves=halves)
                for key, member in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide(member, found, halves=halves) for member in value]
        return value

    def _hide_halves(self, text: str, found: list[str]) -> str:
        sizes = range(min(self._longest_half, len(text)), 0, -1)
        tail = next((size for size in sizes if text[:size] in self._tails), 0)
        if tail:
            text = _mark(text[:tail], found) + text[tail:]
        head = next((size for size in sizes if text[-size:] in self._heads), 0)
        return text[:-head] + _mark(text[-head:], found) if head else text

    def count(self, text: str) -> int:
        """How many control words stand in a rendered text."""
        return sum(match[0] != _MARK for match in self._pattern.finditer(text))


END_MARK = f"{_MARK}end{_MARK}"
"""Where the content of a message ends that is to be continued. No hidden value holds it."""


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
