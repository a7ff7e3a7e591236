"""What an answer's text is made of, once it is read: reasoning, words for the user, calls of tools.

Where it stands in the flow: the parsers of this folder turn the text of an answer, in whatever pieces it comes, into
these events; the record of the answer (`text/record.py`) hands them on. The events of a text joined are the same
however it was cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer itself. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call begins (`name` is given, once, with its first event), or goes on (`name` is empty)."""

    index: int  # which call of the answer, from 0
    name: str
    arguments: str  # more of the JSON text of its arguments, as the model wrote it; may be empty at the beginning


Event = Reasoning | Content | ToolCall


class Parser(Protocol):
    """Reads one answer. The work for a piece does not grow with what came before it."""

    def push(self, text: str) -> list[Event]:
        """More of the text → what became certain with it."""
        ...

    def finish(self) -> list[Event]:
        """The text is over → the rest. Called once, last."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """All events of an answer, joined."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]  # name and arguments, in their order


def join(events: Iterable[Event]) -> Whole:
    """Raises AssertionError for events that do not follow each other, which is a fault of the parser."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for event in events:
        if isinstance(event, ToolCall):
            if event.name:
                assert event.index == len(calls), f"call {event.index} begins after {len(calls)} calls"
                calls.append((event.name, []))
            assert event.index == len(calls) - 1, f"call {event.index} goes on after {len(calls)} calls began"
            calls[-1][1].append(event.arguments)
        else:
            (reasoning if isinstance(event, Reasoning) else content).append(event.text)
    return Whole("".join(reasoning), "".join(content), tuple((name, "".join(parts)) for name, parts in calls))
