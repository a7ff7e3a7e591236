"""The prompt of a request, in whichever of its three kinds it came → token ids.

    text_input ── TextPrompt ──┐
    messages ──── ChatPrompt ──┼── encode_prompt ──► PromptTokens
    input_ids ─── TokenPrompt ─┘

Where it stands in the flow: `text/request.py` calls `read_prompt` when a request arrives (cheap) and `encode_prompt`
next (for long texts and chats in a thread). Sizes are bounded before anything walks over the data.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

import msgspec

from minisgl_backend.errors import InvalidRequest, RequestError, UnsupportedFeature
from minisgl_backend.messages.client import Request
from minisgl_backend.messages.tokens import count_tokens, pack_tokens, unpack_tokens
from minisgl_backend.text.chat import (
    MAX_MESSAGES_BYTES,
    MAX_TOOLS_BYTES,
    ChatOptions,
    last_content,
    read_messages,
    read_tools,
)
from minisgl_backend.text.limits import RequestLimits
from minisgl_backend.text.parameters import SamplingParams
from minisgl_backend.text.tokenizer import Tokenizer

_NO_TOOLS = (b"", b"null", b"[]")

OF_A_CHAT: dict[str, tuple[object, ...]] = {
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "add_generation_prompt": (None, True),
    "continue_final_message": (False,),
}
"""Parameters that mean something to a chat alone, with the values that ask for nothing."""


class TextPrompt(msgspec.Struct, frozen=True):
    """`text_input`, valid UTF-8 and not empty."""

    text: str

    field = "text_input"


class TokenPrompt(msgspec.Struct, frozen=True):
    """`input_ids`, each below the vocabulary's size."""

    ids: bytes  # packed int32

    field = "input_ids"


class ChatPrompt(msgspec.Struct, frozen=True):
    """`messages`, not parsed yet."""

    messages: bytes  # JSON
    tools: bytes  # JSON; empty: none
    options: ChatOptions  # but for the tools

    @property
    def has_tools(self) -> bool:
        return self.tools.strip() not in _NO_TOOLS

    field = "messages"


Prompt = TextPrompt | TokenPrompt | ChatPrompt


class PromptTokens(msgspec.Struct, frozen=True):
    """What a prompt became."""

    ids: bytes  # packed int32, 1 … RequestLimits.prompt_tokens of them, each below the vocabulary's size
    cut: bool = False  # truncate_prompt_tokens has left some out
    continued: str = ""  # of a chat with continue_final_message: the content of its last message


MAX_TRUNCATED_BYTES = 4 << 20
"""Of a text that truncate_prompt_tokens cuts: it is tokenised whole, for its end."""

LONG_PROMPT = 2_048
"""Characters of text, bytes of a chat: from here on tokenising takes about a millisecond."""


def takes_long(prompt: Prompt) -> bool:
    """Whether `encode_prompt` should run in a thread, where other streams keep their pace."""
    if isinstance(prompt, ChatPrompt):
        return (
            is_client_code(prompt)
            or bool(prompt.options.arguments)
            or len(prompt.messages) + len(prompt.tools) >= LONG_PROMPT
        )
    return isinstance(prompt, TextPrompt) and len(prompt.text) >= LONG_PROMPT


def is_client_code(prompt: Prompt) -> bool:
    """Whether `encode_prompt` runs a template that the client wrote: for seconds, when it means ill."""
    return isinstance(prompt, ChatPrompt) and prompt.options.template is not None


def read_prompt(request: Request, params: SamplingParams, tokenizer: Tokenizer, limits: RequestLimits) -> Prompt:
    """The one prompt of a request. Raises InvalidRequest or UnsupportedFeature, naming the field."""
    _only_one(request)
    if request.messages is not None:
        return read_chat(request.messages, request.tools or b"", params, limits)
    if (request.tools or b"").strip() not in _NO_TOOLS:
        raise InvalidRequest("tools", "needs messages: tools stand in the prompt of a chat")
    for name, nothing in OF_A_CHAT.items():
        if getattr(params, name) not in nothing:
            raise InvalidRequest(name, "needs messages: it shapes the prompt of a chat")
    kept = kept_tokens(params, limits)
    if request.input_ids is not None:
        return _tokens(request.input_ids, tokenizer, limits, kept)
    return _text(request.text_input or b"", tokenizer, limits, kept)


