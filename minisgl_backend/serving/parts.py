"""A long text in parts, and the parts' summaries in their order. Pure.

Where it stands in the flow: used by the model `summarise` (serving/summarise.py): the text is split once, each part is
summarised on its own, many at a time, and what may be sent is decided here.
"""

from __future__ import annotations

import re

from minisgl_backend.messages.client import FinishReason

BETWEEN = "\n\n"
"""Between the summaries of two parts."""

_BORDERS = (
    re.compile(r"\n[ \t\r]*\n\s*"),  # a paragraph
    re.compile(r"[.!?…]['\")\]»”’]*\s+|[。！？]['\")\]»”’]*\s*"),  # a sentence
    re.compile(r"\s+"),  # a word
)
"""The best first. A part ends behind its border."""

_LAST_WORD = re.compile(r"\s+\S*$")
_UNFINISHED = "\ufffd"


def split_parts(text: str, part_bytes: int) -> tuple[str, ...]:
    """Parts of at most `part_bytes` of UTF-8 each (at least 4, so that any character fits), which joined are `text`.

    A part ends behind the last paragraph that lies in the second half of what would fit, else behind the last such
    sentence, else word, else character. An empty text has no parts.
    """
    assert part_bytes >= 4
    data = text.encode("utf-8")
    parts: list[str] = []
    start = 0
    while start < len(data):
        fits = _whole_characters(data, start, part_bytes)
        end_of_text = start + len(fits.encode("utf-8")) == len(data)
        part = fits if end_of_text else fits[: _last_border(fits)]
        parts.append(part)
        start += len(part.encode("utf-8"))
    return tuple(parts)


def _whole_characters(data: bytes, start: int, count: int) -> str:
    end = min(start + count, len(data))
    while end < len(data) and data[end] & 0xC0 == 0x80:  # inside a character
        end -= 1
    return data[start:end].decode("utf-8")


def _last_border(text: str) -> int:
    for border in _BORDERS:
        ends = [match.end() for match in border.finditer(text, len(text) // 2)]
        if ends:
            return ends[-1]
    return len(text)


class PartOrder:
    """What is known of the summaries of all parts → what may be sent now: the first part that has not ended is passed
    on as it comes, later ones wait for their turn.
    """

    def __init__(self, num_parts: int) -> None:
        self._waiting = [""] * num_parts
        self._ended = [False] * num_parts
        self._turn = 0
        self._begun = False  # the part whose turn it is has sent something
        self._sent = False  # anything was sent

    @property
    def done(self) -> bool:
        """Every part has ended and all their text was handed out."""
        return self._turn == len(self._ended)

    def take(self, part: int, text: str, ended: bool) -> str:
        """More text of a part, the last of it if `ended`; returns what may be sent, which may be empty."""
        assert not self._ended[part], f"part {part} goes on after its end"
        self._waiting[part] += text
        self._ended[part] = ended
        ready = ""
        while not self.done:
            ready += self._release()
            if not self._ended[self._turn]:
                break
            self._turn += 1
            self._begun = False
        return ready

    def _release(self) -> str:
        """The waiting text of the part whose turn it is. Blanks before its first word are dropped."""
        text, self._waiting[self._turn] = self._waiting[self._turn], ""
        if self._begun:
            return text
        text = text.lstrip()
        if not text:
            return ""
        self._begun = True
        text = BETWEEN + text if self._sent else text
        self._sent = True
        return text


class Slices:
    """One summary, asked for in slices of some tokens: each call continues the text of those before.

    The last word of a slice is taken back, and the next slice says it anew: it may be half a word, or half a character
    (U+FFFD), and a text that ends in the middle of one has other tokens than the model would have gone on from.
    """

    def __init__(self, max_tokens: int, slice_tokens: int) -> None:
        self._left_tokens = max_tokens
        self._slice_tokens = slice_tokens
        self._text = ""
        self._reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """What the next slice continues."""
        return self._text

    @property
    def reason(self) -> FinishReason | None:
        """Why the summary ended; None: it goes on."""
        return self._reason

    @property
    def max_tokens(self) -> int:
        """Of the next slice."""
        return min(self._slice_tokens, self._left_tokens)

    def take(self, text: str, num_tokens: int, reason: FinishReason) -> str:
        """The answer to one slice; returns what it adds to the text."""
        asked = self.max_tokens
        self._left_tokens -= asked
        if (
            reason is not FinishReason.LENGTH or num_tokens < asked or not self._left_tokens
        ):  # fewer: the context is full
            self._reason = reason
        else:
            text = _whole_words(text)
        self._text += text
        return text


def _whole_words(text: str) -> str:
    """Without the last word and the blank before it; never empty, or a summary would not go on."""
    whole = text.rstrip(_UNFINISHED) or text
    words = _LAST_WORD.sub("", whole)
    return words if words.strip() else whole
