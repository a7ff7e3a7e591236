"""Requests that name an operation, through both models that take them: one response, `result` alone, statuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.engine_link import failed
from fakes.triton_model import MODEL, REPOSITORY, Rig, running_model
from fakes.triton_stub import TritonError, strings
from minisgl_backend.errors import Status
from minisgl_backend.messages.client import Answered
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.serving.reply import LARGE_CHARS


@pytest.fixture(params=[MODEL, REPOSITORY / "minisgl_unary"], ids=lambda folder: folder.name)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    folder: Path = request.param
    with running_model(folder) as rig:
        yield rig


def ask(rig: Rig, operation: bytes, tensors: dict[str, Any] | None = None, **fields: Any) -> Any:
    return rig.ask(tensors={"text_input": None, "operation": strings(operation), **(tensors or {})}, **fields)


def test_the_result_is_the_only_output_of_the_only_response(rig: Rig) -> None:
    sender = ask(rig, b"tokenize", {"text_input": strings(b"Once")}, params={"add_special_tokens": False})
    (asked,) = rig.link.requests
    assert (asked.operation, asked.text_input, asked.stream) == (b"tokenize", b"Once", False)
    assert json.loads(asked.parameters) == {"add_special_tokens": False}
    rig.link.answer(Answered(asked.id, b'{"count":1}'))
    (answer,) = sender.wait_final().answers
    assert answer.more == {"result": ['{"count":1}']} and answer.final and not rig.link.cancelled


def test_all_prompts_pass_unread(rig: Rig) -> None:
    sender = ask(rig, b"\xff", {"input_ids": np.array([5, 6], dtype=np.int32), "messages": strings(b"\xff")})
    (asked,) = rig.link.requests
    assert (asked.operation, asked.input_ids, asked.messages) == (b"\xff", pack_tokens([5, 6]), b"\xff")
    rig.link.answer(failed(asked.id, Status.INVALID_ARGUMENT, "operation: must be one of"))
    (answer,) = sender.wait_final().answers
    assert (answer.error, answer.code) == ("operation: must be one of", TritonError.INVALID_ARG)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"params": {"return_logprobs": True}}, "return_logprobs"),
        ({"tensors": {"parse_output": np.array([True])}}, "parse_output"),
        ({"params": {"timeout": 5}}, "timeout"),
        ({"timeout_us": 5}, "timeout"),
    ],
)
def test_what_only_a_generation_heeds_is_refused(rig: Rig, fields: dict[str, Any], field: str) -> None:
    (answer,) = ask(rig, b"engine", **fields).answers
    assert answer.error == f"{field}: is of a generation; this request names an operation"
    assert answer.final and answer.code == TritonError.INVALID_ARG and not rig.link.requests


def test_what_asks_for_nothing_is_no_matter(rig: Rig) -> None:
    sender = ask(rig, b"engine", params={"stream": False, "return_finish_reason": False})
    rig.link.answer(Answered(rig.link.requests[0].id, b"{}"))
    assert sender.wait_final().answers[0].more == {"result": ["{}"]}


def test_an_operation_is_an_input_and_no_parameter(rig: Rig) -> None:
    (answer,) = rig.ask(params={"operation": "engine"}).answers
    assert answer.error == "operation: must be an input tensor, not a request parameter"


def test_a_large_result_comes_ahead_of_final(rig: Rig) -> None:
    sender = ask(rig, b"tokenize", {"text_input": strings(b"a")})
    large = json.dumps({"tokens": "1" * LARGE_CHARS})
    rig.link.answer(Answered(rig.link.requests[0].id, large.encode()))
    first, *rest = sender.wait_final().answers
    assert first.more == {"result": [large]} and not first.final and all(not one.more for one in rest)


def test_who_leaves_cancels(rig: Rig) -> None:
    sender = ask(rig, b"tokenize", {"text_input": strings(b"a")})
    rig.link.on_cancel = lambda id: rig.link.answer(failed(id, Status.CANCELLED, "the client left"))
    sender.cancelled = True
    (answer,) = sender.wait_final().answers
    assert answer.code == TritonError.CANCELLED and rig.link.cancelled == [rig.link.requests[0].id]