def kept_tokens(params: SamplingParams, limits: RequestLimits) -> int | None:
    """How many of a prompt's last tokens are kept (truncate_prompt_tokens). None: all. Raises InvalidRequest."""
    kept = params.truncate_prompt_tokens
    if kept is not None and kept > limits.prompt_tokens:
        raise InvalidRequest(
            "truncate_prompt_tokens", f"must be at most {limits.prompt_tokens}, the longest prompt here, got {kept}"
        )
    return limits.prompt_tokens if kept == -1 else kept


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, limits: RequestLimits, kept: int | None = None) -> PromptTokens:
    """kept: of `kept_tokens`. Slow for a long text or chat.

    Raises InvalidRequest or UnsupportedFeature, naming the field.
    """
    if isinstance(prompt, TokenPrompt):
        return PromptTokens(prompt.ids)
    ids, continued = all_tokens(prompt, tokenizer, _most_bytes(tokenizer, limits, kept))
    cut = kept is not None and len(ids) > kept
    ids = ids[-kept:] if cut and kept is not None else ids
    _check_ids(prompt.field, ids, tokenizer, limits)
    return PromptTokens(pack_tokens(ids), cut, continued)


def all_tokens(
    prompt: TextPrompt | ChatPrompt, tokenizer: Tokenizer, most_chars: int, add_special_tokens: bool = True
) -> tuple[list[int], str]:
    """The tokens of a text, or of a chat whose text has at most `most_chars`, however many; and of a chat the content
    that an answer goes on with. add_special_tokens: of a text; a chat's template writes them. Raises RequestError.
    """
    try:
        if isinstance(prompt, TextPrompt):
            return tokenizer.encode(prompt.text, add_special_tokens), ""
        return _encoded_chat(prompt, tokenizer, most_chars)
    except RequestError:
        raise
    except RecursionError:
        raise InvalidRequest(prompt.field, "is nested too deeply") from None
    except Exception as error:  # the tokenizers package raises bare Exception, and only for what it can not encode
        raise InvalidRequest(prompt.field, f"can not be tokenised: {ascii(str(error))[:200]}") from None


def _encoded_chat(prompt: ChatPrompt, tokenizer: Tokenizer, most_chars: int) -> tuple[list[int], str]:
    messages = read_messages(prompt.messages)
    options = replace(prompt.options, tools=read_tools(prompt.tools) if prompt.tools.strip() else ())
    ids = tokenizer.encode_chat(messages, options, most_chars)
    return ids, last_content(messages) if options.continue_final_message else ""


def _check_ids(field: str, ids: list[int], tokenizer: Tokenizer, limits: RequestLimits) -> None:
    if not ids:
        raise InvalidRequest(field, "holds nothing that the model's tokenizer knows")
    _refuse_many(field, len(ids), limits)
    if max(ids) >= tokenizer.vocab_size:
        raise InvalidRequest(
            field, f"holds the token {max(ids)}, which the model does not have (it has {tokenizer.vocab_size})"
        )


def _only_one(request: Request) -> None:
    given = [name for name in ("text_input", "input_ids", "messages") if getattr(request, name) is not None]
    if not given:
        raise InvalidRequest("text_input", "is missing, and so are input_ids and messages: give one of them")
    if len(given) > 1:
        others = " and ".join(given[1:])
        raise InvalidRequest(given[0], f"is given together with {others}: a request has one prompt")


