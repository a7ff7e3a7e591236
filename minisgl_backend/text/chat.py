"""A chat as a client writes it → as a template reads it: messages, tools, and what else shapes its prompt.

Where it stands in the flow: `text/prompt.py` reads the JSON of a request with `read_messages` and `read_tools`;
`text/chat_template.py` checks every chat with `plain_messages` before it renders it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.text.values import json_value, refuse_surrogates, shown

FIELD = "messages"

MAX_MESSAGES_BYTES = 4 << 20
"""Of the JSON of a chat. Python parses this in some hundredths of a second, in which nothing else runs."""

MAX_TOOLS_BYTES = 1 << 20
MAX_TOOLS = 128
MAX_TOOL_NAME_CHARS = 256


@dataclass(frozen=True)
class ChatOptions:
    """How messages become a prompt."""

    add_generation_prompt: bool = True  # the prompt ends where the assistant begins to speak
    continue_final_message: bool = False  # it ends within the last message, which the answer goes on with
    tools: Sequence[Mapping[str, Any]] = ()  # as `read_tools` gives them
    arguments: Mapping[str, Any] | None = None  # more variables for the template
    template: str | None = None  # in place of the model's
    control_words: bool = False  # texts of control tokens in what the client wrote are control tokens


PLAIN = ChatOptions()


def read_messages(raw: bytes) -> Any:
    """The JSON of a request's `messages`; what it holds is checked by `plain_messages`. Raises InvalidRequest."""
    messages = json_value(raw, FIELD, MAX_MESSAGES_BYTES)
    if b"\\u" in raw:  # only an escape can bring a surrogate in: the bytes themselves were valid UTF-8
        refuse_surrogates(FIELD, messages)
    return messages


def read_tools(raw: bytes) -> Sequence[Mapping[str, Any]]:
    """The JSON of a request's `tools`: a list of functions as OpenAI's API writes them; none for null.

    Raises InvalidRequest.
    """
    tools = json_value(raw, "tools", MAX_TOOLS_BYTES)
    if tools is None:
        return ()
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidRequest("tools", f"must be a list of at most {MAX_TOOLS} tools, or null")
    if b"\\u" in raw:
        refuse_surrogates("tools", tools)
    for place, tool in enumerate(tools):
        _check_tool(place, tool)
    return tools


def _check_tool(place: int, tool: Any) -> None:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        raise InvalidRequest("tools", f'tool {place} must be an object with `type` "function" and an object `function`')
    name = tool["function"].get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TOOL_NAME_CHARS:
        raise InvalidRequest("tools", f"tool {place} must have a name of 1 to {MAX_TOOL_NAME_CHARS} characters")
    for key, kind in (("description", str), ("parameters", Mapping)):
        if not isinstance(tool["function"].get(key), kind | None):
            raise InvalidRequest("tools", f"tool {place}: {key} has a value of the wrong type")


def plain_messages(messages: Any) -> Sequence[Mapping[str, Any]]:
    """Checks the shape of messages and gives them the form that templates are written for: a content of text parts is
    one string, with nothing in between; no content (null) is an empty one; arguments of tool calls that are JSON text
    are the object.

    Everything else of a message is the template's affair. Raises InvalidRequest, or UnsupportedFeature for parts that
    are no text.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest(FIELD, "must be a list of at least one message")
    return [_plain(place, message) for place, message in enumerate(messages)]


def check_continued(messages: Sequence[Mapping[str, Any]]) -> None:
    """Whether an answer can go on with the last of plain messages. Raises InvalidRequest."""
    last = messages[-1]
    if last["role"] != "assistant" or not last["content"] or last.get("tool_calls"):
        raise InvalidRequest(
            "continue_final_message", "needs a last message of the assistant that has a content and no tool calls"
        )


def last_content(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last of messages that `plain_messages` has passed."""
    return _plain_content(len(messages) - 1, messages[-1].get("content"))


def _plain(place: int, message: Any) -> Mapping[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(FIELD, f"message {place} must be an object with a string `role`")
    calls = message.get("tool_calls")
    if calls is not None:
        message = {**message, "tool_calls": _plain_calls(place, calls)}
    return {**message, "content": _plain_content(place, message.get("content"))}


def _plain_content(place: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequest(
            FIELD, f"message {place}: content must be a string, null or a list of parts, got {shown(content)}"
        )
    return "".join(_text(place, number, part) for number, part in enumerate(content))


def _plain_calls(place: int, calls: Any) -> Sequence[Mapping[str, Any]]:
    where = f"message {place}: tool_calls"
    if not isinstance(calls, list | tuple):
        raise InvalidRequest(FIELD, f"{where} must be a list, got {shown(calls)}")
    plain: list[Mapping[str, Any]] = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(FIELD, f"{where}: call {number} must have a `function` with a string `name`")
        plain.append({**call, "function": {**function, "arguments": _arguments(f"{where}: call {number}", function)}})
    return plain


def _arguments(where: str, function: Mapping[str, Any]) -> Any:
    """The object, from which a template makes JSON again."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            raise InvalidRequest(FIELD, f"{where}: arguments must be the JSON of an object") from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(FIELD, f"{where}: arguments must be an object, or its JSON")
    return arguments


def _text(place: int, number: int, part: Any) -> str:
    where = f"message {place}, part {number} of its content"
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise InvalidRequest(FIELD, f"{where} must be an object with a string `type`")
    if part["type"] != "text":
        raise UnsupportedFeature(FIELD, f"{where} has the type {shown(part['type'])}; only 'text' is supported")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(FIELD, f"{where} must have a string `text`")
    return str(part["text"])
