"""Calls of tools that must come (tool_choice "required", or a function's name): the form that the answer is held to,
and how the calls are read out of it again.

    {"name": "weather", "arguments": {"city": "Oslo"}}, {"name": …
    └──────── head ────────────────┘└── a schema's ───┘└ end, separator

The form is a structural tag with a begin for each function, so it needs no parser of the model's own way to call, and
each schema stays a document of its own. Where it stands in the flow: `mapping.py` puts the form into the request,
`chats.py` has a reader for each answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from minisgl_client.gateway.errors import refused
from minisgl_client.pieces import ToolCall

_END, _SEPARATOR = "}", ", "


def forced_form(tools: Sequence[Mapping[str, Any]], *, several: bool) -> dict[str, Any]:
    """The `structural_tag` of an answer that is one call of these functions, or several. Raises ApiError."""
    tags = [
        {"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": _END}
        for begin, schema in ((_head(tool["function"]["name"]), _schema(tool["function"])) for tool in tools)
    ]
    form: dict[str, Any] = {"type": "tags_with_separator", "tags": tags, "separator": _SEPARATOR, "at_least_one": True}
    return {"format": {**form, "stop_after_first": not several}}


class CallReader:
    """Reads the text of one answer, in whatever pieces it comes, and gives the deltas of its calls."""

    def __init__(self, names: Sequence[str]) -> None:
        self._heads = {_head(name): name for name in names}
        self._head = ""  # as far as it has come
        self._call = -1  # which one it is within
        self._depth = 0  # of braces and brackets in its arguments; 0: outside
        self._in_string = False
        self._escaped = False

    def read(self, text: str) -> list[ToolCall]:
        """More of the answer. A call's first delta has its name."""
        deltas: list[ToolCall] = []
        begun = 0  # of the arguments that stand in this text
        for place, character in enumerate(text):
            if self._depth == 0 and self._head not in self._heads:
                self._take_head(character)
                if self._head in self._heads:
                    self._call += 1
                    deltas.append(ToolCall(self._call, self._heads[self._head], ""))
                    begun = place + 1
            elif self._ends_with(character):
                deltas.append(ToolCall(self._call, "", text[begun : place + 1]))
                self._head = ""
        if self._head in self._heads and begun < len(text):
            deltas.append(ToolCall(self._call, "", text[begun:]))
        return deltas

    def _take_head(self, character: str) -> None:
        if self._head or character == "{":  # what ends a call and parts it from the next is passed over
            self._head += character

    def _ends_with(self, character: str) -> bool:
        """Whether the arguments do: JSON of an object, in which strings may hold braces."""
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            return False
        self._in_string = character == '"'
        self._depth += (character in "{[") - (character in "}]")
        return self._depth == 0 and character in "}]"


def _head(name: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '


def _schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of its arguments: an object. A function without parameters takes none."""
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise refused("tools", f"the parameters of {function['name']!r} must be the schema of an object")
    return {"type": "object", **parameters}
