"""Sampling parameters: what is read, what is refused, and in which words."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from minisgl_backend.errors import InvalidRequest, RequestError, UnsupportedFeature
from minisgl_backend.messages.sampling import Sampling
from minisgl_backend.text.parameters import (
    _OFF,
    MAX_PARAMETERS_BYTES,
    WORD_LISTS,
    SamplingParams,
    parse_parameters,
)
from minisgl_backend.text.sampling import resolve_sampling


def parse(**values: Any) -> SamplingParams:
    return parse_parameters(json.dumps(values).encode())


def refusal(raw: bytes) -> str:
    with pytest.raises(RequestError) as caught:
        parse_parameters(raw)
    message = str(caught.value)
    assert message.isascii() and len(message) < 300
    return message


def test_no_parameters_are_the_defaults_of_vllm() -> None:
    expected = SamplingParams(max_tokens=16, temperature=1.0, top_k=0, top_p=1.0, seed=None, ignore_eos=False)
    assert parse_parameters(b"") == parse_parameters(b"{}") == expected


@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        ({"max_tokens": "5"}, "max_tokens", 5),
        ({"max_tokens": 5.0}, "max_tokens", 5),
        ({"max_tokens": " 5.0 "}, "max_tokens", 5),
        ({"max_tokens": 2**31 - 1}, "max_tokens", 2**31 - 1),
        ({"temperature": "0.5"}, "temperature", 0.5),
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": "1e-1"}, "temperature", 0.1),
        ({"temperature": 100}, "temperature", 100.0),
        ({"top_k": "-1"}, "top_k", -1),
        ({"top_p": ".9"}, "top_p", 0.9),
        ({"top_p": 1}, "top_p", 1.0),
        ({"seed": 2**63 - 1}, "seed", 2**63 - 1),
        ({"seed": "9007199254740993"}, "seed", 9007199254740993),
        ({"seed": None}, "seed", None),
        ({"seed": "-1"}, "seed", None),
        ({"n": 128, "min_tokens": "16"}, "n", 128),
        ({"min_p": "1"}, "min_p", 1.0),
        ({"presence_penalty": -2}, "presence_penalty", -2.0),
        ({"frequency_penalty": "2.0"}, "frequency_penalty", 2.0),
        ({"repetition_penalty": 1}, "repetition_penalty", 1.0),
        ({"logprobs": True}, "logprobs", 1),
        ({"logprobs": False}, "logprobs", None),
        ({"logprobs": "20"}, "logprobs", 20),
        ({"prompt_logprobs": 0}, "prompt_logprobs", 0),
        ({"allowed_token_ids": "[5, 4]"}, "allowed_token_ids", (5, 4)),
        ({"truncate_prompt_tokens": "-1"}, "truncate_prompt_tokens", -1),
        ({"echo": "true"}, "echo", True),
        ({"skip_special_tokens": "False"}, "skip_special_tokens", False),
        ({"return_token_ids": 1}, "return_token_ids", True),
        ({"temperature": None}, "temperature", 1.0),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"ignore_eos": "True"}, "ignore_eos", True),
        ({"ignore_eos": "false"}, "ignore_eos", False),
        ({"ignore_eos": 1}, "ignore_eos", True),
        ({"stop_token_ids": [3, 1, 3]}, "stop_token_ids", (3, 1, 3)),
        ({"stop_token_ids": "[3, 1]"}, "stop_token_ids", (3, 1)),
        ({"stop_token_ids": []}, "stop_token_ids", ()),
        ({"stop_token_ids": list(range(256))}, "stop_token_ids", tuple(range(256))),
        ({"priority": "-2147483648"}, "priority", -(2**31)),
        ({"priority": 5.0}, "priority", 5),
        ({"deadline_ms": "1.5"}, "deadline_ms", 1.5),
        ({"deadline_ms": 2**31}, "deadline_ms", 2.0**31),
        ({"deadline_ms": None}, "deadline_ms", None),
        ({"add_generation_prompt": "false"}, "add_generation_prompt", False),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs", {"a": [1]}),
        ({"chat_template_kwargs": '{"a": [1]}'}, "chat_template_kwargs", {"a": [1]}),
        ({"chat_template": "{{ messages }}"}, "chat_template", "{{ messages }}"),
    ],
)
def test_numbers_and_flags_are_read_from_any_json_form(values: dict[str, Any], field: str, expected: Any) -> None:
    got = getattr(parse(**values), field)
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    ("raw", "starts"),
    [
        (b'{"max_tokens": 0}', "max_tokens: must be an integer from 1 to 2147483647, got 0"),
        (b'{"max_tokens": -3}', "max_tokens: must be an integer from 1 to 2147483647, got -3"),
        (b'{"max_tokens": 2147483648}', "max_tokens: must be an integer from 1"),
        (b'{"max_tokens": 1.5}', "max_tokens: must be an integer"),
        (b'{"max_tokens": "1.5"}', "max_tokens: must be an integer"),
        (b'{"max_tokens": true}', "max_tokens: must be an integer from 1 to 2147483647, got true"),
        (b'{"max_tokens": null}', "max_tokens: must not be null; leave it out for 16"),
        (b'{"max_tokens": [5]}', "max_tokens: must be an integer from 1 to 2147483647, got a list"),
        (b'{"max_tokens": "1_0"}', "max_tokens: must be an integer"),
        (b'{"max_tokens": "0x10"}', "max_tokens: must be an integer"),
        ('{"max_tokens": "\u0665"}'.encode(), "max_tokens: must be an integer from 1 to 2147483647, got '\\u0665'"),
        (
            b'{"max_tokens": ' + b"9" * 4000 + b"}",
            "max_tokens: must be an integer from 1 to 2147483647, got an integer",
        ),
        (b'{"temperature": -0.1}', "temperature: must be a number in [0, 100], got -0.1"),
        (b'{"temperature": 100.1}', "temperature: must be a number in [0, 100]"),
        (b'{"temperature": "hot"}', "temperature: must be a number in [0, 100], got 'hot'"),
        (b'{"temperature": {}}', "temperature: must be a number in [0, 100], got an object"),
        (b'{"temperature": "' + b"1" * 5000 + b'"}', "temperature: must be a number in [0, 100], got '1111"),
        (b'{"top_k": -2}', "top_k: must be an integer from -1 to 2147483647, got -2"),
        (b'{"top_p": 0}', "top_p: must be a number in (0, 1], got 0"),
        (b'{"top_p": 1.0000001}', "top_p: must be a number in (0, 1]"),
        (b'{"top_k": Infinity}', "top_k: must be an integer from -1 to 2147483647, got inf"),
        (b'{"max_tokens": NaN}', "max_tokens: must be an integer from 1 to 2147483647, got nan"),
        (b'{"max_tokens": "1e999"}', "max_tokens: must be an integer from 1 to 2147483647, got '1e999'"),
        (b'{"seed": -2}', "seed: must be an integer from 0 to 9223372036854775807, got -2"),
        (b'{"n": 0}', "n: must be an integer from 1 to 128, got 0"),
        (b'{"n": 5000000}', "n: must be an integer from 1 to 128, got 5000000"),
        (b'{"n": 2, "temperature": 0}', "n: must be 1 when temperature is 0, where all answers are the same, got 2"),
        (b'{"min_tokens": 17}', "min_tokens: must be at most max_tokens = 16, got 17"),
        (b'{"min_tokens": -1}', "min_tokens: must be an integer from 0 to 2147483647, got -1"),
        (b'{"min_p": 1.01}', "min_p: must be a number in [0, 1], got 1.01"),
        (b'{"presence_penalty": NaN}', "presence_penalty: must be a number in [-2, 2], got nan"),
        (b'{"frequency_penalty": -2.1}', "frequency_penalty: must be a number in [-2, 2], got -2.1"),
        (b'{"repetition_penalty": 0}', "repetition_penalty: must be a number in [0.01, 100], got 0"),
        (b'{"repetition_penalty": Infinity}', "repetition_penalty: must be a number in [0.01, 100], got inf"),
        (b'{"logprobs": -1}', "logprobs: must be an integer from 0 to 20, got -1"),
        (b'{"logprobs": 21}', "logprobs: must be an integer from 0 to 20, got 21"),
        (b'{"prompt_logprobs": 1000000}', "prompt_logprobs: must be an integer from 0 to 20, got 1000000"),
        (b'{"top_logprobs": 1000000}', "top_logprobs: is no parameter here: give the number as logprobs"),
        (b'{"logit_bias": {"cat": -10}}', "logit_bias: must have token ids for keys, got 'cat'"),
        (b'{"logit_bias": {"-1": 1}}', "logit_bias: must have token ids for keys, got '-1'"),
        (b'{"logit_bias": {"12": "x"}}', "logit_bias: must hold numbers in [-100, 100], got 'x' for 12"),
        (b'{"logit_bias": {"12": 100.5}}', "logit_bias: must hold numbers in [-100, 100], got 100.5 for 12"),
        (b'{"logit_bias": {"1": 1, "01": 1}}', "logit_bias: names the token 1 twice"),
        (b'{"logit_bias": [1]}', "logit_bias: must be an object, got a list"),
        (b'{"allowed_token_ids": []}', "allowed_token_ids: must not be empty"),
        (b'{"truncate_prompt_tokens": 0}', "truncate_prompt_tokens: must be -1 or an integer from 1 to 2147483647"),
        (b'{"echo": "perhaps"}', "echo: must be true or false, got 'perhaps'"),
        (b'{"seed": 9223372036854775808}', "seed: must be an integer from 0"),
        (b'{"ignore_eos": "maybe"}', "ignore_eos: must be true or false, got 'maybe'"),
        (b'{"ignore_eos": 2}', "ignore_eos: must be true or false, got 2"),
        (b'{"ignore_eos": 1.0}', "ignore_eos: must be true or false, got 1.0"),
        (b'{"stop_token_ids": 5}', "stop_token_ids: must be a list of token ids, got 5"),
        (b'{"stop_token_ids": {}}', "stop_token_ids: must be a list of token ids, got an object"),
        (b'{"stop_token_ids": "[1"}', "stop_token_ids: is not valid JSON"),
        (b'{"stop_token_ids": "7"}', "stop_token_ids: must be a list of token ids, got 7"),
        (b'{"stop_token_ids": "' + b" " * 5000 + b'[1]"}', "stop_token_ids: must hold at most 4098 bytes"),
        (
            b'{"stop_token_ids": [1, "2"]}',
            "stop_token_ids: must hold integers from 0 to 2147483647, got '2' at position 1",
        ),
        (
            b'{"stop_token_ids": [true]}',
            "stop_token_ids: must hold integers from 0 to 2147483647, got true at position 0",
        ),
        (b'{"stop_token_ids": [-1]}', "stop_token_ids: must hold integers from 0 to 2147483647, got -1 at position 0"),
        (b'{"stop_token_ids": [1.0]}', "stop_token_ids: must hold integers from 0"),
        (b'{"stop_token_ids": [' + b"1," * 256 + b"1]}", "stop_token_ids: must hold at most 256 token ids, got 257"),
        (b'{"priority": 2147483648}', "priority: must be an integer from -2147483648 to 2147483647"),
        (b'{"deadline_ms": -1}', "deadline_ms: must be a number in [0, 2.14748e+09], got -1"),
        (b'{"chat_template_kwargs": [1]}', "chat_template_kwargs: must be an object, got a list"),
        (b'{"chat_template_kwargs": "[1]"}', "chat_template_kwargs: must be a JSON object, got a list"),
        (b'{"chat_template_kwargs": {"\\ud800": 1}}', "chat_template_kwargs: holds a lone surrogate"),
        (b'{"chat_template": 5}', "chat_template: must be a string, got 5"),
        (b'{"chat_template": "\\udfff"}', "chat_template: holds a lone surrogate"),
        (
            b'{"stream": true}',
            "stream: is no sampling parameter: give it as an input or parameter of the request itself",
        ),
        (b'{"timeout": 5}', "timeout: is no sampling parameter"),
        (
            b'{"return_logprob": 1}',
            "sampling_parameters: unknown parameter 'return_logprob'; did you mean 'return_logprobs'?",
        ),
        (b'{"stop_word": 1}', "sampling_parameters: unknown parameter 'stop_word'; did you mean 'stop_words'?"),
        (b"[1]", "sampling_parameters: must be a JSON object, got a list"),
        (b"3", "sampling_parameters: must be a JSON object, got 3"),
        (b"null", "sampling_parameters: must be a JSON object, got null"),
        (b"{", "sampling_parameters: is not valid JSON: Expecting property name"),
        (b"{'a': 1}", "sampling_parameters: is not valid JSON"),
        (b'{"a": 1} x', "sampling_parameters: is not valid JSON: Extra data at character 9"),
        (b"\xef\xbb\xbf{}", "sampling_parameters: is not valid JSON"),
        (b'{"\xff": 1}', "sampling_parameters: is not valid UTF-8"),
        (b'{"a": ' + b"[" * 200_000, "sampling_parameters: is nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "sampling_parameters: holds an integer with too many digits"),
        (b'{"seed": 1, "seed": 1}', "sampling_parameters: names 'seed' twice"),
        (b'{"stop": {"a": 1, "a": 2}}', "sampling_parameters: names 'a' twice"),
        (b'{"temprature": 1}', "sampling_parameters: unknown parameter 'temprature'; did you mean 'temperature'?"),
        (
            b'{"max_new_tokens": 1}',
            "sampling_parameters: unknown parameter 'max_new_tokens'; did you mean 'max_tokens'?",
        ),
        (
            b'{"zzz": 1}',
            "sampling_parameters: unknown parameter 'zzz'; docs/parameters.md lists what is known",
        ),
        (b'{"\\ud800": 1}', "sampling_parameters: unknown parameter '\\ud800'"),
        (b'{"' + b"k" * 100_000 + b'": 1}', "sampling_parameters: unknown parameter 'kkkk"),
        (b" " * (MAX_PARAMETERS_BYTES + 1), "sampling_parameters: must hold at most 1048576 bytes, got 1048577"),
    ],
)
def test_a_refusal_names_the_field_and_the_range(raw: bytes, starts: str) -> None:
    assert refusal(raw).startswith(starts)


@pytest.mark.parametrize("field", sorted(_OFF))
def test_a_known_parameter_that_is_not_built_is_refused_unless_it_asks_for_nothing(field: str) -> None:
    for off in (None, *_OFF[field]):
        assert parse(**{field: off}) == SamplingParams()
    for value in ("", "x", 0.25, 7, ["a"], {"a": 1}, not _OFF[field][0] if _OFF[field] == (False,) else -1):
        with pytest.raises(UnsupportedFeature) as caught:
            parse(**{field: value})
        assert caught.value.field == field
        assert str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize("field", WORD_LISTS)
def test_words_are_a_string_or_a_list_and_an_empty_one_is_none(field: str) -> None:
    name = "stop" if field == "stop_words" else field
    for nothing in (None, "", [], ["", ""]):
        assert parse(**{field: nothing}) == SamplingParams()
    assert getattr(parse(**{field: "END"}), name) == ("END",)
    assert getattr(parse(**{field: '["END"]'}), name) == ('["END"]',), "a string is one word whatever it holds"
    assert getattr(parse(**{field: ["b", "", "a", "b"]}), name) == ("b", "a")
    for words in ([0], 0, False, {}, ["a", None], [["a"]]):
        assert refusal(json.dumps({field: words}).encode()).startswith(f"{field}: must ")
    assert refusal(json.dumps({field: [str(i) for i in range(300)]}).encode()).startswith(f"{field}: must hold at most")
    assert refusal(json.dumps({field: "x" * 10_000}).encode()).startswith(f"{field}: must hold at most")
    assert refusal(json.dumps({field: ["\ud800"]}).encode()).startswith(f"{field}: holds a lone surrogate")


def test_stop_words_join_stop() -> None:
    assert parse(stop="a", stop_words=["b", "a", "c"]).stop == ("a", "b", "c")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"12": 1.5, "7": -100}, {12: 1.5, 7: -100.0}),
        ('{"12": "1e1"}', {12: 10.0}),
        ({}, {}),
    ],
)
def test_logit_bias_has_ids_for_keys(values: Any, expected: dict[int, float]) -> None:
    assert parse(logit_bias=values).logit_bias == expected
    assert parse_parameters(SamplingParams(logit_bias=expected).to_json()).logit_bias == expected


@pytest.mark.parametrize(
    "values", [{"n": "1"}, {"n": 1.0}, {"presence_penalty": "0.0"}, {"use_beam_search": "false"}, {"best_of": "1.0"}]
)
def test_values_that_ask_for_nothing_are_read_in_any_form(values: dict[str, Any]) -> None:
    assert parse(**values) == SamplingParams()


@pytest.mark.parametrize("values", [{"best_of": True}, {"top_logprobs": False}, {"detokenize": False}])
def test_an_off_value_of_another_type_is_not_off(values: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFeature):
        parse(**values)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(max_tokens=3, temperature=0.1, top_k=7, top_p=0.3, seed=2**63 - 1, ignore_eos=True),
        SamplingParams(temperature=1e-300, top_k=-1),
        SamplingParams(stop_token_ids=(5, 6), priority=-3, deadline_ms=0.5),
        SamplingParams(n=3, stop=("a", "b"), bad_words=("x",), logit_bias={3: -1.0}, allowed_token_ids=(3, 4)),
        SamplingParams(logprobs=0, prompt_logprobs=20, echo=True, truncate_prompt_tokens=-1, min_tokens=16, min_p=0.5),
        SamplingParams(presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=1.1, skip_special_tokens=False),
        SamplingParams(add_generation_prompt=False, chat_template_kwargs={"a": None}, chat_template="x"),
    ],
)
def test_params_survive_their_json(params: SamplingParams) -> None:
    assert parse_parameters(params.to_json()) == params


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(temperature=float("nan")), "temperature"),
        (SamplingParams(top_p=float("inf")), "top_p"),
        (SamplingParams(max_tokens=0), "max_tokens"),
        (SamplingParams(max_tokens=None), "max_tokens"),  # type: ignore[arg-type]
        (SamplingParams(seed="x\ud800"), "seed"),  # type: ignore[arg-type]
        (SamplingParams(top_k={1, 2}), "top_k"),  # type: ignore[arg-type]
        (SamplingParams(top_k=10**5000), "top_k"),
    ],
)
def test_wrong_params_are_refused_on_their_way_through_json(params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_parameters(params.to_json())
    assert caught.value.field == field


def test_params_are_frozen_and_take_keywords_only() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().seed = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(3)  # type: ignore[misc]
    assert msgspec.structs.replace(SamplingParams(), seed=3).seed == 3


GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=5, sample_index=0)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": -0.0},
        {"temperature": 1e-5, "top_k": 40},
        {"temperature": 5e-324},
        {"temperature": 100, "top_k": 1},
        {"top_p": 1e-9},
        {"top_p": 5e-324},
        {"top_p": 0.01},
    ],
)
def test_what_can_only_give_the_best_token_is_plain_greedy(values: dict[str, Any]) -> None:
    assert resolve_sampling(parse(**values), vocab_size=100, seed=5) == GREEDY


@pytest.mark.parametrize(("top_k", "expected"), [(-1, 0), (0, 0), (2, 2), (99, 99), (100, 0), (101, 0), (2**31 - 1, 0)])
def test_top_k_counts_only_below_the_vocabulary(top_k: int, expected: int) -> None:
    assert resolve_sampling(parse(top_k=top_k), vocab_size=100, seed=5).top_k == expected


def test_the_requests_own_seed_wins() -> None:
    assert resolve_sampling(parse(seed=0), vocab_size=100, seed=5).seed == 0
    assert resolve_sampling(parse(), vocab_size=100, seed=5).seed == 5
