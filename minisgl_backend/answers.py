"""What an `LLM` hands out: the pieces of an answer, the whole of it, what is known of its prompt and its cost.

    Started, PromptLogprobs, Chunk …, Finished ──► Pieces.take ──► Piece        a stream
                                               └─► completion ──► Completion    a whole answer

Where it stands in the flow: `llm.py` gives the messages of one request in their order, and hands on what comes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from minisgl_backend.errors import error_of
from minisgl_backend.messages.client import (
    Answered,
    Chunk,
    Failed,
    Finished,
    FinishReason,
    Output,
    PromptLogprobs,
    Started,
)
from minisgl_backend.messages.tokens import unpack_tokens
from minisgl_backend.text.logprobs import Entry

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or a chat: a list of messages such as {"role": "user", "content": "Hi"}."""

Logprobs = tuple[dict[int, Entry] | None, ...]
"""Per token: the token itself and the best ones, by their ids. None for the first token of a prompt."""


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool: on a piece its delta, on a whole answer all of it."""

    index: int  # which call of the answer, from 0
    name: str  # on pieces only with a call's first delta, else empty
    arguments: str  # JSON as the model wrote it; cut where the answer is


class Usage(msgspec.Struct, frozen=True):
    """What a prompt cost until its first token. Times from the arrival at the engine."""

    num_input_tokens: int  # of the prompt, template included
    num_cached_tokens: int  # of them, those that were found in the cache
    queue_ms: float  # to the first step
    ttft_ms: float  # to the first token


class Piece(msgspec.Struct, frozen=True):
    """A part of a streamed answer. Joined, the texts of one index are its answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None  # set on the last piece
    usage: Usage
    index: int = 0  # which of n answers
    logprobs: Logprobs | None = None  # an entry per token of token_ids, when the parameters ask for them
    reasoning: str = ""  # with parse_output: what the model thinks; the text then is the content alone
    tool_calls: tuple[ToolCall, ...] = ()  # with parse_output
    prompt_logprobs: Logprobs | None = None  # once, when the parameters ask for them
    prompt_token_ids: tuple[int, ...] | None = None  # once, with return_token_ids


class Sample(msgspec.Struct, frozen=True):
    """One of the n answers to a prompt."""

    text: str
    token_ids: tuple[int, ...]  # an end-of-sequence token that ended the answer is included
    finish_reason: FinishReason
    logprobs: Logprobs | None = None
    cumulative_logprob: float | None = None  # of all its tokens, when logprobs are asked for
    reasoning: str = ""  # with parse_output, as on a piece
    tool_calls: tuple[ToolCall, ...] = ()


class Completion(msgspec.Struct, frozen=True):
    """A whole answer; of n answers the first one in text, token_ids and so on, and all in samples."""

    prompt: Prompt  # as it was given
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_input_tokens: int
    num_output_tokens: int  # of all n
    samples: tuple[Sample, ...]
    usage: Usage
    prompt_logprobs: Logprobs | None = None
    prompt_token_ids: tuple[int, ...] | None = None  # with return_token_ids
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class Pieces:
    """Of one streamed request: what comes before its text waits for the next piece."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._prompt_ids: tuple[int, ...] | None = None
        self._prompt_logprobs: Logprobs | None = None

    def take(self, output: Output) -> Piece | None:
        """None: nothing to hand out yet. Raises the error that ended the request."""
        if isinstance(output, Failed):
            raise error_of(output.status, output.message)
        if isinstance(output, Started):
            self._started, self._prompt_ids = output, _prompt_ids(output)
            return None
        if isinstance(output, PromptLogprobs):
            self._prompt_logprobs = _logprobs(output.logprobs)
            return None
        assert self._started is not None and not isinstance(output, Answered), "no piece of a generation"
        piece = Piece(
            text=output.text,
            token_ids=tuple(unpack_tokens(output.tokens)),
            finish_reason=output.reason,
            usage=_usage(self._started),
            index=output.index,
            logprobs=_logprobs(output.logprobs),
            reasoning=output.reasoning,
            tool_calls=_calls(output.tool_calls),
            prompt_logprobs=self._prompt_logprobs,
            prompt_token_ids=self._prompt_ids,
        )
        self._prompt_ids = self._prompt_logprobs = None
        return piece


def completion(prompt: Prompt, outputs: Sequence[Output]) -> Completion:
    """All outputs of an answer that was not streamed. Raises what ended it, unless it ended well."""
    last = outputs[-1]
    if isinstance(last, Failed):
        raise error_of(last.status, last.message)
    assert isinstance(last, Finished), last
    (started,) = (output for output in outputs if isinstance(output, Started))
    samples = tuple(_sample(output) for output in outputs if isinstance(output, Chunk | Finished))
    told = [output.logprobs for output in outputs if isinstance(output, PromptLogprobs)]
    return Completion(
        prompt=prompt,
        text=samples[0].text,
        token_ids=samples[0].token_ids,
        finish_reason=samples[0].finish_reason,
        num_input_tokens=last.num_input_tokens,
        num_output_tokens=last.num_output_tokens,
        samples=samples,
        usage=_usage(started),
        prompt_logprobs=_logprobs(told[0]) if told else None,
        prompt_token_ids=_prompt_ids(started),
        reasoning=samples[0].reasoning,
        tool_calls=samples[0].tool_calls,
    )


def _sample(output: Chunk | Finished) -> Sample:
    """Of an answer in one piece."""
    assert output.reason is not None, output
    told = _logprobs(output.logprobs)
    return Sample(
        text=output.text,
        token_ids=tuple(unpack_tokens(output.tokens)),
        finish_reason=output.reason,
        logprobs=told,
        cumulative_logprob=None if told is None else output.logprob,
        reasoning=output.reasoning,
        tool_calls=_calls(output.tool_calls),
    )


def _usage(started: Started) -> Usage:
    return Usage(started.num_input_tokens, started.num_cached_tokens, started.queue_ms, started.ttft_ms)


def _prompt_ids(started: Started) -> tuple[int, ...] | None:
    return tuple(unpack_tokens(started.prompt_ids)) if started.prompt_ids else None


def _logprobs(raw: bytes) -> Logprobs | None:
    return msgspec.json.decode(raw, type=Logprobs) if raw else None


class _Call(msgspec.Struct, frozen=True):
    """As the text actor writes it: a delta says its index and perhaps its name, a whole call its name."""

    arguments: str
    name: str = ""
    index: int | None = None


def _calls(raw: bytes) -> tuple[ToolCall, ...]:
    calls = msgspec.json.decode(raw, type=list[_Call]) if raw else []
    return tuple(
        ToolCall(place if call.index is None else call.index, call.name, call.arguments)
        for place, call in enumerate(calls)
    )
