"""Tool calls as Hermes and Qwen write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number.

Where it stands in the flow: a Parser behind that of reasoning (parsers/answer.py). What begins like a call and is none
is given back as content. Blanks beside calls are left out. A closing tag that does not come is not missed.
"""

from __future__ import annotations

from minisgl_backend.text.parsers.blanks import Said
from minisgl_backend.text.parsers.calls import Calls, Outcome
from minisgl_backend.text.parsers.events import Event
from minisgl_backend.text.parsers.marker import Marker

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """See Parser."""

    special_tokens: tuple[str, ...] = (OPEN, CLOSE)
    """Shown to this parser also where the answer leaves special tokens out."""

    def __init__(self) -> None:
        self._calls = Calls()
        self._open = Marker(OPEN)
        self._said = Said()
        self._in_call = False
        self._behind: str | None = None  # behind a call: perhaps a beginning of the closing tag

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if self._in_call:
                outcome, text = self._calls.push(text, events)
                self._end_call(outcome, events)
            elif self._behind is not None:
                text = self._skip_close(text)
            else:
                text = self._look(text, events)
        return events

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._in_call:
            self._end_call(self._calls.finish(), events)
        elif self._behind is not None:
            self._behind = None  # of a closing tag that did not come whole
        self._said.add(self._open.finish(), events)
        self._said.finish(events)
        return events

    def _look(self, text: str, events: list[Event]) -> str:
        said, marker, text = self._open.push(text)
        self._said.add(said, events)
        self._in_call = marker is not None
        return text

    def _end_call(self, outcome: Outcome, events: list[Event]) -> None:
        """Nothing, while there is more of it."""
        if outcome is Outcome.MORE:
            return
        self._in_call = False
        if outcome is Outcome.CALL:
            self._behind = ""
            self._said.call()
        else:
            self._said.add(OPEN + self._calls.given_back, events)

    def _skip_close(self, text: str) -> str:
        """Behind a call: → the text that belongs to the next state."""
        assert self._behind is not None
        words = (self._behind + text).lstrip()
        if CLOSE.startswith(words) and words != CLOSE:
            self._behind = words
            return ""
        self._behind = None
        return words.removeprefix(CLOSE)
