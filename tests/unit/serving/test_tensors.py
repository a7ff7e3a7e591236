"""Triton's tensors → Request: shapes, types, exact bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fakes.triton_stub import FakeStub, request, strings
from minisgl_backend.errors import InvalidRequest, RequestError, UnsupportedFeature
from minisgl_backend.messages.client import Request
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.serving.tensors import read_request


def read(prompt: Any = b"hello", **fields: Any) -> Request:
    return read_request(request(FakeStub(), prompt, **fields), RequestId(7))


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
    ],
)
def test_a_wrong_type_or_shape_is_refused_by_name(name: str, array: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}: "):
        read(tensors={name: array})


def test_a_missing_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^text_input: is missing"):
        read(tensors={"text_input": None})


def test_an_input_that_the_model_does_not_declare_is_refused() -> None:
    with pytest.raises(UnsupportedFeature, match=r"^image: "):
        read(tensors={"image": strings(b"...")})


@pytest.mark.parametrize(
    "fields", [{"timeout_us": 5}, {"correlation": 7}, {"correlation": "abc"}, {"sequence_flags": 1}]
)
def test_what_has_no_effect_here_is_refused_and_not_ignored(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        read(**fields)


def test_both_parameter_places_are_read() -> None:
    tensors = {"sampling_parameters": strings(b'{"top_k":1}')}
    merged = read(tensors=tensors, params={"temperature": 0.5, "stream": "true"})
    assert merged.parameters == b'{"top_k": 1, "temperature": 0.5}'
    assert merged.stream is True
