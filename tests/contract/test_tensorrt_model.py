"""`model_repository/ensemble`: TensorRT-LLM's names, types and shapes on one side, our requests on the other.

What the models share is shown with `minisgl`. The fake stub checks the type and the shape of every output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fakes.engine_link import failed, finished, started
from fakes.triton_model import MODEL, REPOSITORY, Rig, initialize_args, running_model
from fakes.triton_stub import TENSORRT_DECLARED, TritonError, strings
from minisgl_backend.errors import Status
from minisgl_backend.messages.client import Chunk, Finished, FinishReason, Request
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.serving.settings import engine_config
from minisgl_backend.serving.tensorrt import INPUTS

ENSEMBLE = REPOSITORY / "ensemble"
GREEDY = {"max_tokens": 5, "top_k": 0, "top_p": 1.0, "temperature": 0}

UPSTREAM = {
    "STRING": "text_input bad_words stop_words decoder_text_input embedding_bias_words guided_decoding_guide_type "
    "guided_decoding_guide",
    "INT32": "max_tokens num_return_sequences end_id pad_id top_k min_tokens beam_width num_draft_tokens min_length",
    "FP32": "top_p temperature length_penalty repetition_penalty presence_penalty frequency_penalty len_penalty",
    "UINT64": "seed random_seed",
    "BOOL": "exclude_input_in_output return_log_probs return_context_logits return_generation_logits "
    "return_perf_metrics return_num_input_tokens return_num_output_tokens stream use_draft_logits",
}
"""Of the config.pbtxt of `ensemble` and `tensorrt_llm_bls`, and of their older versions, as a client fills them."""


@pytest.fixture
def rig() -> Iterator[Rig]:
    with running_model(ENSEMBLE) as rig:
        yield rig


def one(value: Any, dtype: type = np.int32) -> Any:
    """[1, 1], as TensorRT-LLM's clients send every scalar."""
    return np.array([[value]], dtype=dtype)


def f32(value: float) -> Any:
    return one(value, np.float32)


def words(*values: bytes) -> Any:
    return strings(*values, shape=(1, len(values)))


def fields(**tensors: Any) -> dict[str, Any]:
    """A request's tensors, with a prompt and a length unless they are taken away by None."""
    return {"tensors": {"text_input": words(b"Once"), "max_tokens": one(5), **tensors}}


def reached(rig: Rig, params: Any = None, timeout_us: int = 0, **tensors: Any) -> Request:
    """The request as the engine gets it."""
    sender = rig.ask(params=params or {}, timeout_us=timeout_us, **fields(**tensors))
    assert len(rig.link.requests) == 1, sender.answers
    asked = rig.link.requests.pop()
    rig.link.answer(finished(asked.id))
    sender.wait_final()
    return asked


def refused(rig: Rig, params: Any = None, **tensors: Any) -> tuple[str | None, int | None]:
    (answer,) = rig.ask(params=params or {}, **fields(**tensors)).answers
    assert answer.final and rig.link.requests == []
    return answer.error, answer.code


def test_the_configuration_declares_tensorrt_llms_names_types_and_shapes() -> None:
    text = (ENSEMBLE / "config.pbtxt").read_text()
    rows = re.findall(r'\{ name: "(\w+)", data_type: TYPE_(\w+), dims: \[ (.*?) \](, optional: true)? \}', text)
    inputs = {name: (kind, dims) for name, kind, dims, optional in rows if optional}
    lists = ("bad_words", "stop_words", "embedding_bias_words")
    assert inputs == {
        name: (kind, "-1" if name in lists else "1") for kind, names in UPSTREAM.items() for name in names.split()
    }
    assert set(inputs) == set(INPUTS) and len(INPUTS) == len(set(INPUTS))
    outputs = {name: dims.count(",") + 1 for name, _, dims, optional in rows if not optional}
    assert set(outputs) == set(TENSORRT_DECLARED)
    assert (outputs["text_output"], outputs["cum_log_probs"], outputs["output_log_probs"]) == (1, 1, 2)
    assert "max_batch_size: 1\n" in text and "decoupled: true" in text


