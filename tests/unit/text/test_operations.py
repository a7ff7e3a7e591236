"""Requests that are no generations: what they read and refuse by name; their tokens are those of a generation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fakes.text_requests import validate_request
from minisgl_backend.errors import InvalidRequest, RequestError, UnsupportedFeature
from minisgl_backend.messages.client import Request
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.messages.tokens import pack_tokens, unpack_tokens
from minisgl_backend.text import operations
from minisgl_backend.text.limits import RequestLimits
from minisgl_backend.text.prompt import LONG_PROMPT, MAX_TRUNCATED_BYTES
from minisgl_backend.text.tokenizer import Tokenizer

LIMITS = RequestLimits(context_tokens=128, pool_tokens=1000)
CHAT = [{"role": "user", "content": "the cat <|im_end|>"}]


def request(operation: str | bytes | None, parameters: Any = None, **fields: Any) -> Request:
    name = operation.encode() if isinstance(operation, str) else operation
    raw = b"" if parameters is None else json.dumps(parameters).encode()
    given = {"text_input": None, "stream": False, "exclude_input_in_output": None, **fields}
    return Request(id=RequestId(1), parameters=raw, operation=name, **given)


def read(tokenizer: Tokenizer, asked: Request) -> operations.Operation:
    return operations.read_operation(operations.operation_of(asked), asked, tokenizer, LIMITS)


def result(tokenizer: Tokenizer, operation: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    told = operations.result_of(read(tokenizer, request(operation, parameters, **fields)), tokenizer, LIMITS)
    return dict(json.loads(told))


def refusal(
    tokenizer: Tokenizer,
    operation: str | bytes,
    parameters: Any = None,
    kind: type[RequestError] = InvalidRequest,
    **fields: Any,
) -> str:
    with pytest.raises(kind) as caught:
        read(tokenizer, request(operation, parameters, **fields))
    message = str(caught.value)
    assert message.isascii() and len(message) < 400
    return message


@pytest.mark.parametrize("prompt", [{"text_input": "the cat  é".encode()}, {"messages": json.dumps(CHAT).encode()}])
def test_the_tokens_are_those_that_a_generation_would_have(byte_level: Tokenizer, prompt: dict[str, bytes]) -> None:
    generation = validate_request(request(None, **prompt), byte_level, LIMITS, lambda: 0)
    told = result(byte_level, "tokenize", **prompt)
    assert told["tokens"] == [*unpack_tokens(generation.prompt_ids)]
    assert (told["count"], told["max_model_len"], told["token_strs"]) == (len(told["tokens"]), 128, None)


def test_what_the_tokenizer_puts_around_a_text_may_be_left_out(sentencepiece: Tokenizer) -> None:
    with_them = result(sentencepiece, "tokenize", text_input=b"the cat")["tokens"]
    without = result(sentencepiece, "tokenize", {"add_special_tokens": False}, text_input=b"the cat")["tokens"]
    assert with_them == [sentencepiece.bos_token_id, *without]
    assert result(sentencepiece, "tokenize", {"add_special_tokens": None}, text_input=b"the cat")["tokens"] == with_them


def test_strings_of_the_tokens_are_the_vocabularys(byte_level: Tokenizer) -> None:
    told = result(byte_level, "tokenize", {"return_token_strs": True}, text_input=b"a cat")
    assert "".join(told["token_strs"]) == "aĠcat" and len(told["token_strs"]) == told["count"]
    assert byte_level.token_string(byte_level.vocab_size - 1) is not None


def test_a_text_that_does_not_fit_is_counted_all_the_same_and_an_empty_one_too(byte_level: Tokenizer) -> None:
    assert result(byte_level, "tokenize", text_input=b"the cat " * 900)["count"] > LIMITS.context_tokens
    assert result(byte_level, "tokenize", text_input=b"")["count"] == 0
    long = json.dumps([{"role": "user", "content": "the cat " * 900}]).encode()
    assert result(byte_level, "tokenize", messages=long)["count"] > LIMITS.context_tokens


def test_how_much_is_read_has_a_bound(byte_level: Tokenizer) -> None:
    says = refusal(byte_level, "tokenize", text_input=b"a" * (MAX_TRUNCATED_BYTES + 1))
    assert says == f"text_input: must hold at most {MAX_TRUNCATED_BYTES} bytes, got {MAX_TRUNCATED_BYTES + 1}"
    assert refusal(byte_level, "detokenize", input_ids=pack_tokens([1] * 129)) == (
        "input_ids: must hold at most 128 tokens, as prompt and answer do, got 129"
    )


def test_a_chats_template_takes_its_parameters(byte_level: Tokenizer) -> None:
    chat = {"messages": json.dumps(CHAT).encode()}
    open_ = result(byte_level, "tokenize", **chat)["tokens"]
    closed = result(byte_level, "tokenize", {"add_generation_prompt": False}, **chat)["tokens"]
    assert open_[: len(closed)] == closed and len(closed) < len(open_)
    for parameters, kind, says in (
        ({"add_special_tokens": True}, UnsupportedFeature, "add_special_tokens: must not be true with messages"),
        ({"chat_template": "x"}, UnsupportedFeature, "chat_template: this server takes no templates"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            InvalidRequest,
            "continue_final_message: must not be true together with add_generation_prompt",
        ),
    ):
        assert says in refusal(byte_level, "tokenize", parameters, kind, **chat)


@pytest.mark.parametrize("text", ["the cat", " the  cat\n", "é", "日本", ""])
def test_detokenising_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    ids = result(tokenizer, "tokenize", {"add_special_tokens": False}, text_input=text.encode())["tokens"]
    assert result(tokenizer, "detokenize", input_ids=pack_tokens(ids)) == {"prompt": text}


def test_special_tokens_are_shown_unless_they_are_to_be_left_out(byte_level: Tokenizer) -> None:
    ids = {"input_ids": pack_tokens(byte_level.encode_chat([{"role": "user", "content": "the cat"}]))}
    shown = result(byte_level, "detokenize", **ids)["prompt"]
    assert shown == byte_level.render_chat([{"role": "user", "content": "the cat"}])
    left = result(byte_level, "detokenize", {"skip_special_tokens": True}, **ids)["prompt"]
    assert "the cat" in left and len(left) < len(shown)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            request("tokenise", text_input=b"a"),
            "operation: must be one of engine, tokenize, detokenize, got 'tokenise'; did you mean 'tokenize'?",
        ),
        (request(b"\xff"), "operation: must be one of engine, tokenize, detokenize, got '\\ufffd'"),
        (request(""), "operation: must be one of engine, tokenize, detokenize, got ''"),
        (request("engine", text_input=b"a"), "text_input: is not read by the operation 'engine'"),
        (request("engine", {"seed": 1}), "seed: is not read by the operation 'engine'"),
        (request("tokenize"), "text_input: is missing, and so is messages: give one of them"),
        (request("tokenize", input_ids=b""), "input_ids: is not read by the operation 'tokenize'"),
        (
            request("tokenize", text_input=b"a", messages=b"[]"),
            "text_input: is given together with messages: give one of them",
        ),
        (request("tokenize", text_input=b"\xff"), "text_input: is not valid UTF-8: invalid start byte at byte 0"),
        (request("tokenize", text_input=b"a", tools=b"[{}]"), "tools: needs messages: it shapes the prompt of a chat"),
        (
            request("tokenize", {"continue_final_message": True}, text_input=b"a"),
            "continue_final_message: needs messages: it shapes the prompt of a chat",
        ),
        (
            request("tokenize", {"max_tokens": 5}, text_input=b"a"),
            "max_tokens: is not read by the operation 'tokenize'",
        ),
        (
            request("tokenize", {"add_special_token": True}, text_input=b"a"),
            "sampling_parameters: unknown parameter 'add_special_token' of the operation 'tokenize'; "
            "did you mean 'add_special_tokens'?",
        ),
        (
            request("tokenize", {"return_token_strs": 7}, text_input=b"a"),
            "return_token_strs: must be true or false, got 7",
        ),
        (request("detokenize"), "input_ids: is missing"),
        (request("detokenize", input_ids=b"abc"), "input_ids: must be packed int32, got 3 bytes"),
        (request("detokenize", text_input=b"a"), "text_input: is not read by the operation 'detokenize'"),
    ],
)
def test_what_is_not_read_is_refused_by_name(byte_level: Tokenizer, asked: Request, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(byte_level, asked)
    assert str(caught.value) == says


@pytest.mark.parametrize("wrong", [-1, 1 << 30])
def test_an_id_that_the_model_has_not_is_refused_by_its_place(byte_level: Tokenizer, wrong: int) -> None:
    says = refusal(byte_level, "detokenize", input_ids=pack_tokens([1, wrong]))
    assert says == f"input_ids: must be from 0 to {byte_level.vocab_size - 1}, got {wrong} at position 1"


def test_much_work_goes_to_a_thread(byte_level: Tokenizer) -> None:
    for long, given in (
        (False, request("tokenize", text_input=b"a" * (LONG_PROMPT - 1))),
        (True, request("tokenize", text_input=b"a" * LONG_PROMPT)),
    ):
        assert operations.takes_long(read(byte_level, given)) is long
    large = RequestLimits(context_tokens=1 << 20, pool_tokens=1 << 20)
    for long, count in ((False, LONG_PROMPT - 1), (True, LONG_PROMPT)):
        asked = request("detokenize", input_ids=pack_tokens([1] * count))
        assert operations.takes_long(operations.read_operation("detokenize", asked, byte_level, large)) is long
