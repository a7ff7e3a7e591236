"""The calls of one answer, one after the other: which text is a call for certain, and which has to be given back.

Where it stands in the flow: the parser of each model family (hermes.py, llama3.py, mistral.py) finds where a call
begins and lets this read it.
"""

from __future__ import annotations

from enum import Enum

from minisgl_backend.text.parsers.call_object import CallObject
from minisgl_backend.text.parsers.events import Event, ToolCall


class Outcome(Enum):
    """Of reading a call so far."""

    MORE = "more"
    CALL = "call"  # it is over
    NONE = "none"  # it was none: its text is in `Calls.given_back`


class Calls:
    """Reads JSON objects of calls. A call is told of as soon as its name is known and its arguments begin."""

    def __init__(self) -> None:
        self.given_back = ""  # the text of what began like a call and was none
        self._next = 0  # index of the next call
        self._object = CallObject()
        self._raw: list[str] = []  # its text, until the call is told of
        self._told = False

    def push(self, text: str, events: list[Event]) -> tuple[Outcome, str]:
        """More text of the present call → (what it is, the text behind it). Events are appended."""
        taken = self._object.push(text)
        if not self._told:
            self._raw.append(text[:taken])
        self._tell(events)
        if not (self._object.done or self._object.broken):
            return Outcome.MORE, ""
        if self._object.done and self._object.name and not self._told:  # a call without arguments
            self._begin(events, "{}")
        was_call = self._told
        self.given_back = "" if was_call else "".join(self._raw)
        self._renew()
        return (Outcome.CALL if was_call else Outcome.NONE), text[taken:]

    def begin(self, name: str, events: list[Event]) -> None:
        """A call whose name stands outside of its arguments; they follow with `go_on`."""
        events.append(ToolCall(self._next, name, ""))
        self._next += 1

    def go_on(self, arguments: str, events: list[Event]) -> None:
        """More arguments of the call that `begin` told of."""
        if arguments:
            events.append(ToolCall(self._next - 1, "", arguments))

    def finish(self) -> Outcome:
        """The text ends within a call. One that was told of stays as it is, anything else was none."""
        was_call = self._told
        self.given_back = "" if was_call else "".join(self._raw)
        self._renew()
        return Outcome.CALL if was_call else Outcome.NONE

    def _tell(self, events: list[Event]) -> None:
        if not self._object.name or not self._object.began:
            return
        arguments = self._object.take_arguments()
        if not self._told:
            self._begin(events, arguments)
        elif arguments:
            events.append(ToolCall(self._next - 1, "", arguments))

    def _begin(self, events: list[Event], arguments: str) -> None:
        events.append(ToolCall(self._next, self._object.name, arguments))
        self._next += 1
        self._told = True
        self._raw.clear()

    def _renew(self) -> None:
        self._object = CallObject()
        self._raw.clear()
        self._told = False
