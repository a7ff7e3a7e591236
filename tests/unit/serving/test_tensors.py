"""Triton's tensors → Request: shapes, types, exact bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fakes.triton_stub import FakeStub, request, strings
from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.messages.client import Request
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.serving.outputs import Wanted
from minisgl_backend.serving.tensors import read_request
from minisgl_backend.text.parameters import BOOL_OPTIONS


def read(prompt: Any = b"hello", **fields: Any) -> Request:
    return read_request(request(FakeStub(), prompt, **fields), RequestId(7))[0]


def wanted(**fields: Any) -> Wanted:
    return read_request(request(FakeStub(), **fields), RequestId(7))[1]


def ids(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def test_a_bare_prompt_is_a_request_that_does_not_stream() -> None:
    assert read() == Request(RequestId(7), b"hello", b"", False, None)


def test_everything_given_arrives() -> None:
    tensors = {"exclude_input_in_output": np.array([False]), "sampling_parameters": strings(b'{"top_k":1}')}
    assert read(stream=True, tensors=tensors) == Request(RequestId(7), b"hello", b'{"top_k":1}', True, False)


@pytest.mark.parametrize("prompt", [b"a\x00b\x00", b"", "é😀".encode(), b"\xff\xfe", b"\x00"])
@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
def test_bytes_arrive_exactly_in_any_shape_of_one_element(prompt: bytes, shape: tuple[int, ...]) -> None:
    assert read(tensors={"text_input": strings(prompt, shape=shape)}).text_input == prompt


def test_a_python_string_in_a_tensor_is_taken_as_utf8() -> None:
    assert read("é").text_input == "é".encode()
    with pytest.raises(InvalidRequest, match=r"^text_input: is not valid UTF-8"):
        read("\ud83d")


@pytest.mark.parametrize("values", [(), (b"a", b"b")])
def test_no_element_or_several_are_refused(values: tuple[bytes, ...]) -> None:
    with pytest.raises(InvalidRequest, match=r"^text_input: must hold exactly one value, got shape \["):
        read(tensors={"text_input": strings(*values)})


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("text_input", np.array([1], dtype=np.int32)),
        ("text_input", strings(None)),
        ("sampling_parameters", np.array([True])),
        ("stream", strings(b"true")),
        ("stream", np.array([1], dtype=np.int64)),
        ("exclude_input_in_output", np.array([0.0], dtype=np.float32)),
        ("stream", np.array([True, False])),
        ("text_input", RuntimeError("no such memory")),
        ("input_ids", np.array([1], dtype=np.int64)),
        ("input_ids", strings(b"1")),
        ("messages", np.array([1], dtype=np.int32)),
        ("messages", strings(b"[]", b"[]")),
        ("tools", strings()),
        ("image", np.array([1], dtype=np.uint8)),
        ("stop", np.array([1], dtype=np.int32)),
        ("stop_words", strings(b"a", None)),
        ("bad_words", np.array([True])),
        ("stop_token_ids", np.array([1.0], dtype=np.float32)),
        *((name, np.array([True, True])) for name in BOOL_OPTIONS),
        *((name, strings(b"true")) for name in BOOL_OPTIONS),
    ],
)
def test_a_wrong_type_or_shape_is_refused_by_name(name: str, array: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}: "):
        read(tensors={name: array})


def test_each_kind_of_prompt_passes_as_it_came_and_is_judged_by_the_engine() -> None:
    tensors = {"text_input": None, "input_ids": ids(1, -2, 2**31 - 1)}
    assert read(tensors=tensors).input_ids == pack_tokens([1, -2, 2**31 - 1])
    assert read(tensors={"text_input": None, "input_ids": ids(1, 2).reshape(1, 2)}).input_ids == pack_tokens([1, 2])
    assert read(tensors={"text_input": None, "messages": strings(b"[\xff")}).messages == b"[\xff"
    assert read(tensors={"tools": strings(b"[]")}).tools == b"[]"
    nothing = read(tensors={"text_input": None})
    assert (nothing.text_input, nothing.input_ids, nothing.messages, nothing.tools) == (None, None, None, None)
    assert read(tensors={"input_ids": ids()}).input_ids == b""


def test_an_input_that_the_model_does_not_declare_is_refused() -> None:
    with pytest.raises(UnsupportedFeature, match=r"^prompt: is not an input of this model"):
        read(tensors={"prompt": strings(b"...")})


def test_images_are_refused_and_their_empty_string_is_none() -> None:
    with pytest.raises(UnsupportedFeature, match=r"^image: this model takes no images"):
        read(tensors={"image": strings(b"", b"iVBORw0KGgo" * 500_000)})
    for empty in (strings(), strings(b""), strings(b"", b"")):
        assert read(tensors={"image": empty}).text_input == b"hello"


def test_list_inputs_become_members_of_the_sampling_parameters_and_empty_ones_do_not() -> None:
    tensors = {
        "stop": strings(b"", b"END", b""),
        "stop_words": strings(b""),
        "bad_words": strings(),
        "stop_token_ids": ids(5, 6),
    }
    assert json.loads(read(tensors=tensors).parameters) == {"stop": ["END"], "stop_token_ids": [5, 6]}
    assert read(tensors={"stop_words": strings(b""), "stop_token_ids": ids()}).parameters == b""


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"stop": strings(b"\xff")}, "stop: is not valid UTF-8"),
        ({"bad_words": strings(b"x" * (1 << 20), b"y")}, "bad_words: must hold at most 1048576 bytes"),
        ({"stop_token_ids": ids(3, -1)}, "stop_token_ids: must hold integers from 0 to 2147483647, got -1 at pos"),
        ({"stop_token_ids": ids(*range(257))}, "stop_token_ids: must hold at most 256 token ids, got 257"),
    ],
)
def test_a_list_that_can_not_be_one_is_refused(tensors: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(tensors=tensors)
    assert str(caught.value).startswith(says)


def test_by_default_a_client_gets_the_text_and_the_reason_and_no_more() -> None:
    assert wanted() == Wanted(True, False, False, False, False)


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ("return_finish_reason", "finish_reason"),
        ("return_num_input_tokens", "num_input_tokens"),
        ("return_num_output_tokens", "num_output_tokens"),
        ("return_output_ids", "output_ids"),
        ("return_perf_metrics", "perf_metrics"),
        ("return_logprobs", "logprobs"),
        ("return_cumulative_logprob", "cumulative_logprob"),
        ("parse_output", "parsed"),
    ],
)
def test_each_output_is_asked_for_in_either_place(option: str, field: str) -> None:
    for value in (True, False):
        assert getattr(wanted(tensors={option: np.array([value])}), field) is value
        assert getattr(wanted(params={option: value}), field) is value
        assert getattr(wanted(params={option: str(value).lower()}), field) is value


def test_a_cumulative_logprob_is_known_to_the_engine_which_computes_it() -> None:
    assert read(params={"return_cumulative_logprob": True}).return_cumulative_logprob
    assert read(params={"return_cumulative_logprob": False}) == read()


def test_a_parsed_answer_is_asked_of_the_engine() -> None:
    assert read(params={"parse_output": "true"}).parse_output
    assert read(params={"parse_output": False}) == read()


def test_a_priority_is_merged_like_any_sampling_parameter_and_the_timeout_of_either_place_counts() -> None:
    assert read(params={"priority": "-3"}).parameters == b'{"priority": "-3"}'
    with pytest.raises(InvalidRequest, match=r"^priority: has different values"):
        read(tensors={"sampling_parameters": strings(b'{"priority": 5}')}, params={"priority": 0})
    assert read(timeout_us=5).timeout_us == 5
    assert read(timeout_us=5, params={"timeout": 5}).timeout_us == 5
    with pytest.raises(InvalidRequest, match=r"^timeout: "):
        read(timeout_us=5, params={"timeout": 6})


@pytest.mark.parametrize("fields", [{"correlation": 7}, {"correlation": "abc"}, {"sequence_flags": 1}])
def test_sequences_are_refused_and_not_ignored(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFeature, match=r"^sequence_id: "):
        read(**fields)


def test_both_parameter_places_are_read() -> None:
    tensors = {"sampling_parameters": strings(b'{"top_k":1}')}
    merged = read(tensors=tensors, params={"temperature": 0.5, "stream": "true"})
    assert merged.parameters == b'{"top_k": 1, "temperature": 0.5}'
    assert merged.stream is True
