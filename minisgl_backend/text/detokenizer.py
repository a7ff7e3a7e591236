"""Tokens → text, piece by piece, exactly.

Where it stands in the flow: one Detokenizer per answer, owned by the answer's record (`text/record.py`).

The text of an answer is the UTF-8 reading of its tokens' bytes, special tokens left out unless they are asked for,
nothing put in between, every wrong byte sequence replaced by U+FFFD (one per maximal subpart, as Unicode 3.9 recommends
and Python and Rust do). The pieces joined are that text, however the tokens are cut into pieces, and so what was sent
is always a prefix of it. Four rules:

1. Bytes that may still become a character wait, at most three of them; a sequence that can not is U+FFFD at once.
2. An answer that ends within a character ends with one U+FFFD, streamed or not: the reader sees that it was cut.
3. A character belongs to where it begins. When the prompt's last token ends within a character, the bytes that
   complete it are the prompt's: the answer starts with the next character.
4. A leading space is kept, because the answer continues the prompt. Only where there is no prompt text at all does
   the SentencePiece rule apply that a text loses its first space.

The cost of a token is one table look-up and its bytes; nothing is ever decoded twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minisgl_backend.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns the output tokens of one answer into text. Not thread-safe; holds at most three bytes."""

    __slots__ = ("_prompt_character", "_strip_space", "_table", "_tail")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: tuple[str, ...] = (),
    ) -> None:
        """prompt_ids: the tokens before the answer; read from the end until three bytes of text are found. shown: texts
        of special tokens that are not skipped.
        """
        self._table = tokenizer.shown_with(shown) if skip_special_tokens else tokenizer.all_bytes
        before = b""
        for token in reversed(prompt_ids):
            before = self._table[token] + before
            if len(before) >= _LONGEST_TAIL:
                break
        self._tail = before[len(before) - incomplete_tail(before) :]
        self._prompt_character = bool(self._tail)  # the next character is the prompt's, not ours to show
        self._strip_space = tokenizer.strips_first_space and not before

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that became certain with these tokens, each 0 … vocab_size - 1. May be empty."""
        table = self._table
        data = self._tail + b"".join([table[token] for token in token_ids])
        self._tail = b""
        if data and data[-1] >= 0x80:  # else it ends with a whole character, as nearly always
            whole = len(data) - incomplete_tail(data)
            data, self._tail = data[:whole], data[whole:]
        text = data.decode("utf-8", "replace")
        return self._ours(text) if self._prompt_character or self._strip_space else text

    def finish(self) -> str:
        """The rest: one U+FFFD when the answer ends within a character, else nothing. Call once, last."""
        rest, self._tail = self._tail, b""
        return self._ours(rest.decode("utf-8", "replace"))

    def _ours(self, text: str) -> str:
        if text and self._prompt_character:
            self._prompt_character = False
            text = text[1:]
        if text and self._strip_space:
            self._strip_space = False
            text = text.removeprefix(" ")
        return text


def decode(
    tokenizer: Tokenizer, token_ids: Iterable[int], prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
) -> str:
    """The whole text of an answer at once: what the pieces of its stream join to."""
    detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens)
    return detokenizer.push(token_ids) + detokenizer.finish()


_LONGEST_TAIL = 3  # bytes: a character has four at most

_NARROW_SECOND = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}
"""Lead bytes after which not every continuation byte is valid (Unicode 15, table 3-7)."""


def incomplete_tail(data: bytes) -> int:
    """How many bytes at the end (0 … 3) are the beginning of a character that further bytes can complete."""
    for back in range(1, min(_LONGEST_TAIL, len(data)) + 1):
        lead = data[-back]
        if 0x80 <= lead < 0xC0:
            continue
        if not 0xC2 <= lead <= 0xF4:
            return 0
        need = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        if back >= need:
            return 0
        low, high = _NARROW_SECOND.get(lead, (0x80, 0xBF))
        return back if back == 1 or low <= data[1 - back] <= high else 0
    return 0
