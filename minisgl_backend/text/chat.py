"""Chat messages as a client writes them → as a template reads them.

Where it stands in the flow: `text/prompt.py` reads the JSON of a request with `read_messages`; `text/chat_template.py`
checks every chat with `plain_messages` before it renders it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.text.values import json_value, refuse_surrogates, shown

FIELD = "messages"

MAX_MESSAGES_BYTES = 4 << 20
"""Of the JSON of a chat. Python parses this in some hundredths of a second, in which nothing else runs."""


def read_messages(raw: bytes) -> Any:
    """The JSON of a request's `messages`; what it holds is checked by `plain_messages`. Raises InvalidRequest."""
    messages = json_value(raw, FIELD, MAX_MESSAGES_BYTES)
    if b"\\u" in raw:  # only an escape can bring a surrogate in: the bytes themselves were valid UTF-8
        refuse_surrogates(FIELD, messages)
    return messages


def plain_messages(messages: Any) -> Sequence[Mapping[str, Any]]:
    """Checks the shape of messages, and joins a content of text parts into one string, with nothing in between.

    Everything else of a message is the template's affair. Raises InvalidRequest, or UnsupportedFeature for parts that
    are no text.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest(FIELD, "must be a list of at least one message")
    return [_plain(place, message) for place, message in enumerate(messages)]


def _plain(place: int, message: Any) -> Mapping[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(FIELD, f"message {place} must be an object with a string `role`")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list | tuple):
        raise InvalidRequest(
            FIELD, f"message {place}: content must be a string, null or a list of parts, got {shown(content)}"
        )
    return {**message, "content": "".join(_text(place, number, part) for number, part in enumerate(content))}


def _text(place: int, number: int, part: Any) -> str:
    where = f"message {place}, part {number} of its content"
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise InvalidRequest(FIELD, f"{where} must be an object with a string `type`")
    if part["type"] != "text":
        raise UnsupportedFeature(FIELD, f"{where} has the type {shown(part['type'])}; only 'text' is supported")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(FIELD, f"{where} must have a string `text`")
    return str(part["text"])
