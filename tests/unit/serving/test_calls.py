"""A call to a model beside ours, against a fake of Triton's request object."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fakes.triton_stub import FakeStub, Tensor, TritonError, strings
from minisgl_backend.errors import EngineUnavailable, InvalidRequest, RequestError, SequenceFailed
from minisgl_backend.messages.client import FinishReason
from minisgl_backend.serving.calls import Retained, Said, model_call


class Response:
    """As in the stub."""

    def __init__(self, tensors: list[Tensor], error: Any = None) -> None:
        self._tensors, self._error = tensors, error

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> Any:
        return self._error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors


class Error:
    """As in the stub: message and code are functions, unlike those of our fake TritonError."""

    def __init__(self, message: str, code: int) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class CallingStub(FakeStub):
    """Answers each call with `responses` and keeps what was asked."""

    def __init__(self, *responses: Response) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []
        stub = self

        class InferenceRequest:
            def __init__(self, **fields: Any) -> None:
                inputs = {tensor.name(): tensor.as_numpy() for tensor in fields.pop("inputs")}
                stub.asked.append({**fields, "inputs": inputs})

            def exec(self, decoupled: bool = False) -> Iterator[Response]:
                assert decoupled
                return iter(responses)

        self.InferenceRequest = InferenceRequest


def answer(text: str, reason: str, tokens: int) -> Response:
    outputs = [("text_output", strings(text.encode())), ("finish_reason", strings(reason.encode()))]
    return Response(
        [
            *(Tensor(name, array) for name, array in outputs),
            Tensor("num_output_tokens", np.array([tokens], dtype=np.uint32)),
        ]
    )


def test_a_call_is_one_request_that_is_not_streamed() -> None:
    stub = CallingStub(answer(" é\x00", "length", 7))
    assert model_call(stub, "minisgl", Retained())("Zoë", {"max_tokens": 7}) == Said(" é\x00", FinishReason.LENGTH, 7)
    (asked,) = stub.asked
    assert asked["model_name"] == "minisgl"
    assert asked["requested_output_names"] == ["text_output", "finish_reason", "num_output_tokens"]
    inputs = {name: array.tolist() for name, array in asked["inputs"].items()}
    assert json.loads(inputs.pop("sampling_parameters")[0]) == {"max_tokens": 7}
    assert inputs == {
        "text_input": ["Zoë".encode()],
        "exclude_input_in_output": [True],
        "return_num_output_tokens": [True],
    }, "no stream"


@pytest.mark.parametrize(
    ("code", "kind"), [(TritonError.INVALID_ARG, InvalidRequest), (TritonError.INTERNAL, SequenceFailed)]
)
def test_the_error_of_a_call_keeps_its_message_and_where_triton_tells_it_its_status(
    code: int, kind: type[RequestError]
) -> None:
    stub = CallingStub(Response([], Error("top_k: must be an integer", code)))
    with pytest.raises(kind, match=r"^top_k: must be an integer$"):
        model_call(stub, "minisgl", Retained())("a", {})


def test_a_model_that_is_not_loaded_is_unavailable() -> None:
    words = (  # server 2.51
        "Model minisgl - Error when running inference: Failed for execute the inference request. "
        "Model 'minisgl' is not ready."
    )
    stub = CallingStub(Response([], Error(words, TritonError.INTERNAL)))
    with pytest.raises(EngineUnavailable, match=r"^the model 'minisgl' is not loaded"):
        model_call(stub, "minisgl", Retained())("a", {})


def test_a_call_that_was_answered_with_nothing_is_unavailable() -> None:
    """Two calls that Triton refuses at once: the stub gives both refusals to one of them."""
    retained = Retained()
    with pytest.raises(EngineUnavailable, match="try again later"):
        model_call(CallingStub(), "minisgl", retained)("a", {})
    assert len(retained) == 1


class Iterated:
    """A stand-in for the stub's iterator that can be watched."""


def test_an_iterator_lives_until_a_question_that_began_after_its_end_came_back() -> None:
    retained = Retained()
    before = retained.mark()
    iterator = Iterated()
    alive = weakref.ref(iterator)
    retained.keep(iterator)
    del iterator
    retained.passed(before)
    assert alive() is not None, "that question may have overtaken the end"
    retained.passed(retained.mark())
    assert alive() is None and len(retained) == 0


def test_questions_that_come_back_out_of_order_release_nothing_too_early() -> None:
    retained = Retained()
    retained.keep(Iterated())
    early = retained.mark()
    retained.keep(Iterated())
    retained.passed(retained.mark())
    late = Iterated()
    alive = weakref.ref(late)
    retained.keep(late)
    del late
    retained.passed(early)
    assert alive() is not None and len(retained) == 1


def test_the_iterator_of_a_call_is_retained_whether_it_succeeds_or_fails() -> None:
    retained = Retained()
    model_call(CallingStub(answer("a", "stop", 1)), "minisgl", retained)("a", {})
    assert len(retained) == 1
    with pytest.raises(InvalidRequest):
        model_call(CallingStub(Response([], Error("a: b", TritonError.INVALID_ARG))), "minisgl", retained)("a", {})
    assert len(retained) == 2
