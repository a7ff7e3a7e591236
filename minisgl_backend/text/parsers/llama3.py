"""Tool calls as Llama 3 writes them: the whole answer is `{"name": …, "parameters": {…}}`, or several of them with `;`
between, behind the special token `<|python_tag|>` or without it.

Where it stands in the flow: a Parser behind that of reasoning (parsers/answer.py). An answer that begins otherwise is
content to its end; what begins like a call and is none is given back, and all behind it is content.
"""

from __future__ import annotations

from minisgl_backend.text.parsers.blanks import MOST_BLANKS
from minisgl_backend.text.parsers.calls import Calls, Outcome
from minisgl_backend.text.parsers.events import Content, Event

TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;"


class Llama3Parser:
    """See Parser."""

    special_tokens: tuple[str, ...] = (TAG,)
    """Shown to this parser also where the answer leaves special tokens out."""

    def __init__(self) -> None:
        self._calls = Calls()
        self._before: str | None = ""  # blanks, marks between calls, and perhaps a beginning of the tag
        self._in_call = False
        self._any = False  # there was a call

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if self._in_call:
                outcome, text = self._calls.push(text, events)
                self._end_call(outcome, events)
            elif self._before is not None:
                text = self._look(text)
            else:
                events.append(Content(text))
                text = ""
        return events

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._in_call:
            self._end_call(self._calls.finish(), events)
        elif self._before:
            events.append(Content(self._before))
        return events

    def _look(self, text: str) -> str:
        """Before a call: → the text that belongs to the next state."""
        assert self._before is not None
        text = self._before + text
        words = text.lstrip(_BETWEEN if self._any else None)
        blanks = len(text) - len(words)
        if self._any:  # what stands between calls is nobody's
            text, blanks = words, 0
        if blanks <= MOST_BLANKS and TAG.startswith(words) and words != TAG:
            self._before = text
            return ""
        self._before = text[:blanks]
        if blanks > MOST_BLANKS:
            words, self._before = text, None
        elif words.startswith(TAG):
            self._before += TAG
            words = words[len(TAG) :]
            self._in_call = True
        elif words[0] == "{":
            self._in_call = True
        else:
            words, self._before = text, None
        return words

    def _end_call(self, outcome: Outcome, events: list[Event]) -> None:
        """Nothing, while there is more of it."""
        if outcome is Outcome.MORE:
            return
        self._in_call = False
        if outcome is Outcome.CALL:
            self._any, self._before = True, ""
            return
        given_back = (self._before or "") + self._calls.given_back
        self._before = None
        if given_back:
            events.append(Content(given_back))
