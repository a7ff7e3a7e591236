"""Requests that are no generations: they name an operation, and are answered with one JSON object.

    Request ── operation_of ──► its name ── read_operation ──► Tokenize | Detokenize ── result_of ──► JSON

Where it stands in the flow: the text actor asks `operation_of` for every request with an `operation`, before anything
else of it is read. `engine` is answered by the actor itself; the others are read here at once (cheap) and worked out
next, where `takes_long` says so in a thread. Pure, but for the tokenizer's caches.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.messages.client import Request
from minisgl_backend.messages.tokens import count_tokens, unpack_tokens
from minisgl_backend.text import prompt as prompts
from minisgl_backend.text.detokenizer import decode
from minisgl_backend.text.limits import RequestLimits
from minisgl_backend.text.parameters import MAX_PARAMETERS_BYTES, READERS, SamplingParams
from minisgl_backend.text.tokenizer import Tokenizer
from minisgl_backend.text.values import flag, json_object, shown

ENGINE, TOKENIZE, DETOKENIZE = "engine", "tokenize", "detokenize"
OPERATIONS = (ENGINE, TOKENIZE, DETOKENIZE)

_INPUTS = {ENGINE: (), TOKENIZE: ("text_input", "messages", "tools"), DETOKENIZE: ("input_ids",)}
_PARAMETERS: dict[str, Mapping[str, Callable[[Any], Any]]] = {
    ENGINE: {},
    TOKENIZE: {
        "add_special_tokens": partial(flag, "add_special_tokens"),
        "return_token_strs": partial(flag, "return_token_strs"),
        **{name: READERS[name] for name in prompts.OF_A_CHAT},
    },
    DETOKENIZE: {"skip_special_tokens": partial(flag, "skip_special_tokens")},
}


class Tokenize(msgspec.Struct, frozen=True):
    """A text or a chat → its tokens, as a generation would have them."""

    prompt: prompts.TextPrompt | prompts.ChatPrompt
    add_special_tokens: bool  # of a text: those that the tokenizer puts around it
    token_strings: bool  # are told, too


class Detokenize(msgspec.Struct, frozen=True):
    """Tokens → their text."""

    ids: bytes  # packed int32, each below the vocabulary's size
    skip_special_tokens: bool


Operation = Tokenize | Detokenize


def operation_of(request: Request) -> str:
    """Which one a request asks for. Raises InvalidRequest for what is none, and for inputs that it does not read."""
    name = (request.operation or b"").decode("utf-8", "replace")
    if name not in OPERATIONS:
        raise InvalidRequest(
            "operation", f"must be one of {', '.join(OPERATIONS)}, got {shown(name)}{_hint(name, OPERATIONS)}"
        )
    for field in ("text_input", "input_ids", "messages", "tools"):
        if getattr(request, field) is not None and field not in _INPUTS[name]:
            raise InvalidRequest(field, f"is not read by the operation {name!r}")
    if name == ENGINE:
        _parameters(name, request.parameters)
    return name


def read_operation(name: str, request: Request, tokenizer: Tokenizer, limits: RequestLimits) -> Operation:
    """`name`: of `operation_of`, but for `engine`. Raises RequestError, naming the field."""
    given = _parameters(name, request.parameters)
    if name == DETOKENIZE:
        return _detokenize(request.input_ids, given, tokenizer, limits)
    strings = given.pop("return_token_strs", False)
    special = given.pop("add_special_tokens", None)
    params = SamplingParams(**given)
    if request.messages is not None and request.text_input is not None:
        raise InvalidRequest("text_input", "is given together with messages: give one of them")
    if request.messages is not None:
        if special:
            raise UnsupportedFeature("add_special_tokens", "must not be true with messages: the template writes them")
        chat = prompts.read_chat(request.messages, request.tools or b"", params, limits)
        return Tokenize(chat, False, strings)
    for field in ("tools", *prompts.OF_A_CHAT):
        if field in given or getattr(request, field, None) is not None:
            raise InvalidRequest(field, "needs messages: it shapes the prompt of a chat")
    return Tokenize(_text(request.text_input, tokenizer, limits), special is not False, strings)


def takes_long(operation: Operation) -> bool:
    """Whether `result_of` should run in a thread, where other streams keep their pace."""
    if isinstance(operation, Detokenize):
        return count_tokens(operation.ids) >= prompts.LONG_PROMPT
    return prompts.takes_long(operation.prompt)


def is_client_code(operation: Operation) -> bool:
    """Whether `result_of` runs a template that the client wrote."""
    return isinstance(operation, Tokenize) and prompts.is_client_code(operation.prompt)


def result_of(operation: Operation, tokenizer: Tokenizer, limits: RequestLimits) -> bytes:
    """JSON, in vLLM's shape. Slow for much text. Raises RequestError."""
    if isinstance(operation, Detokenize):
        ids = unpack_tokens(operation.ids)
        text = decode(tokenizer, ids, skip_special_tokens=operation.skip_special_tokens)
        return msgspec.json.encode({"prompt": text})
    most = prompts.most_read_bytes(tokenizer, limits)
    tokens, _ = prompts.all_tokens(operation.prompt, tokenizer, most, operation.add_special_tokens)
    return msgspec.json.encode(
        {
            "count": len(tokens),
            "max_model_len": limits.sequence_tokens,
            "tokens": tokens,
            "token_strs": [tokenizer.token_string(i) for i in tokens] if operation.token_strings else None,
        }
    )


def _text(raw: bytes | None, tokenizer: Tokenizer, limits: RequestLimits) -> prompts.TextPrompt:
    """May be empty, and hold more than fits: that is what the answer tells."""
    if raw is None:
        raise InvalidRequest("text_input", "is missing, and so is messages: give one of them")
    most = prompts.most_read_bytes(tokenizer, limits)
    if len(raw) > most:  # before anything that walks over the text
        raise InvalidRequest("text_input", f"must hold at most {most} bytes, got {len(raw)}")
    return prompts.read_text(raw)


def _detokenize(
    packed: bytes | None, given: Mapping[str, Any], tokenizer: Tokenizer, limits: RequestLimits
) -> Detokenize:
    if packed is None:
        raise InvalidRequest("input_ids", "is missing")
    if len(packed) % 4:
        raise InvalidRequest("input_ids", f"must be packed int32, got {len(packed)} bytes")
    if count_tokens(packed) > limits.sequence_tokens:
        raise InvalidRequest(
            "input_ids",
            f"must hold at most {limits.sequence_tokens} tokens, as prompt and answer do, got {count_tokens(packed)}",
        )
    prompts.read_ids(packed, tokenizer)
    return Detokenize(packed, given.get("skip_special_tokens", False))


def _parameters(name: str, raw: bytes) -> dict[str, Any]:
    """Those of a request, read; null is the same as not given. Raises InvalidRequest for what is not read."""
    values = json_object(raw, "sampling_parameters", MAX_PARAMETERS_BYTES) if raw else {}
    readers = _PARAMETERS[name]
    for key in values:
        if key in READERS and key not in readers:
            raise InvalidRequest(key, f"is not read by the operation {name!r}")
        if key not in readers:
            says = f"unknown parameter {shown(key)} of the operation {name!r}{_hint(key, readers)}"
            raise InvalidRequest("sampling_parameters", says)
    return {key: readers[key](value) for key, value in values.items() if value is not None}


def _hint(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word[:64], [*known], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
