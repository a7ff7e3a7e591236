"""The `parameters` of another model's config.pbtxt.

Where it stands in the flow: a model that shares the engine of another one reads that one's settings (settings.py).
Triton hands a model its own configuration only, and the stub's environment need not have protobuf, so the text format
is read here as far as such a file uses it: fields, blocks, lists, strings, comments.
"""

from __future__ import annotations

import ast
import re

_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*|[,;])
    |(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<mark>[{}\[\]<>:])
    |(?P<word>[^\s{}\[\]<>:,;"'\#]+)""",
    re.VERBOSE,
)
_CLOSING = {"{": "}", "<": ">"}

Message = list[tuple[str, "str | Message"]]
"""Fields in their order; a list is a field that comes again. Numbers and names are kept as they are written."""


def parameters(text: str) -> dict[str, str]:
    """`parameters { key: "a" value { string_value: "b" } }` → {"a": "b"}; a later one wins. Raises ValueError."""
    found: dict[str, str] = {}
    for name, entry in _message(_tokens(text), None):
        if name == "parameters" and isinstance(entry, list):
            fields = dict(entry)
            key, value = fields.get("key"), fields.get("value")
            if isinstance(key, str) and isinstance(value, list):
                string = dict(value).get("string_value", "")
                found[key] = string if isinstance(string, str) else ""
    return found


def _tokens(text: str) -> list[tuple[str, str]]:
    """(kind, value), the last first: the parser pops from the end."""
    found: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise ValueError(f"line {text.count(chr(10), 0, at) + 1}: {text[at : at + 20]!a}")
        at = token.end()
        if token.lastgroup != "skip":
            found.append((str(token.lastgroup), token[0]))
    return found[::-1]


def _message(tokens: list[tuple[str, str]], closing: str | None) -> Message:
    """Fields until `closing`, or to the end."""
    message: Message = []
    while tokens:
        kind, name = tokens.pop()
        if kind == "mark" and name == closing:
            return message
        if kind != "word":
            raise ValueError(f"{name!a} where a field is expected")
        if tokens and tokens[-1] == ("mark", ":"):
            tokens.pop()
        message += [(name, value) for value in _values(tokens)]
    if closing is not None:
        raise ValueError(f"ends without {closing!r}")
    return message


def _values(tokens: list[tuple[str, str]]) -> list[str | Message]:
    """One value, or those of a list."""
    if tokens and tokens[-1] == ("mark", "["):
        tokens.pop()
        values: list[str | Message] = []
        while tokens and tokens[-1] != ("mark", "]"):
            values.append(_value(tokens))
        if not tokens:
            raise ValueError("ends without ']'")
        tokens.pop()
        return values
    return [_value(tokens)]


def _value(tokens: list[tuple[str, str]]) -> str | Message:
    kind, value = tokens.pop() if tokens else ("", "the end")
    if kind == "mark" and value in _CLOSING:
        return _message(tokens, _CLOSING[value])
    if kind == "text":
        parts = [value]
        while tokens and tokens[-1][0] == "text":
            parts.append(tokens.pop()[1])
        return "".join(_unquoted(part) for part in parts)
    if kind == "word":
        return value
    raise ValueError(f"{value!a} where a value is expected")


def _unquoted(text: str) -> str:
    try:
        return str(ast.literal_eval(text))
    except (SyntaxError, ValueError):
        raise ValueError(f"{text[:20]!a} is no string") from None
