from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from minisgl_backend.text.chat import MAX_MESSAGES_BYTES
from minisgl_client.gateway.errors import ApiError
from minisgl_client.gateway.fields import NO_EFFECT, REFUSED, Body, ChatBody, CompletionBody, read_body

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def refusal(body: dict[str, Any] | bytes, kind: type[Body] = CompletionBody) -> ApiError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        read_body(raw, kind)
    return caught.value


def test_a_body_is_read_and_null_is_the_same_as_not_given() -> None:
    body = read_body(
        b'{"prompt": "x", "n": null, "temperature": 1, "stop": ["a"], "logit_bias": {"5": -1}}', CompletionBody
    )
    assert body == CompletionBody(prompt="x", temperature=1.0, stop=["a"], logit_bias={"5": -1.0})


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1]", b"\xff", b'{"prompt": NaN}', b"[" * 100_000, b'{"prompt": "\\ud800"}']
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    error = refusal(raw)
    assert (error.status, error.code, error.param) == (400, "invalid_json", None)


def test_messages_that_are_too_long_for_the_engine_are_refused_before_anybody_looks_at_them() -> None:
    long = [1] * (MAX_MESSAGES_BYTES // 3)
    error = refusal({"messages": [*long, 1]}, ChatBody)
    assert (error.status, error.param) == (400, "messages")
    assert str(error).startswith(f"messages: must hold at most {MAX_MESSAGES_BYTES} bytes, got ")
    assert refusal({"messages": long, "user": "x" * 100}, ChatBody).param == "messages[0]", "now they are looked at"
    for raw in (b"[" + b"1," * MAX_MESSAGES_BYTES + b"1]", b" " * (MAX_MESSAGES_BYTES + 1)):
        assert refusal(raw, ChatBody).code == "invalid_json"


def test_an_unknown_field_is_refused_with_the_nearest_known_one() -> None:
    error = refusal({"prompt": "x", "temprature": 1})
    assert error.param == "temprature" and error.code == "unknown_parameter"
    assert str(error) == "unknown field 'temprature'; did you mean 'temperature'?"


def test_an_unknown_field_of_any_length_is_compared_by_its_begin() -> None:
    """Else the loop, and everybody's stream, stands still for a second and a half for one body of 8 MiB."""
    body = json.dumps({"prompt": "x", "ab" * (1 << 17): 1}).encode()
    tracemalloc.start()
    try:
        error = refusal(body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error.param == "ab" * 40 and peak_bytes < 10 * len(body), "a comparison takes a list entry a character"


def test_a_field_of_the_other_endpoint_is_unknown() -> None:
    assert refusal({"prompt": "x", "messages": []}).param == "messages"
    assert refusal({**CHAT, "echo": True}, ChatBody).param == "echo"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": "x", "n": "2"}, "n", "n: expected `int | null`, got `str`"),
        ({"prompt": "x", "stop": [1]}, "stop[0]", "stop[0]: expected `str`, got `int`"),
        ({"prompt": "x", "logit_bias": {"1": "x"}}, "logit_bias", "logit_bias: expected `float`, got `str`"),
        ({"prompt": "x", "stream": 1}, "stream", "stream: expected `bool | null`, got `int`"),
        ({}, "prompt", "prompt: is required"),
    ],
)
def test_a_wrong_type_is_told_by_its_place(body: dict[str, Any], param: str, words: str) -> None:
    error = refusal(body)
    assert (error.status, error.param, str(error)) == (400, param, words)


def test_options_of_a_stream_have_names_too() -> None:
    error = refusal({**CHAT, "stream": True, "stream_options": {"usage": True}}, ChatBody)
    assert error.param == "stream_options" and "usage" in str(error)


@pytest.mark.parametrize("name", sorted(NO_EFFECT))
def test_what_can_change_no_answer_is_passed_over(name: str) -> None:
    assert read_body(json.dumps({**CHAT, name: {"any": 1}}).encode(), ChatBody) == ChatBody(messages=CHAT["messages"])


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_change_the_answer_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    off, reason = REFUSED[name]
    for value in (None, *off):
        assert read_body(json.dumps({**CHAT, name: value}).encode(), ChatBody) == ChatBody(messages=CHAT["messages"])
    error = refusal({**CHAT, name: "something"}, ChatBody)
    assert (error.param, error.code) == (name, "unsupported") and reason in str(error)


def test_a_truth_value_is_no_number() -> None:
    assert refusal({"prompt": "x", "best_of": True}).param == "best_of"


def test_no_field_is_read_and_refused() -> None:
    read = {*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__}
    assert not read & (NO_EFFECT | REFUSED.keys()) and not NO_EFFECT & REFUSED.keys()
