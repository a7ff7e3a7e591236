"""The text of an answer → reasoning, content and calls: which parsers there are, and how they follow each other.

    text ──► ReasoningParser ── content ──► parser of tool calls ──► events

Where it stands in the flow: one AnswerParser per answer, owned by its record; the names are those of the settings
`reasoning_parser` and `tool_parser`.
"""

from __future__ import annotations

from minisgl_backend.text.parsers.events import Content, Event, Parser
from minisgl_backend.text.parsers.hermes import HermesParser
from minisgl_backend.text.parsers.llama3 import Llama3Parser
from minisgl_backend.text.parsers.mistral import MistralParser
from minisgl_backend.text.parsers.reasoning import ReasoningParser

REASONING_PARSERS = ("think",)

TOOL_PARSERS: dict[str, type[HermesParser] | type[Llama3Parser] | type[MistralParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
}

_SIGNS = (("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"), ("<|python_tag|>", "llama3"))


def tool_parser_of(template: str) -> str:
    """The parser whose marks a chat template writes; empty: it writes none that we know."""
    return next((name for sign, name in _SIGNS if sign in template), "")


def reasoning_parser_of(template: str) -> str:
    """The parser whose tags a chat template writes; empty: it writes none that we know."""
    return "think" if "<think>" in template or "</think>" in template else ""


class AnswerParser:
    """See Parser."""

    def __init__(self, *, reasoning: bool, opened: bool, tools: str) -> None:
        """reasoning: tags of reasoning are read; opened: the prompt ends inside one. tools: a name, or empty."""
        self._reasoning = ReasoningParser(opened=opened) if reasoning else None
        self._tools: Parser | None = TOOL_PARSERS[tools]() if tools else None

    def push(self, text: str) -> list[Event]:
        if not text:
            return []
        return self._calls_of([Content(text)] if self._reasoning is None else self._reasoning.push(text))

    def finish(self) -> list[Event]:
        events = self._calls_of([] if self._reasoning is None else self._reasoning.finish())
        return events if self._tools is None else [*events, *self._tools.finish()]

    def _calls_of(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        read: list[Event] = []
        for event in events:
            read += self._tools.push(event.text) if isinstance(event, Content) else [event]
        return read
