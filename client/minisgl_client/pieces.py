"""What comes back: pieces of an answer, the whole of it, and what is known of its cost.

Where it stands in the flow: `reception.py` makes pieces of Triton's responses; `Client` and `AsyncClient` hand them to
their callers. All frozen; a field is None (a text or tuple: empty) when the request did not ask for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts in tokens. The times are the server's: from the arrival of the request there."""

    input_tokens: int | None = None  # of the prompt, template included
    output_tokens: int | None = None  # on a piece: its own; on an answer: all
    cached_tokens: int | None = None  # of the prompt: found in the cache, not computed
    ttft_ms: float | None = None  # to the first token
    queue_ms: float | None = None  # to the first step that computed for it


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token at one place of an answer or prompt."""

    logprob: float
    rank: int  # 1: the likeliest
    decoded_token: str  # U+FFFD for what is no whole character
    bytes: tuple[int, ...] | None = None  # of such a token, exact


Logprobs = tuple[Mapping[int, Logprob] | None, ...]
"""By token: the token itself first, then the best ones, by their ids. None for the first token of a prompt."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool: on a piece its delta, on an answer the whole of it."""

    index: int  # which call of the answer, from 0
    name: str  # on pieces only with a call's first delta, else empty
    arguments: str  # JSON as the model wrote it; cut where the answer is


@dataclass(frozen=True, slots=True)
class Sample:
    """One of several answers (n): on a piece its delta, on an answer the whole of it."""

    text: str
    finish_reason: str | None  # stays once it is there
    output_ids: tuple[int, ...] | None
    logprobs: Logprobs | None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    cumulative_logprob: float | None = None  # of all tokens so far


@dataclass(frozen=True, slots=True)
class Piece:
    """One response. The texts of all pieces joined are the answer, without the prompt unless it is echoed. Of several
    answers these are the first one's fields, and `samples` has all.
    """

    text: str
    finish_reason: str | None  # None until the answer's last piece: "stop", "length", …
    output_ids: tuple[int, ...] | None
    usage: Usage
    logprobs: Logprobs | None = None  # of the tokens of this piece
    prompt_logprobs: Logprobs | None = None  # once
    prompt_ids: tuple[int, ...] | None = None  # once
    samples: tuple[Sample, ...] = ()  # when n is more than 1
    reasoning: str = ""  # with parse_output: what the model thinks; the text then is the content alone
    tool_calls: tuple[ToolCall, ...] = ()  # with parse_output
    cumulative_logprob: float | None = None  # of all tokens so far


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; of several the first one, and all in `samples`."""

    text: str
    finish_reason: str
    output_ids: tuple[int, ...] | None
    usage: Usage
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    prompt_ids: tuple[int, ...] | None = None
    samples: tuple[Sample, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    cumulative_logprob: float | None = None

    @classmethod
    def of(cls, pieces: Sequence[Piece], *, stopped: str | None = None) -> Answer:
        """Of the pieces of a whole answer, in their order. stopped: the reason of one that was left before its end."""
        first = _joined([_first_sample(piece) for piece in pieces])
        reason = first.finish_reason if stopped is None else stopped
        assert reason is not None, "a reception lets no answer end without"
        return cls(
            text=first.text,
            finish_reason=reason,
            output_ids=first.output_ids,
            usage=total([piece.usage for piece in pieces]),
            logprobs=first.logprobs,
            prompt_logprobs=_first(piece.prompt_logprobs for piece in pieces),
            prompt_ids=_first(piece.prompt_ids for piece in pieces),
            samples=tuple(_joined(each) for each in zip(*(piece.samples for piece in pieces), strict=True)),
            reasoning=first.reasoning,
            tool_calls=first.tool_calls,
            cumulative_logprob=first.cumulative_logprob,
        )


def whole_calls(deltas: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """The calls of an answer, of the deltas of its pieces in their order."""
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        names[delta.index] = names.get(delta.index, "") or delta.name
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return tuple(ToolCall(index, names[index], "".join(parts)) for index, parts in arguments.items())


def _first_sample(piece: Piece) -> Sample:
    return Sample(
        piece.text,
        piece.finish_reason,
        piece.output_ids,
        piece.logprobs,
        piece.reasoning,
        piece.tool_calls,
        piece.cumulative_logprob,
    )


def _joined(deltas: Sequence[Sample]) -> Sample:
    last = deltas[-1] if deltas else Sample("", None, None, None)
    return Sample(
        text="".join(delta.text for delta in deltas),
        finish_reason=last.finish_reason,
        output_ids=None if last.output_ids is None else tuple(i for delta in deltas for i in delta.output_ids or ()),
        logprobs=None if last.logprobs is None else tuple(one for delta in deltas for one in delta.logprobs or ()),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=whole_calls(call for delta in deltas for call in delta.tool_calls),
        cumulative_logprob=last.cumulative_logprob,
    )


def _first(values: Iterable[Value | None]) -> Value | None:
    return next((value for value in values if value is not None), None)


def total(usages: Sequence[Usage]) -> Usage:
    """Of the pieces of one answer, so far: each says its own output, and all the same of the rest."""
    if not usages:
        return Usage()
    last = usages[-1]
    counts = [usage.output_tokens for usage in usages if usage.output_tokens is not None]
    output_tokens = sum(counts) if counts else None
    return Usage(last.input_tokens, output_tokens, last.cached_tokens, last.ttft_ms, last.queue_ms)