def test_it_has_no_engine_settings_of_its_own() -> None:
    assert not (ENSEMBLE / "1" / "model.json").exists()
    assert engine_config(initialize_args(ENSEMBLE), {}) == engine_config(initialize_args(MODEL), {})


def test_a_bare_request_is_greedy_not_streamed_and_without_its_prompt(rig: Rig) -> None:
    asked = reached(rig)
    assert json.loads(asked.parameters) == GREEDY
    assert (asked.text_input, asked.stream, asked.exclude_input_in_output) == (b"Once", False, True)
    assert not asked.return_cumulative_logprob


@pytest.mark.parametrize(
    ("tensors", "parameters"),
    [
        ({"max_tokens": one(7)}, {"max_tokens": 7}),
        ({"min_tokens": one(2)}, {"min_tokens": 2}),
        ({"min_length": one(2)}, {"min_tokens": 2}),
        ({"min_length": one(2), "min_tokens": one(2)}, {"min_tokens": 2}),
        ({"top_k": one(3)}, {"top_k": 3, "top_p": 1.0, "temperature": 1.0}),
        ({"top_k": one(1), "top_p": f32(0)}, {"top_k": 1, "top_p": 1.0, "temperature": 1.0}),
        ({"top_p": f32(0.5)}, {"top_k": 0, "top_p": 0.5, "temperature": 1.0}),
        (
            {"top_k": one(3), "top_p": f32(0.5), "temperature": f32(0.25)},
            {"top_k": 3, "top_p": 0.5, "temperature": 0.25},
        ),
        ({"top_k": one(0), "top_p": f32(0), "temperature": f32(0.25)}, {}),
        ({"temperature": f32(0.25)}, {}),
        ({"top_k": one(3), "temperature": f32(0)}, {"top_k": 3, "temperature": 0}),
        ({"repetition_penalty": f32(1.5)}, {"repetition_penalty": 1.5}),
        ({"presence_penalty": f32(0.5)}, {"presence_penalty": 0.5}),
        ({"frequency_penalty": f32(-0.5)}, {"frequency_penalty": -0.5}),
        ({"seed": one(2**63 - 1, np.uint64)}, {"seed": 2**63 - 1}),
        ({"random_seed": one(7, np.uint64)}, {"seed": 7}),
        ({"end_id": one(2)}, {"ignore_eos": True, "stop_token_ids": [2]}),
        ({"end_id": one(-1)}, {"ignore_eos": True}),
        ({"stop_words": words(b"END", b"", "é".encode())}, {"stop_words": ["END", "é"]}),
        ({"bad_words": words(b"bad")}, {"bad_words": ["bad"]}),
        ({"bad_words": words(b""), "stop_words": words(b"")}, {}),
        ({"guided_decoding_guide_type": words(b"json")}, {"structured_outputs": {"json_object": True}}),
        (
            {"guided_decoding_guide_type": words(b"regex"), "guided_decoding_guide": words(b"[ab]+")},
            {"structured_outputs": {"regex": "[ab]+"}},
        ),
        (
            {"guided_decoding_guide_type": words(b"json_schema"), "guided_decoding_guide": words(b"{}")},
            {"structured_outputs": {"json": "{}"}},
        ),
        ({"guided_decoding_guide_type": words(b""), "guided_decoding_guide": words(b"")}, {}),
    ],
)
def test_what_is_honoured_becomes_a_parameter_of_the_engine(
    rig: Rig, tensors: dict[str, Any], parameters: dict[str, Any]
) -> None:
    assert json.loads(reached(rig, **tensors).parameters) == {**GREEDY, **parameters}


@pytest.mark.parametrize(
    "tensors",
    [
        {"pad_id": one(2)},
        {"length_penalty": f32(2.0)},
        {"len_penalty": f32(0.5)},
        {"beam_width": one(1), "num_return_sequences": one(1), "num_draft_tokens": one(0)},
        {name: one(False, np.bool_) for name in UPSTREAM["BOOL"].split()},
        {"decoder_text_input": words(b""), "embedding_bias_words": words(b"", b"")},
    ],
)
def test_what_asks_for_nothing_changes_nothing(rig: Rig, tensors: dict[str, Any]) -> None:
    assert json.loads(reached(rig, **tensors).parameters) == GREEDY


