"""`parse_output`: the text of an answer comes apart as content, reasoning and tool calls.

    tokens ──► detokeniser ──► stop strings ──► (this) ──► Chunk.text, Chunk.reasoning, Chunk.tool_calls

Where it stands in the flow: `text/request.py` decides with `resolve_parsing` what is read of a request's answers; each
of them (`text/sample.py`) has an OutputReader of its own. The parsers are those of `text/parsers/`; which of them a
model has is decided once, by `parser_names`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.messages.client import Request
from minisgl_backend.messages.tokens import unpack_tokens
from minisgl_backend.text.limits import RequestLimits
from minisgl_backend.text.parsers.answer import TOOL_PARSERS, AnswerParser, reasoning_parser_of, tool_parser_of
from minisgl_backend.text.parsers.events import Event, ToolCall, join
from minisgl_backend.text.parsers.reasoning import CLOSE, OPEN
from minisgl_backend.text.prompt import ChatPrompt, Prompt, PromptTokens
from minisgl_backend.text.tokenizer import Tokenizer

FIELD = "parse_output"

_TAIL_TOKENS = 64  # of a prompt, in which an opening tag with blanks behind it stands


class Parsing(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of the answers of one request."""

    reasoning: bool
    opened: bool  # the prompt ends inside the tag of reasoning
    tools: str  # the parser's name; empty: calls are words
    whole: bool  # one piece: calls are told whole, not as deltas

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts of tokens that the parsers must see, also where an answer leaves special tokens out."""
        tags = (OPEN, CLOSE) if self.reasoning else ()
        return (*tags, *TOOL_PARSERS[self.tools].special_tokens) if self.tools else tags


def parser_names(reasoning: str, tools: str, template: str) -> tuple[str, str]:
    """The settings `reasoning_parser` and `tool_parser`, checked → the model's parsers; an empty name: none.

    template: the model's, empty where it has none.
    """
    if reasoning == "auto":
        reasoning = reasoning_parser_of(template)
    if tools == "auto":
        tools = tool_parser_of(template)
    return reasoning.replace("none", ""), tools.replace("none", "")


def check_parsing(request: Request, limits: RequestLimits) -> None:
    """Raises InvalidRequest or UnsupportedFeature where a request asks for what can not be."""
    if not request.parse_output:
        return
    if request.messages is None:
        raise InvalidRequest(FIELD, "needs messages: a chat's answer is what can be parsed")
    if not (limits.reasoning_parser or limits.tool_parser):
        raise UnsupportedFeature(
            FIELD,
            "this model has no parser: its chat template has no marks of one (settings reasoning_parser, tool_parser)",
        )


def resolve_parsing(
    prompt: Prompt, tokens: PromptTokens, tokenizer: Tokenizer, limits: RequestLimits, *, stream: bool, has_form: bool
) -> Parsing:
    """Of a request that passed `check_parsing`. tokens: the prompt's. has_form: the answer is bound to a grammar.

    Raises InvalidRequest for a form whose first token would stand inside the reasoning.
    """
    assert isinstance(prompt, ChatPrompt)
    reasoning = bool(limits.reasoning_parser)
    opened = reasoning and _is_opened(tokens, tokenizer)
    if opened and has_form:
        raise InvalidRequest(
            FIELD,
            "can not be true with structured output here: the prompt ends inside <think>, and the form is the answer's",
        )
    tools = limits.tool_parser if prompt.has_tools else ""
    return Parsing(reasoning=reasoning, opened=opened, tools=tools, whole=not stream)


def _is_opened(prompt: PromptTokens, tokenizer: Tokenizer) -> bool:
    """Whether the prompt ends inside the tag: with it, blanks aside, or within a last message that begins with it."""
    tail = b"".join(tokenizer.token_bytes(token) for token in unpack_tokens(prompt.ids)[-_TAIL_TOKENS:])
    if tail.rstrip().endswith(OPEN.encode()):
        return True
    return prompt.continued.lstrip().startswith(OPEN) and CLOSE not in prompt.continued


class Parsed(msgspec.Struct, frozen=True):
    """More of one answer."""

    content: str
    reasoning: str
    tool_calls: bytes  # JSON as in Chunk.tool_calls; empty: none


class OutputReader:
    """Reads one answer, piece by piece."""

    __slots__ = ("_events", "_parser", "whole")

    def __init__(self, parsing: Parsing) -> None:
        self._parser = AnswerParser(reasoning=parsing.reasoning, opened=parsing.opened, tools=parsing.tools)
        self.whole = parsing.whole
        self._events: list[Event] = []  # read ahead, not told yet

    def read_ahead(self, text: str) -> None:
        """More of the text, before what it holds is asked for."""
        self._events += self._parser.push(text)

    def read(self, text: str, last: bool) -> Parsed:
        """All since the last time. last: the answer is over. A whole answer is asked for once."""
        self.read_ahead(text)
        if last:
            self._events += self._parser.finish()
        events, self._events = self._events, []
        if self.whole:
            whole = join(events)
            calls = [{"name": name, "arguments": arguments} for name, arguments in whole.calls]
            return Parsed(whole.content, whole.reasoning, _json(calls))
        said = [event for event in events if not isinstance(event, ToolCall)]
        parted = join(said)
        return Parsed(parted.content, parted.reasoning, _json(_deltas(events)))


def _deltas(events: Sequence[Event]) -> list[dict[str, str | int]]:
    """One per call: what came of it."""
    deltas: list[dict[str, str | int]] = []
    for event in events:
        if not isinstance(event, ToolCall):
            continue
        if deltas and deltas[-1]["index"] == event.index:
            deltas[-1]["arguments"] = f"{deltas[-1]['arguments']}{event.arguments}"
        else:
            name = {"name": event.name} if event.name else {}
            deltas.append({"index": event.index, **name, "arguments": event.arguments})
    return deltas


def _json(calls: list[dict[str, str]] | list[dict[str, str | int]]) -> bytes:
    return msgspec.json.encode(calls) if calls else b""
