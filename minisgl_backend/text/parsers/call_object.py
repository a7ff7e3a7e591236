"""One call of a tool as models write it, `{"name": "…", "arguments": {…}}`, read character by character.

Where it stands in the flow: `parsers/calls.py` feeds it; it tells the name as soon as it is known, and the text of the
arguments as it comes. A JSON parser can not do that: it wants the whole object, or reads it anew with every piece.
What the arguments hold is not checked beyond its brackets and strings: it is the model's text, and is passed on.
"""

from __future__ import annotations

import json
from enum import Enum

from minisgl_backend.text.parsers.json_value import JsonValue

_BLANKS = " \t\r\n"
_MOST_CHARS = 256  # of a key or a name; a longer one is none

ARGUMENT_KEYS = ("arguments", "parameters")


class _At(Enum):
    OPEN = "open"  # before the object
    MEMBER = "member"  # between members
    KEY = "key"
    COLON = "colon"
    BEFORE_VALUE = "before value"
    NAME = "name"
    ARGUMENTS = "arguments"
    OTHER = "other"  # a value that nobody wants
    DONE = "done"
    BROKEN = "broken"


class CallObject:
    """`push` until `done` or `broken`. Members other than the name and the arguments are read and dropped."""

    __slots__ = ("_at", "_is_text", "_key", "_piece", "_string", "_value", "began", "name")

    def __init__(self) -> None:
        self.name = ""  # empty: not known yet
        self.began = False  # the arguments have begun
        self._at = _At.OPEN
        self._key = ""
        self._string: list[str] = []  # of a key or of the name, with its opening quote
        self._value = JsonValue()  # the one being read
        self._piece: list[str] = []  # of the arguments, not taken yet
        self._is_text = False  # the arguments are a string that holds JSON

    @property
    def done(self) -> bool:
        """The closing brace was read."""
        return self._at is _At.DONE

    @property
    def broken(self) -> bool:
        """What was read is no such object."""
        return self._at is _At.BROKEN

    def push(self, text: str) -> int:
        """More text; returns how many of its characters belong to the object. The one that breaks it does not."""
        for place, char in enumerate(text):
            while not (self.done or self.broken) and not self._take(char):
                pass  # another state wants the same character
            if self.broken:
                return place
            if self.done:
                return place + 1
        return len(text)

    def take_arguments(self) -> str:
        """The text of the arguments that has come since. A string that holds JSON comes whole, at its end."""
        if self._is_text:
            return ""
        piece = "".join(self._piece)
        self._piece.clear()
        return piece

    def _take(self, char: str) -> bool:
        """Takes a character, or changes the state and returns False."""
        match self._at:
            case _At.KEY | _At.NAME:
                return self._in_string(char)
            case _At.ARGUMENTS | _At.OTHER:
                return self._in_value(char)
            case _At.BEFORE_VALUE:
                return char in _BLANKS or self._begin_value(char)
            case _At.MEMBER if char == '"':
                self._at, self._value, self._string = _At.KEY, JsonValue(), []
                return False
            case _At.MEMBER if char == "}":
                self._at = _At.DONE
            case _At.MEMBER if char == ",":
                pass
            case _At.OPEN if char == "{":
                self._at = _At.MEMBER
            case _At.COLON if char == ":":
                self._at = _At.BEFORE_VALUE
            case _ if char not in _BLANKS:
                self._at = _At.BROKEN
        return True

    def _in_string(self, char: str) -> bool:
        self._value.take(char)
        self._string.append(char)
        if len(self._string) > _MOST_CHARS:
            self._at = _At.BROKEN
        elif self._value.done:
            self._end_string()
        return True

    def _end_string(self) -> None:
        try:
            text = str(json.loads("".join(self._string), strict=False))
        except ValueError:
            text = ""
        if self._at is _At.KEY:
            self._key, self._at = text, _At.COLON
        else:
            self.name, self._at = text, _At.MEMBER if text else _At.BROKEN

    def _begin_value(self, char: str) -> bool:
        self._value = JsonValue()
        if self._key == "name" and not self.name:
            self._string = []
            self._at = _At.NAME if char == '"' else _At.BROKEN
        elif self._key in ARGUMENT_KEYS and not self.began:
            self.began, self._is_text = True, char == '"'
            self._at = _At.ARGUMENTS
        else:
            self._at = _At.OTHER
        return False

    def _in_value(self, char: str) -> bool:
        belongs = self._value.take(char)
        if belongs and self._at is _At.ARGUMENTS:
            self._piece.append(char)
        if self._value.done:
            if self._at is _At.ARGUMENTS:
                self._end_arguments()
            self._at = _At.MEMBER
        return belongs

    def _end_arguments(self) -> None:
        if not self._is_text:
            return
        self._is_text = False
        quoted = "".join(self._piece)
        try:
            self._piece[:] = [str(json.loads(quoted, strict=False))]
        except ValueError:
            self._piece[:] = [quoted]
