"""Logprobs as the worker tells them → the JSON that a client reads.

Where it stands in the flow: `text/sample.py` and `text/prompt_logprobs.py` have each token written here as it comes,
and keep the bytes until they are sent: so nobody waits for the JSON of many at once. It is handed on as it is,
through every process to the client.

A token that is no whole character has no exact text: `decoded_token` then shows U+FFFD in place of what is missing,
and the entry has a member more, `bytes`, which is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from minisgl_backend.messages.plan import Logprobs
from minisgl_backend.messages.tokens import unpack_floats, unpack_tokens
from minisgl_backend.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""In place of what is lower still, minus infinity included, which JSON can not hold; as vLLM's server does."""


class Row(msgspec.Struct, frozen=True):
    """One token: its own logprob and rank, and the best ones."""

    ids: Sequence[int]  # the token, then the best ones, best first
    values: Sequence[float]
    rank: int


class Entry(msgspec.Struct, omit_defaults=True):
    """One token as a client reads it."""

    logprob: float
    rank: int
    decoded_token: str
    bytes: list[int] = []


def rows(told: Logprobs) -> list[Row]:
    """One row for each token that is told of."""
    ids, values, ranks = unpack_tokens(told.ids), unpack_floats(told.values), unpack_tokens(told.ranks)
    width = len(ids) // max(len(ranks), 1)
    return [
        Row(ids[at * width : (at + 1) * width], values[at * width : (at + 1) * width], rank)
        for at, rank in enumerate(ranks)
    ]


def row_json(row: Row, tokenizer: Tokenizer) -> bytes:
    """An object, token id → Entry: the token itself, which comes first, and the best ones."""
    return _encoder.encode(_entries(row, tokenizer))


def joined(tokens: Sequence[bytes]) -> bytes:
    """The list of what `row_json` gave of each. Copied once: of a long prompt it is some megabytes."""
    parts = [b","] * (2 * len(tokens) + 1)
    parts[1::2] = tokens
    parts[0], parts[-1] = b"[", b"]"
    return b"".join(parts) if tokens else b"[]"


_encoder = msgspec.json.Encoder()


def own_logprob(row: Row) -> float:
    """Of the token itself."""
    return max(row.values[0], LOWEST)


def _entries(row: Row, tokenizer: Tokenizer) -> dict[int, Entry]:
    ranks = (row.rank, *range(1, len(row.ids)))
    entries: dict[int, Entry] = {}
    for token, value, rank in zip(row.ids, row.values, ranks, strict=True):
        if token not in entries:
            entries[token] = _entry(token, value, rank, tokenizer)
    return entries


def _entry(token: int, value: float, rank: int, tokenizer: Tokenizer) -> Entry:
    data = tokenizer.token_bytes(token)
    text = data.decode("utf-8", "replace")
    exact = text.encode() == data
    return Entry(max(value, LOWEST), rank, text, [] if exact else list(data))
