"""What comes back: pieces of an answer, the whole of it, and what is known of its cost.

Where it stands in the flow: `reception.py` makes pieces of Triton's responses; `Client` and `AsyncClient` hand them to
their callers. All frozen; a field is None when the request did not ask for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts in tokens. The times are the server's: from the arrival of the request there."""

    input_tokens: int | None = None  # of the prompt, template included
    output_tokens: int | None = None  # on a piece: its own; on an answer: all
    cached_tokens: int | None = None  # of the prompt: found in the cache, not computed
    ttft_ms: float | None = None  # to the first token
    queue_ms: float | None = None  # to the first step that computed for it


@dataclass(frozen=True, slots=True)
class Piece:
    """One response. The texts of all pieces joined are the answer, without the prompt."""

    text: str
    finish_reason: str | None  # None until the last piece: "stop", "length", …
    output_ids: tuple[int, ...] | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    text: str
    finish_reason: str
    output_ids: tuple[int, ...] | None
    usage: Usage

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> Answer:
        """Of the pieces of a whole answer, in their order."""
        last = pieces[-1]
        assert last.finish_reason is not None, "a reception lets no answer end without"
        ids = None
        if last.output_ids is not None:
            ids = tuple(token for piece in pieces for token in piece.output_ids or ())
        return cls("".join(piece.text for piece in pieces), last.finish_reason, ids, total([p.usage for p in pieces]))


def total(usages: Sequence[Usage]) -> Usage:
    """Of the pieces of one answer, so far: each says its own output, and all the same of the rest."""
    if not usages:
        return Usage()
    last = usages[-1]
    counts = [usage.output_tokens for usage in usages if usage.output_tokens is not None]
    output_tokens = sum(counts) if counts else None
    return Usage(last.input_tokens, output_tokens, last.cached_tokens, last.ttft_ms, last.queue_ms)
