"""Tool calls as Mistral's models write them, behind the special token `[TOOL_CALLS]`: a JSON list of calls,
`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or, since their eleventh tokenizer, a token for each call,
`[TOOL_CALLS]name[ARGS]{…}`, with `[CALL_ID]…` before `[ARGS]` in some.

Where it stands in the flow: a Parser behind that of reasoning (parsers/answer.py). Behind the first call nothing but
calls is expected; what else comes is content.
"""

from __future__ import annotations

from enum import Enum

from minisgl_backend.text.parsers.blanks import Said
from minisgl_backend.text.parsers.calls import Calls, Outcome
from minisgl_backend.text.parsers.events import Event
from minisgl_backend.text.parsers.json_value import JsonValue
from minisgl_backend.text.parsers.marker import Marker

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_MOST_CHARS = 256  # of a name, with the mark before it


class _At(Enum):
    TEXT = "text"
    FORM = "form"  # behind [TOOL_CALLS]: a list or a name?
    ITEM = "item"  # inside the list, between calls
    OBJECT = "object"  # inside a call of the list
    NAME = "name"
    ARGUMENTS = "arguments"  # of a call by name


class MistralParser:
    """See Parser."""

    special_tokens: tuple[str, ...] = (CALLS, ARGS, CALL_ID)
    """Shown to this parser also where the answer leaves special tokens out."""

    def __init__(self) -> None:
        self._at = _At.TEXT
        self._calls = Calls()
        self._open = Marker(CALLS)
        self._said = Said()
        self._raw = ""  # since the marker, until there is a call
        self._value = JsonValue()

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            text = self._step(text, events)
        return events

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._at is _At.OBJECT and self._calls.finish() is Outcome.NONE:
            self._said.add(self._raw + self._calls.given_back, events)
        elif self._at in (_At.FORM, _At.NAME):
            self._said.add(self._raw, events)
        self._said.add(self._open.finish(), events)
        self._said.finish(events)
        return events

    def _step(self, text: str, events: list[Event]) -> str:
        match self._at:
            case _At.TEXT:
                return self._look(text, events)
            case _At.FORM:
                return self._choose(text)
            case _At.ITEM:
                return self._next_item(text)
            case _At.OBJECT:
                return self._read(text, events)
            case _At.NAME:
                return self._name(text, events)
            case _At.ARGUMENTS:
                return self._arguments(text, events)

    def _look(self, text: str, events: list[Event]) -> str:
        said, marker, text = self._open.push(text)
        self._said.add(said, events)
        if marker is not None:
            self._at, self._raw = _At.FORM, CALLS
        return text

    def _choose(self, text: str) -> str:
        words = self._keep_blanks(text, text.lstrip())
        if not words:
            return ""
        self._at = _At.ITEM if words[0] == "[" else _At.NAME
        if self._at is _At.ITEM:
            self._raw += "["
        return words.removeprefix("[")

    def _next_item(self, text: str) -> str:
        words = self._keep_blanks(text, text.lstrip(" \t\r\n,"))
        if words.startswith("]"):  # of an empty list: nothing is said, and nothing called
            self._at, self._raw = _At.TEXT, ""
        elif words:
            self._at = _At.OBJECT
        return words.removeprefix("]")

    def _keep_blanks(self, text: str, words: str) -> str:
        if self._raw:
            self._raw += text[: len(text) - len(words)]
        return words

    def _read(self, text: str, events: list[Event]) -> str:
        outcome, text = self._calls.push(text, events)
        if outcome is Outcome.CALL:
            self._begun()
            self._at = _At.ITEM
        elif outcome is Outcome.NONE:
            self._at = _At.TEXT
            self._said.add(self._raw + self._calls.given_back, events)
            self._raw = ""
        return text

    def _name(self, text: str, events: list[Event]) -> str:
        """Collects up to [ARGS]. What grows too long, or holds a line break or another bracket, is no name."""
        before = len(self._raw)
        self._raw += text
        head, found, _ = self._raw.partition(ARGS)
        name = head[len(CALLS) :].partition(CALL_ID)[0].strip()
        too_long = len(head) > _MOST_CHARS + (0 if found else len(ARGS))  # the last ones may be of the mark
        if too_long or "\n" in head or CALLS in head[len(CALLS) :] or (found and not name):
            text, self._raw, self._at = self._raw[len(CALLS) :], "", _At.TEXT
            self._said.add(CALLS, events)
            return text
        if not found:
            return ""
        behind = len(head) + len(found) - before
        self._begun()
        self._calls.begin(name, events)
        self._at, self._value = _At.ARGUMENTS, JsonValue()
        return text[behind:]

    def _arguments(self, text: str, events: list[Event]) -> str:
        taken = self._value.push(text)
        self._calls.go_on(text[:taken], events)
        if self._value.done:
            self._at = _At.TEXT
        return text[taken:]

    def _begun(self) -> None:
        """There is a call: blanks before and behind it are nobody's."""
        self._raw = ""
        self._said.call()
