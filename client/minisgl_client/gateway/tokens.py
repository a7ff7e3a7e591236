"""POST /tokenize and /detokenize, in vLLM's shapes: bodies → what the engine is asked. It judges the values.

app ─► read_body ─► ask_tokenize, ask_detokenize ─► Backend.ask ─► Triton
"""

from __future__ import annotations

from typing import Any

from minisgl_client.gateway.errors import refused
from minisgl_client.gateway.fields import AnyBody
from minisgl_client.gateway.mapping import plain_message

NAMES = {"text_input": "prompt", "input_ids": "tokens"}
"""The engine's field → ours."""


class TokenizeBody(AnyBody, frozen=True, kw_only=True):
    """Of a text, or of a chat."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(AnyBody, frozen=True, kw_only=True):
    """Of tokens."""

    tokens: list[int]
    skip_special_tokens: bool | None = None


_SENT_AS_THEY_ARE = (
    *("messages", "tools", "add_special_tokens", "return_token_strs", "add_generation_prompt"),
    *("continue_final_message", "chat_template", "chat_template_kwargs"),
)


def ask_tokenize(body: TokenizeBody) -> dict[str, Any]:
    """The arguments of `Backend.ask`. Raises ApiError."""
    if (body.prompt is None) == (body.messages is None):
        raise refused("prompt", "give either prompt or messages")
    fields = {name: value for name in _SENT_AS_THEY_ARE if (value := getattr(body, name)) is not None}
    if body.messages is not None:
        fields["messages"] = [plain_message(message) for message in body.messages]
    return {"text": body.prompt, **fields}


def ask_detokenize(body: DetokenizeBody) -> dict[str, Any]:
    """The arguments of `Backend.ask`."""
    skip = {} if body.skip_special_tokens is None else {"skip_special_tokens": body.skip_special_tokens}
    return {"input_ids": body.tokens, **skip}