def read_chat(raw: bytes, tools: bytes, params: SamplingParams, limits: RequestLimits) -> ChatPrompt:
    """Not parsed yet. Of the parameters those of a chat are read. Raises RequestError."""
    if len(raw) > MAX_MESSAGES_BYTES:  # said here already: nobody should wait for a thread to hear it
        raise InvalidRequest("messages", f"must hold at most {MAX_MESSAGES_BYTES} bytes, got {len(raw)}")
    if params.chat_template is not None and not limits.allow_client_template:
        raise UnsupportedFeature(
            "chat_template", "this server takes no templates from its clients (setting allow_client_template)"
        )
    if len(tools) > MAX_TOOLS_BYTES:
        raise InvalidRequest("tools", f"must hold at most {MAX_TOOLS_BYTES} bytes, got {len(tools)}")
    if params.continue_final_message and params.add_generation_prompt:
        raise InvalidRequest("continue_final_message", "must not be true together with add_generation_prompt")
    options = ChatOptions(
        add_generation_prompt=params.add_generation_prompt is not False and not params.continue_final_message,
        continue_final_message=params.continue_final_message,
        arguments=params.chat_template_kwargs,
        template=params.chat_template,
        control_words=limits.allow_control_tokens,
    )
    return ChatPrompt(raw, tools, options)


def _tokens(packed: bytes, tokenizer: Tokenizer, limits: RequestLimits, kept: int | None) -> TokenPrompt:
    if not packed:
        raise InvalidRequest("input_ids", "must not be empty")
    if len(packed) % 4:
        raise InvalidRequest("input_ids", f"must be packed int32, got {len(packed)} bytes")
    packed = packed if kept is None else packed[-4 * kept :]
    _refuse_many("input_ids", count_tokens(packed), limits)
    read_ids(packed, tokenizer)
    return TokenPrompt(packed)


def read_ids(packed: bytes, tokenizer: Tokenizer) -> array[int]:
    """Raises InvalidRequest for what is no id of the model."""
    ids, size = unpack_tokens(packed), tokenizer.vocab_size
    if ids and not 0 <= min(ids) <= max(ids) < size:
        place = next(place for place, token in enumerate(ids) if not 0 <= token < size)
        raise InvalidRequest("input_ids", f"must be from 0 to {size - 1}, got {ids[place]} at position {place}")
    return ids


def _text(raw: bytes, tokenizer: Tokenizer, limits: RequestLimits, kept: int | None) -> TextPrompt:
    if not raw:
        raise InvalidRequest("text_input", "must not be empty")
    most = _most_bytes(tokenizer, limits, kept)
    if len(raw) > most:  # before anything that walks over the text
        raise InvalidRequest(
            "text_input",
            f"the prompt is too long: {len(raw)} bytes; none of more than {most} bytes fits the limit of "
            f"{limits.prompt_tokens} prompt tokens",
        )
    return read_text(raw)


def read_text(raw: bytes) -> TextPrompt:
    """Raises InvalidRequest for what is not UTF-8."""
    try:
        return TextPrompt(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidRequest("text_input", f"is not valid UTF-8: {error.reason} at byte {error.start}") from None


def most_read_bytes(tokenizer: Tokenizer, limits: RequestLimits) -> int:
    """Of a text whose tokens need not all fit."""
    return max(limits.prompt_tokens * tokenizer.max_token_bytes, MAX_TRUNCATED_BYTES)


def _most_bytes(tokenizer: Tokenizer, limits: RequestLimits, kept: int | None) -> int:
    """No longer text can be tokens few enough to fit; of one that is cut to fit, what is still worth reading."""
    return limits.prompt_tokens * tokenizer.max_token_bytes if kept is None else most_read_bytes(tokenizer, limits)


def _refuse_many(field: str, tokens: int, limits: RequestLimits) -> None:
    if tokens > limits.prompt_tokens:
        raise InvalidRequest(
            field,
            f"the prompt is too long: {tokens} tokens; the {limits.bound} of {limits.sequence_tokens} tokens takes "
            f"prompts of at most {limits.prompt_tokens}",
        )
