"""The three kinds of prompt: exactly one, bounded before it is read, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.text_requests import validate_request
from fakes.tokenizers import byte_level_folder
from minisgl_backend.errors import InvalidRequest, RequestError, UnsupportedFeature
from minisgl_backend.messages.client import Request
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.text.chat import MAX_MESSAGES_BYTES, ChatOptions
from minisgl_backend.text.limits import RequestLimits
from minisgl_backend.text.parameters import parse_parameters
from minisgl_backend.text.prompt import LONG_PROMPT, read_prompt, takes_long
from minisgl_backend.text.request import Accepted, check_request
from minisgl_backend.text.tokenizer import Tokenizer

LIMITS = RequestLimits(context_tokens=128, pool_tokens=1000)
USER = {"role": "user", "content": "hi"}


def ask(tokenizer: Tokenizer, limits: RequestLimits = LIMITS, **fields: Any) -> Accepted:
    return validate_request(request(**fields), tokenizer, limits, lambda: 0)


def request(**fields: Any) -> Request:
    chat, parameters = fields.pop("chat", None), fields.pop("parameters", {})
    if chat is not None:
        fields["messages"] = json.dumps(chat).encode()
    given = {"text_input": None, "stream": False, "exclude_input_in_output": None, **fields}
    return Request(id=RequestId(1), parameters=json.dumps(parameters).encode(), **given)


def refusal(tokenizer: Tokenizer, kind: type[RequestError] = InvalidRequest, **fields: Any) -> str:
    with pytest.raises(kind) as caught:
        ask(tokenizer, **fields)
    message = str(caught.value)
    assert message.isascii() and len(message) < 400
    return message


def test_exactly_one_prompt_is_taken(byte_level: Tokenizer) -> None:
    assert refusal(byte_level) == "text_input: is missing, and so are input_ids and messages: give one of them"
    assert refusal(byte_level, text_input=b"", messages=b"") == (
        "text_input: is given together with messages: a request has one prompt"
    )
    assert refusal(byte_level, text_input=b"a", input_ids=b"", messages=b"") == (
        "text_input: is given together with input_ids and messages: a request has one prompt"
    )
    assert refusal(byte_level, input_ids=b"", messages=b"").startswith("input_ids: is given together with messages")


@pytest.mark.parametrize("nothing", [b"", b"null", b"[]", b" [] \n"])
def test_no_tools_are_none_and_wrong_ones_are_refused(byte_level: Tokenizer, nothing: bytes) -> None:
    assert ask(byte_level, text_input=b"hi", tools=nothing).num_input_tokens > 0
    assert ask(byte_level, chat=[USER], tools=nothing) == ask(byte_level, chat=[USER])
    for tools in (b"[1]", b"{}", b"x" * (20 << 20), b"not JSON"):
        assert refusal(byte_level, chat=[USER], tools=tools).startswith("tools: ")


def test_tools_need_a_chat_and_a_template_that_takes_them(byte_level: Tokenizer) -> None:
    tools = b'[{"type": "function", "function": {"name": "f"}}]'
    assert refusal(byte_level, text_input=b"hi", tools=tools).startswith("tools: needs messages")
    message = refusal(byte_level, UnsupportedFeature, chat=[USER], tools=tools)
    assert message == "tools: the chat template takes none"


# ── token ids ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ids_run_as_they_came_without_a_bos_of_ours(sentencepiece: Tokenizer) -> None:
    ids = pack_tokens([5, 6, 7])
    got = ask(sentencepiece, input_ids=ids)
    assert (got.prompt_ids, got.prompt_text) == (ids, "")


def test_ids_out_of_range_are_refused_with_the_first_place_and_the_range(byte_level: Tokenizer) -> None:
    last = byte_level.vocab_size - 1
    assert ask(byte_level, input_ids=pack_tokens([0, last])).num_input_tokens == 2
    for wrong in (last + 1, -1, 2**31 - 1, -(2**31)):
        message = refusal(byte_level, input_ids=pack_tokens([1, 2, wrong, -7]))
        assert message == f"input_ids: must be from 0 to {last}, got {wrong} at position 2"


def test_ids_obey_the_length_rule_and_none_are_no_prompt(byte_level: Tokenizer) -> None:
    assert ask(byte_level, input_ids=pack_tokens([1] * 127)).max_new_tokens == 1
    assert refusal(byte_level, input_ids=pack_tokens([-1] * 128)) == (
        "input_ids: the prompt is too long: 128 tokens; the context of 128 tokens takes prompts of at most 127"
    )
    assert refusal(byte_level, input_ids=b"") == "input_ids: must not be empty"
    assert refusal(byte_level, input_ids=b"12345") == "input_ids: must be packed int32, got 5 bytes"


# ── chats ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_chat_is_rendered_with_the_models_template_and_tokenised(byte_level: Tokenizer) -> None:
    got = ask(byte_level, chat=[USER])
    assert got.prompt_ids == pack_tokens(byte_level.encode_chat([USER]))
    assert got.prompt_text == ""
    without = ask(byte_level, chat=[USER], parameters={"add_generation_prompt": "false"})
    assert without.prompt_ids == pack_tokens(byte_level.encode_chat([USER], ChatOptions(add_generation_prompt=False)))


@pytest.mark.parametrize("kind", ["input_ids", "messages"])
def test_only_a_text_can_stand_in_front_of_its_answer(byte_level: Tokenizer, kind: str) -> None:
    fields: dict[str, Any] = {"input_ids": pack_tokens([5])} if kind == "input_ids" else {"chat": [USER]}
    for exclude in (None, True):
        assert ask(byte_level, exclude_input_in_output=exclude, **fields).prompt_text == ""
    assert refusal(byte_level, exclude_input_in_output=False, **fields) == (
        f"exclude_input_in_output: must not be false with {kind}: only text_input can be echoed"
    )


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "messages: is not valid JSON: Expecting value at character 0"),
        (b"[{]", "messages: is not valid JSON: Expecting property name"),
        (b"\xff", "messages: is not valid UTF-8"),
        (b'[{"role": "user", "content": "\\ud800"}]', "messages: holds a lone surrogate, which is no character"),
        (b'[{"role": "user", "\\uDC00": 1}]', "messages: holds a lone surrogate, which is no character"),
        (b'[{"role": "user", "role": "system"}]', "messages: names 'role' twice"),
        (b"[" * 100_000, "messages: is nested too deeply"),
        (b"[]", "messages: must be a list of at least one message"),
        (b"{}", "messages: must be a list of at least one message"),
        (b'["hi"]', "messages: message 0 must be an object with a string `role`"),
        (b'[{"role": "user", "content": 5}]', "messages: message 0: content must be a string, null or a list of parts"),
        (b"x" * (20 << 20), f"messages: must hold at most {MAX_MESSAGES_BYTES} bytes, got {20 << 20}"),
    ],
)
def test_messages_that_are_none_are_refused_by_name(byte_level: Tokenizer, raw: bytes, says: str) -> None:
    assert refusal(byte_level, messages=raw).startswith(says)


@pytest.mark.parametrize("depth", [400, 900, 100_000])
def test_a_chat_may_be_nested_as_deeply_as_python_can_walk(byte_level: Tokenizer, depth: int) -> None:
    raw = b'[{"role": "user", "content": "hi", "more": ' + b"[" * depth + b"]" * depth + b"}]"
    if depth == 400:
        assert ask(byte_level, messages=raw).num_input_tokens > 0
    else:
        assert refusal(byte_level, messages=raw) == "messages: is nested too deeply"


def test_characters_beyond_the_basic_plane_may_be_escaped(byte_level: Tokenizer) -> None:
    escaped = b'[{"role": "user", "content": "\\ud83d\\ude00"}]'
    plain = [{"role": "user", "content": "\U0001f600"}]
    assert ask(byte_level, messages=escaped).prompt_ids == pack_tokens(byte_level.encode_chat(plain))


def test_a_huge_chat_is_refused_before_anything_reads_it(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"^messages: must hold at most"):
        check_request(request(messages=b"[" * (MAX_MESSAGES_BYTES + 1)), byte_level, LIMITS)


def test_a_chat_that_renders_to_more_than_any_prompt_is_refused_before_it_is_tokenised(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("tokenised")

    monkeypatch.setattr(Tokenizer, "encode", never)
    assert "messages: the prompt is too long: 1000" in refusal(
        byte_level, chat=[{"role": "user", "content": "a" * 99_999}]
    )


def test_a_chat_obeys_the_length_rule_in_its_own_name(byte_level: Tokenizer) -> None:
    message = refusal(byte_level, chat=[{"role": "user", "content": "Q" * 200}])
    assert message.startswith("messages: the prompt is too long: ") and message.endswith("takes prompts of at most 127")


def test_what_shapes_a_chat_is_refused_without_one(byte_level: Tokenizer) -> None:
    for parameters in ({"add_generation_prompt": False}, {"chat_template_kwargs": {"a": 1}}, {"chat_template": "x"}):
        (name,) = parameters
        assert refusal(byte_level, text_input=b"hi", parameters=parameters) == (
            f"{name}: needs messages: it shapes the prompt of a chat"
        )
    for parameters in ({"add_generation_prompt": True}, {"chat_template_kwargs": {}}, {"chat_template": None}):
        assert ask(byte_level, text_input=b"hi", parameters=parameters).num_input_tokens > 0


def test_template_arguments_reach_the_template_and_may_not_take_its_own_names(tmp_path: Path) -> None:
    template = "{{ greeting | default('none') }}:{{ messages[0].content }}{{ '!' if add_generation_prompt }}"
    tokenizer = Tokenizer.load(byte_level_folder(tmp_path, chat_template=template))
    got = ask(tokenizer, chat=[USER], parameters={"chat_template_kwargs": {"greeting": "hello"}})
    assert got.prompt_ids == pack_tokens(tokenizer.encode("hello:hi!", add_special_tokens=False))
    for name in ("messages", "add_generation_prompt", "tools", "eos_token", "raise_exception", "chat_template"):
        assert refusal(tokenizer, chat=[USER], parameters={"chat_template_kwargs": {name: 1}}) == (
            f"chat_template_kwargs: must not name {name!r}, which is set by the server"
        )
    says = refusal(tokenizer, chat=[USER], parameters={"chat_template_kwargs": {"a": ["\ud800"]}})
    assert says == "chat_template_kwargs: holds a lone surrogate, which is no character"


def test_a_template_of_the_client_is_refused_unless_the_operator_allows_it(byte_level: Tokenizer) -> None:
    fields: dict[str, Any] = {"chat": [USER], "parameters": {"chat_template": "[{{ messages[0].content }}]"}}
    assert refusal(byte_level, UnsupportedFeature, **fields) == (
        "chat_template: this server takes no templates from its clients (setting allow_client_template)"
    )
    limits = RequestLimits(context_tokens=128, pool_tokens=1000, allow_client_template=True)
    got = ask(byte_level, limits, **fields)
    assert got.prompt_ids == pack_tokens(byte_level.encode("[hi]", add_special_tokens=False))
    with pytest.raises(InvalidRequest, match=r"^chat_template: is broken: "):
        ask(byte_level, limits, chat=[USER], parameters={"chat_template": "{% if %}"})
    with pytest.raises(InvalidRequest, match=r"^messages: holds nothing that the model's tokenizer knows"):
        ask(byte_level, limits, chat=[USER], parameters={"chat_template": "{# #}"})


def test_a_template_of_the_client_serves_a_model_without_one(tmp_path: Path) -> None:
    from fakes.tokenizers import byte_level, write_folder

    tokenizer = Tokenizer.load(write_folder(tmp_path, byte_level()))
    limits = RequestLimits(context_tokens=128, pool_tokens=1000, allow_client_template=True)
    assert refusal(tokenizer, chat=[USER]).startswith("messages: this model has no chat template")
    got = ask(tokenizer, limits, chat=[USER], parameters={"chat_template": "{{ messages[0].content }}"})
    assert got.prompt_ids == pack_tokens(tokenizer.encode("hi", add_special_tokens=False))


@pytest.mark.parametrize(
    ("fields", "long"),
    [
        ({"text_input": b"a" * (LONG_PROMPT - 1)}, False),
        ({"text_input": b"a" * LONG_PROMPT}, True),
        ({"messages": b" " * (LONG_PROMPT - 1)}, False),
        ({"messages": b" " * LONG_PROMPT}, True),
        ({"messages": b"[]", "parameters": {"chat_template": ""}}, True),
        ({"messages": b"[]", "parameters": {"chat_template_kwargs": {"a": "x"}}}, True),  # up to 1 MiB of them
        ({"input_ids": pack_tokens([1] * 4000)}, False),
    ],
)
def test_what_takes_long_to_tokenise_is_known_before(byte_level: Tokenizer, fields: dict[str, Any], long: bool) -> None:
    limits = RequestLimits(context_tokens=5000, pool_tokens=5000, allow_client_template=True)
    asked = request(**fields)
    assert takes_long(read_prompt(asked, parse_parameters(asked.parameters), byte_level, limits)) is long
