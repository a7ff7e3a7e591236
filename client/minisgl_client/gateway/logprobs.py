"""Logprobs as the two endpoints of OpenAI tell them."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from minisgl_client.pieces import Logprob

Entries = Mapping[int, Logprob] | None
"""Of one token: itself first, then the best ones. None for the first of a prompt."""


def of_chat(logprobs: Sequence[Entries], top: int) -> dict[str, Any]:
    """{"content": […]}: of each token, and of `top` best ones beside it."""
    content = [
        {**_told(own), "top_logprobs": [_told(one) for one in best]} for own, best in _places(logprobs, top) if own
    ]
    return {"content": content, "refusal": None}


class Columns:
    """Those of /v1/completions, of one answer, over its pieces. The texts of the tokens, joined, are the text: a token
    that ends within a character is empty, and the one that ends it has the whole of it.
    """

    def __init__(self, top: int) -> None:
        """top: best tokens at each place."""
        self._top = top
        self._offset = 0  # of the next token's text in the whole one, in characters
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of_prompt(self, logprobs: Sequence[Entries], text: str) -> dict[str, Any]:
        """text: the prompt as it was given. Its first token has no logprob, and what the others leave of the text."""
        exact = [_exact(next(iter(entries.values()))) for entries in logprobs if entries]
        given, told = text.encode(), b"".join(exact)
        if told[:1] == b" " and not given.endswith(told) and given.endswith(told[1:]):
            exact[0], told = exact[0][1:], told[1:]  # the space that a SentencePiece tokenizer puts in front
        first = given[: max(0, len(given) - len(told))]  # empty for a BOS
        return self._tell(logprobs, [first, *exact])

    def of_answer(self, logprobs: Sequence[Entries]) -> dict[str, Any]:
        """Of tokens that come next."""
        return self._tell(logprobs, [_exact(next(iter(entries.values()))) for entries in logprobs if entries])

    def _tell(self, logprobs: Sequence[Entries], exact: Sequence[bytes]) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for raw, (own, best) in zip(exact, _places(logprobs, self._top), strict=True):
            text = self._decoder.decode(raw)
            columns["text_offset"].append(self._offset)
            columns["tokens"].append(text)
            columns["token_logprobs"].append(own.logprob if own else None)
            columns["top_logprobs"].append({one.decoded_token: one.logprob for one in best} if own else None)
            self._offset += len(text)
        return {**columns, "top_logprobs": columns["top_logprobs"] if self._top else None}


def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of tokens and of those that follow them."""
    return {name: None if column is None else [*column, *second[name]] for name, column in first.items()}


def _places(logprobs: Sequence[Entries], top: int) -> list[tuple[Logprob | None, Sequence[Logprob]]]:
    """By token: its own, which stands first, and the best ones, the likeliest first."""
    found: list[tuple[Logprob | None, Sequence[Logprob]]] = []
    for entries in logprobs:
        ranked = sorted(entries.values(), key=lambda one: one.rank) if entries else []
        own = next(iter(entries.values())) if entries else None
        found.append((own, [one for one in ranked if one.rank <= top]))
    return found


def _told(one: Logprob) -> dict[str, Any]:
    return {"token": one.decoded_token, "logprob": one.logprob, "bytes": list(_exact(one))}


def _exact(one: Logprob) -> bytes:
    return one.decoded_token.encode() if one.bytes is None else bytes(one.bytes)
