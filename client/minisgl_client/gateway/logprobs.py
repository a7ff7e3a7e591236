"""Logprobs as the two endpoints of OpenAI tell them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minisgl_client.pieces import Logprob


def of_chat(logprobs: Sequence[Mapping[int, Logprob] | None], top: int) -> dict[str, Any]:
    """{"content": […]}: of each token, and of `top` best ones beside it."""
    content = [
        {**_told(own), "top_logprobs": [_told(one) for one in best]} for own, best in _places(logprobs, top) if own
    ]
    return {"content": content, "refusal": None}


def of_completion(
    logprobs: Sequence[Mapping[int, Logprob] | None], top: int, offset: int, first: str = ""
) -> tuple[dict[str, Any], int]:
    """The columns of /v1/completions, and the offset of the text behind them.

    offset: of these tokens' text in the whole one, in characters. first: the text of a prompt's first token, which has
    no logprob.
    """
    columns: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for own, best in _places(logprobs, top):
        text = own.decoded_token if own else first
        columns["text_offset"].append(offset)
        columns["tokens"].append(text)
        columns["token_logprobs"].append(own.logprob if own else None)
        columns["top_logprobs"].append({one.decoded_token: one.logprob for one in best} if own else None)
        offset += len(text)
    return {**columns, "top_logprobs": columns["top_logprobs"] if top else None}, offset


def _places(
    logprobs: Sequence[Mapping[int, Logprob] | None], top: int
) -> list[tuple[Logprob | None, Sequence[Logprob]]]:
    """By token: its own, which stands first, and the best ones, the likeliest first."""
    found: list[tuple[Logprob | None, Sequence[Logprob]]] = []
    for entries in logprobs:
        ranked = sorted(entries.values(), key=lambda one: one.rank) if entries else []
        own = next(iter(entries.values())) if entries else None
        found.append((own, [one for one in ranked if one.rank <= top]))
    return found


def _told(one: Logprob) -> dict[str, Any]:
    exact = list(one.decoded_token.encode() if one.bytes is None else one.bytes)
    return {"token": one.decoded_token, "logprob": one.logprob, "bytes": exact}
