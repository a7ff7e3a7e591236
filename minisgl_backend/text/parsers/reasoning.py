"""`<think>…</think>` in front of an answer: what the model thinks, apart from what it says.

Where it stands in the flow: the first parser of an answer (parsers/answer.py); what it calls content goes on to the
parser of tool calls.

    BEFORE ── <think> ──► INSIDE ── </think> ──► AFTER
       └───── any other word ───────────────────► AFTER

Only what stands at the very beginning is reasoning, blanks aside; tags further on are words. Blanks beside the tags
belong to neither side. An answer that ends inside is reasoning as far as it goes.
"""

from __future__ import annotations

from enum import Enum

from minisgl_backend.text.parsers.blanks import MOST_BLANKS, Trimmed
from minisgl_backend.text.parsers.events import Content, Event, Reasoning
from minisgl_backend.text.parsers.marker import Marker

OPEN, CLOSE = "<think>", "</think>"


class _At(Enum):
    BEFORE = "before"
    INSIDE = "inside"
    AFTER = "after"


class ReasoningParser:
    """See Parser."""

    def __init__(self, *, opened: bool) -> None:
        """opened: the prompt ends inside the tag, as some templates write it."""
        self._at = _At.INSIDE if opened else _At.BEFORE
        self._before = ""  # blanks, and perhaps a beginning of the tag
        self._close = Marker(CLOSE)
        self._thought = Trimmed(leading=False)
        self._skip_blanks = False  # behind the tag

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        if self._at is _At.BEFORE:
            text = self._look(text)
        if self._at is _At.INSIDE:
            text = self._think(text, events)
        if self._at is _At.AFTER:
            self._say(text, events)
        return events

    def finish(self) -> list[Event]:
        if self._at is _At.INSIDE:
            rest = self._thought.push(self._close.finish())
            return [Reasoning(rest)] if rest else []
        rest, self._before = self._before, ""
        return [Content(rest)] if rest else []

    def _look(self, text: str) -> str:
        """At the beginning: → the text that belongs to the next state."""
        self._before += text
        words = self._before.lstrip()
        blanks = len(self._before) - len(words)
        if blanks <= MOST_BLANKS and OPEN.startswith(words):
            if words == OPEN:
                self._at, self._before = _At.INSIDE, ""
            return ""
        text, self._before = self._before, ""
        if blanks <= MOST_BLANKS and words.startswith(OPEN):
            self._at = _At.INSIDE
            return words[len(OPEN) :]
        self._at = _At.AFTER
        return text

    def _think(self, text: str, events: list[Event]) -> str:
        thought, close, text = self._close.push(text)
        thought = self._thought.push(thought)
        if thought:
            events.append(Reasoning(thought))
        if close is not None:
            self._at, self._skip_blanks = _At.AFTER, True
        return text

    def _say(self, text: str, events: list[Event]) -> None:
        if self._skip_blanks:
            text = text.lstrip()
            self._skip_blanks = not text
        if text:
            events.append(Content(text))
