"""Where a JSON value ends, in a text that comes in pieces. Brackets and strings are followed, nothing is checked.

Where it stands in the flow: under `parsers/call_object.py` and `parsers/mistral.py`.
"""

from __future__ import annotations


class JsonValue:
    """One value. `done` after its last character; a bare one (a number, a word) ends before `,`, `}` or `]`."""

    __slots__ = ("_depth", "_escaped", "_quoted", "done")

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._quoted = self._escaped = False

    def push(self, text: str) -> int:
        """More text; returns how many of its characters belong to the value."""
        for place, char in enumerate(text):
            if self.done or not self.take(char):
                return place
        return len(text)

    def take(self, char: str) -> bool:
        """The next character; False when it stands behind the value, which is then done."""
        if self._quoted:
            self._in_string(char)
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]" and self._depth:
            self._depth -= 1
            self.done = self._depth == 0
        elif char in ",}]" and not self._depth:
            self.done = True
            return False
        return True

    def _in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._quoted = False
            self.done = self._depth == 0