def test_options_and_limits_of_time_pass(rig: Rig) -> None:
    asked = reached(rig, stream=one(True, np.bool_), exclude_input_in_output=one(False, np.bool_))
    assert (asked.stream, asked.exclude_input_in_output) == (True, False), "the engine refuses the two together"
    assert reached(rig, timeout_us=1000).timeout_us == 1000
    asked = reached(
        rig, params={"timeout": 2000, "priority": -3, "id": "7", "triton_enable_empty_final_response": True}
    )
    assert asked.timeout_us == 2000
    assert json.loads(asked.parameters) == {**GREEDY, "priority": -3}


UNSUPPORTED, INVALID = TritonError.UNSUPPORTED, TritonError.INVALID_ARG


@pytest.mark.parametrize(
    ("tensors", "message", "code"),
    [
        ({"beam_width": one(2)}, "beam_width: must be 1, got 2", UNSUPPORTED),
        ({"num_return_sequences": one(3)}, "num_return_sequences: must be 1, got 3", UNSUPPORTED),
        ({"num_draft_tokens": one(4)}, "num_draft_tokens: must be 0, got 4", UNSUPPORTED),
        *(
            ({name: one(True, np.bool_)}, f"{name}: is not supported by this version", UNSUPPORTED)
            for name in ("return_context_logits", "return_generation_logits", "return_perf_metrics", "use_draft_logits")
        ),
        ({"decoder_text_input": words(b"x")}, "decoder_text_input: is not supported by this version", UNSUPPORTED),
        ({"embedding_bias_words": words(b"x")}, "embedding_bias_words: is not supported by this version", UNSUPPORTED),
        ({"lora_task_id": one(1, np.uint64)}, "lora_task_id: is not an input of this model", UNSUPPORTED),
        ({"text_input": None}, "text_input: is missing", INVALID),
        ({"text_input": words(b"a", b"b")}, "text_input: must hold exactly one value, got shape [1, 2]", INVALID),
        ({"max_tokens": None}, "max_tokens: is missing", INVALID),
        ({"max_tokens": one(0)}, "max_tokens: must be an integer from 1 to 2147483647, got 0", INVALID),
        ({"max_tokens": one(5, np.uint32)}, "max_tokens: must be a tensor of INT32", INVALID),
        ({"pad_id": f32(1)}, "pad_id: must be a tensor of INT32", INVALID),
        ({"min_length": one(6)}, "min_length: must be at most max_tokens = 5, got 6", INVALID),
        ({"min_length": one(2), "min_tokens": one(3)}, "min_length: has another value than min_tokens, its", INVALID),
        ({"top_k": one(-1)}, "top_k: must be an integer from 0 to 2147483647, got -1", INVALID),
        ({"top_p": f32(1.5)}, "top_p: must be a number in [0, 1], got 1.5", INVALID),
        ({"temperature": f32(float("nan"))}, "temperature: must be a number in [0, 100], got ", INVALID),
        ({"repetition_penalty": f32(0)}, "repetition_penalty: must be a number in [0.01, 100], got 0.0", INVALID),
        (
            {"random_seed": one(2**63, np.uint64)},
            "random_seed: must be an integer from 0 to 9223372036854775807",
            INVALID,
        ),
        ({"end_id": one(-2)}, "end_id: must be an integer from -1 to 2147483647, got -2", INVALID),
        ({"stop_words": words(b"\xff")}, "stop_words: is not valid UTF-8", INVALID),
        ({"guided_decoding_guide": words(b"x")}, "guided_decoding_guide: needs guided_decoding_guide_type", INVALID),
        ({"guided_decoding_guide_type": words(b"xml")}, "guided_decoding_guide_type: must be one of json, ", INVALID),
        (
            {"guided_decoding_guide_type": words(b"regex")},
            "guided_decoding_guide: is missing: regex needs one",
            INVALID,
        ),
        (
            {"guided_decoding_guide_type": words(b"regex"), "guided_decoding_guide": words(b"\xff")},
            "guided_decoding_guide: is not valid UTF-8",
            INVALID,
        ),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_its_own_name(
    rig: Rig, tensors: dict[str, Any], message: str, code: int
) -> None:
    error, got = refused(rig, **tensors)
    assert error is not None and error.startswith(message)
    assert got == code


@pytest.mark.parametrize(
    ("params", "field"),
    [({"bogus": 1}, "bogus"), ({"return_finish_reason": True}, "return_finish_reason"), ({"a b": 1}, "parameters")],
)
def test_a_request_parameter_that_nobody_would_act_on_is_refused(rig: Rig, params: dict[str, Any], field: str) -> None:
    assert refused(rig, params=params) == (f"{field}: is not an input of this model", UNSUPPORTED)


def test_a_stream_is_deltas_in_tensorrt_llms_shapes(rig: Rig) -> None:
    flags = ("stream", "return_log_probs", "return_num_input_tokens", "return_num_output_tokens")
    sender = rig.ask(**fields(**{name: one(True, np.bool_) for name in flags}))
    (asked,) = rig.link.requests
    assert json.loads(asked.parameters) == {**GREEDY, "logprobs": 0} and asked.return_cumulative_logprob

    def entry(token: int, logprob: float) -> bytes:
        best = {"logprob": 0.0, "rank": 1, "decoded_token": "?"}
        return json.dumps({str(token): {"logprob": logprob, "rank": 2, "decoded_token": "x"}, "9": best}).encode()

    id, first, second = RequestId(asked.id), entry(5, -0.5), entry(6, -0.25)
    rig.link.answer(started(id), Chunk(id, " upon", pack_tokens([5]), logprobs=b"[%b]" % first, logprob=-0.5))
    sender.wait_answers(1)
    rig.link.answer(Chunk(id, "", pack_tokens([6]), logprobs=b"[%b]" % second, logprob=-0.25))
    sender.wait_answers(2)
    rig.link.answer(
        Finished(id, " a time", pack_tokens([5, 6]), FinishReason.LENGTH, 3, 4,
                 logprobs=b"[%b,%b]" % (first, second), logprob=-0.75)
    )  # fmt: skip
    answers = sender.wait_final().answers
    assert [answer.text for answer in answers] == [" upon", "", " a time"]
    assert [answer.final for answer in answers] == [False, False, True]
    zeros = {"batch_index": [[0]], "sequence_index": [[0]], "num_input_tokens": [[3]]}
    assert [answer.more for answer in answers] == [
        {**zeros, "output_log_probs": [[[-0.5]]], "cum_log_probs": [[-0.5]], "num_output_tokens": [[1]]},
        {**zeros, "output_log_probs": [[[-0.25]]], "cum_log_probs": [[-0.75]], "num_output_tokens": [[1]]},
        {**zeros, "output_log_probs": [[[-0.5, -0.25]]], "cum_log_probs": [[-1.5]], "num_output_tokens": [[2]]},
    ]


def test_without_options_a_response_has_the_text_and_the_two_indices(rig: Rig) -> None:
    sender = rig.ask(**fields())
    rig.link.answer(started(rig.link.requests[0].id), finished(rig.link.requests[0].id, "all of it"))
    (answer,) = sender.wait_final().answers
    assert (answer.text, answer.more) == ("all of it", {"batch_index": [[0]], "sequence_index": [[0]]})


def test_an_error_of_the_engine_and_a_cancel_reach_through(rig: Rig) -> None:
    late, left = rig.ask(**fields()), rig.ask(**fields(stream=one(True, np.bool_)))
    first, second = rig.link.requests
    rig.link.answer(failed(first.id, Status.UNAVAILABLE, "the deadline passed"))
    assert [(a.error, a.code) for a in late.wait_final().answers] == [("the deadline passed", TritonError.UNAVAILABLE)]
    rig.link.on_cancel = lambda id: rig.link.answer(failed(id, Status.CANCELLED, "the client left"))
    left.cancelled = True
    assert [(a.code, a.final) for a in left.wait_final().answers] == [(TritonError.CANCELLED, True)]
    assert rig.link.cancelled == [second.id]
