"""Every input, output and refusal of the model's contract (docs/triton.md) that Triton's side decides.

What the values mean is judged by the engine: tests/unit/text, tests/cases, and with a real server tests/e2e.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fakes.engine_link import chunk, finished, started
from fakes.triton_model import MODEL, Rig, running_model
from fakes.triton_stub import DECLARED, Answer, TritonError, strings
from minisgl_backend.messages.client import Chunk, Finished, FinishReason, PromptLogprobs, Request, Started
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.serving.tensors import INPUTS
from minisgl_backend.text.parameters import BOOL_OPTIONS

EVERYTHING = {
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_output_ids": True,
    "return_perf_metrics": True,
}
CHAT = {"text_input": None, "messages": strings(b"[]")}
OF_START = {"num_input_tokens": [3], "num_cached_tokens": [2], "queue_ms": [1.5], "ttft_ms": [20.25]}


@pytest.fixture
def rig() -> Iterator[Rig]:
    with running_model() as rig:
        yield rig


def int32(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def reached(rig: Rig, **fields: Any) -> Request:
    """The request as the engine gets it; it is answered, so that nothing stays open."""
    sender = rig.ask(**fields)
    assert len(rig.link.requests) == 1, sender.answers
    asked = rig.link.requests.pop()
    rig.link.answer(finished(asked.id))
    sender.wait_final()
    return asked


def refused(rig: Rig, **fields: Any) -> tuple[str | None, int | None]:
    """Message and code of a refusal, which is one response with FINAL and never reaches the engine."""
    (answer,) = rig.ask(**fields).answers
    assert answer.final and rig.link.requests == []
    return answer.error, answer.code


# ── inputs ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("tensors", "field", "value"),
    [
        ({"text_input": strings(b"Once")}, "text_input", b"Once"),
        ({"text_input": strings(b"")}, "text_input", b""),
        ({"input_ids": int32(5, 6, 7)}, "input_ids", pack_tokens([5, 6, 7])),
        ({"input_ids": int32()}, "input_ids", b""),
        ({"messages": strings(b'[{"role": "user"}]')}, "messages", b'[{"role": "user"}]'),
        ({"messages": strings(b"\xff no JSON")}, "messages", b"\xff no JSON"),
        ({"tools": strings(b"[]")}, "tools", b"[]"),
    ],
)
def test_prompts_of_every_kind_pass_as_bytes_and_the_engine_judges_them(
    rig: Rig, tensors: dict[str, Any], field: str, value: bytes
) -> None:
    asked = reached(rig, tensors={"text_input": None, **tensors})
    given = {name: getattr(asked, name) for name in ("text_input", "input_ids", "messages", "tools")}
    assert given == {"text_input": None, "input_ids": None, "messages": None, "tools": None, field: value}


@pytest.mark.parametrize("name", ["stop", "stop_words", "bad_words"])
def test_words_reach_the_engine_by_their_own_name_and_empty_ones_are_none(rig: Rig, name: str) -> None:
    asked = reached(rig, tensors={name: strings(b"", b"END", "é".encode())})
    assert json.loads(asked.parameters) == {name: ["END", "é"]}
    for nothing in (strings(), strings(b""), strings(b"", b"")):
        assert reached(rig, tensors={name: nothing}).parameters == b""
    assert json.loads(reached(rig, params={name: "END"}).parameters) == {name: "END"}


def test_stop_token_ids_come_as_a_list_as_a_parameter_or_as_both_when_they_agree(rig: Rig) -> None:
    ids = int32(260, 7042)
    for fields in (
        {"tensors": {"stop_token_ids": ids}},
        {"tensors": {"stop_token_ids": ids}, "params": {"stop_token_ids": "[260,7042]"}},
        {"tensors": {"stop_token_ids": ids, "sampling_parameters": strings(b'{"stop_token_ids": [260, 7042]}')}},
    ):
        assert json.loads(reached(rig, **fields).parameters) == {"stop_token_ids": [260, 7042]}
    error, code = refused(rig, tensors={"stop_token_ids": ids}, params={"stop_token_ids": "[260]"})
    assert error == "stop_token_ids: has different values in two places of the request"
    assert code == TritonError.INVALID_ARG


@pytest.mark.parametrize("name", BOOL_OPTIONS)
def test_every_option_is_a_tensor_or_a_parameter_and_two_values_are_refused(rig: Rig, name: str) -> None:
    off = np.array([False])
    for fields in (
        {"tensors": {name: off}},
        {"params": {name: "false"}},
        {"tensors": {name: off}, "params": {name: 0}},
    ):
        reached(rig, **fields)
    error, code = refused(rig, tensors={name: off}, params={name: "true"})
    assert error == f"{name}: has one value as an input and another in the request's parameters"
    assert code == TritonError.INVALID_ARG


def test_priority_and_timeout_reach_the_engine(rig: Rig) -> None:
    asked = reached(rig, params={"priority": "-4", "timeout": 2_000_000})
    assert (asked.parameters, asked.timeout_us) == (b'{"priority": "-4"}', 2_000_000)
    assert reached(rig, timeout_us=7).timeout_us == 7


def test_what_triton_acted_on_itself_is_understood_and_stays_with_it(rig: Rig) -> None:
    own = {"id": "client-7", "binary_data_output": True, "triton_enable_empty_final_response": True}
    assert reached(rig, params=own).parameters == b""


@pytest.mark.parametrize(
    ("fields", "says", "code"),
    [
        ({"tensors": {"image": strings(b"iVBORw0KGgo=")}}, "image: this model takes no images", "UNSUPPORTED"),
        ({"tensors": {"unheard_of": int32(1)}}, "unheard_of: is not an input of this model", "UNSUPPORTED"),
        ({"tensors": {"text_input": int32(1)}}, "text_input: must be a tensor of BYTES", "INVALID_ARG"),
        ({"tensors": {"input_ids": strings(b"1")}}, "input_ids: must be a tensor of INT32", "INVALID_ARG"),
        ({"tensors": {"stream": int32(1)}}, "stream: must be a tensor of BOOL", "INVALID_ARG"),
        ({"tensors": {"messages": strings(b"[]", b"[]")}}, "messages: must hold exactly one value", "INVALID_ARG"),
        ({"params": {"messages": "[]"}}, "messages: must be an input tensor", "INVALID_ARG"),
        ({"params": {"stream": "perhaps"}}, "stream: must be true or false, got 'perhaps'", "INVALID_ARG"),
        ({"params": {"timeout": "soon"}}, "timeout: must be an integer from 0 to", "INVALID_ARG"),
        ({"params": {"timeout": 5}, "timeout_us": 6}, "timeout: has one value of the request", "INVALID_ARG"),
        ({"params": "[" * 100_000}, "parameters: is nested too deeply", "INVALID_ARG"),
        ({"params": {"sequence_id": 5}}, "sequence_id: sequences are not supported", "UNSUPPORTED"),
        ({"correlation": 5}, "sequence_id: sequences are not supported", "UNSUPPORTED"),
    ],
)
def test_a_refusal_names_the_field(rig: Rig, fields: dict[str, Any], says: str, code: str) -> None:
    error, got = refused(rig, **fields)
    assert error is not None and error.startswith(says)
    assert error.isascii() and len(error) < 300 and "/" not in error
    assert got == getattr(TritonError, code)


# ── outputs ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stream_that_asks_for_everything_gets_it_with_every_response(rig: Rig) -> None:
    sender = rig.ask(stream=True, params=EVERYTHING)
    (asked,) = rig.link.requests
    rig.link.answer(started(asked.id), chunk(asked.id, "Hel", 11, 12))
    sender.wait_answers(1)
    rig.link.answer(finished(asked.id, "lo", FinishReason.LENGTH, [13]))
    first = {"num_output_tokens": [2], "output_ids": [11, 12], **OF_START}
    last = {"num_output_tokens": [1], "output_ids": [13], **OF_START}
    assert sender.wait_final().answers == [
        Answer("Hel", "None", None, None, False, first),
        Answer("lo", "length", None, None, True, last),
    ]


def test_without_streaming_everything_comes_in_the_one_response(rig: Rig) -> None:
    sender = rig.ask(params=dict.fromkeys(EVERYTHING, "true"))
    (asked,) = rig.link.requests
    rig.link.answer(started(asked.id))
    rig.link.answer(finished(asked.id, "all", tokens=[1, 2, 3]))
    more = {"num_output_tokens": [3], "output_ids": [1, 2, 3], **OF_START}
    assert sender.wait_final().answers == [Answer("all", "stop", None, None, True, more)]


@pytest.mark.parametrize(
    ("option", "outputs"),
    [
        ("return_num_input_tokens", {"num_input_tokens": [3]}),
        ("return_num_output_tokens", {"num_output_tokens": [1]}),
        ("return_output_ids", {"output_ids": [9]}),
        ("return_perf_metrics", {"num_cached_tokens": [2], "queue_ms": [1.5], "ttft_ms": [20.25]}),
    ],
)
def test_each_option_brings_its_outputs_and_no_others(rig: Rig, option: str, outputs: dict[str, Any]) -> None:
    sender = rig.ask(tensors={option: np.array([True])})
    (asked,) = rig.link.requests
    rig.link.answer(started(asked.id), finished(asked.id, "x", tokens=[9]))
    assert sender.wait_final().answers == [Answer("x", "stop", None, None, True, outputs)]


def test_the_reason_is_left_out_only_when_the_client_says_so(rig: Rig) -> None:
    sender = rig.ask(stream=True, params={"return_finish_reason": False})
    (asked,) = rig.link.requests
    rig.link.answer(started(asked.id), chunk(asked.id, "a", 1), finished(asked.id, "b", tokens=[2]))
    assert {answer.reason for answer in sender.wait_final().answers} == {None}
    assert sender.text == "ab"


def test_logprobs_of_pieces_that_go_out_together_are_one_list(rig: Rig) -> None:
    sender = rig.ask(stream=True, params={"return_logprobs": True, "return_cumulative_logprob": "true"})
    (asked,) = rig.link.requests
    assert asked.return_cumulative_logprob
    pieces = [Chunk(asked.id, text, pack_tokens([i]), 0, None, b'[{"%d":1}]' % i, -0.5) for i, text in enumerate("ab")]
    rig.link.answer(started(asked.id), *pieces)
    sender.wait_answers(1)
    rig.link.answer(Finished(asked.id, "", b"", FinishReason.STOP, 3, 2, 0, b"[]", 0.0))
    assert [answer.more for answer in sender.wait_final().answers] == [
        {"logprobs": ['[{"0":1},{"1":1}]'], "cumulative_logprob": [-1.0]},
        {"logprobs": ["[]"], "cumulative_logprob": [-1.0]},
    ]


def parsed(id: RequestId, text: str = "", reasoning: str = "", calls: bytes = b"", index: int = 0) -> Chunk:
    return Chunk(id, text, b"", index, None, b"", 0.0, reasoning, calls)


def test_parsed_parts_of_pieces_that_go_out_together_are_joined(rig: Rig) -> None:
    sender = rig.ask(stream=True, tensors=CHAT, params={"parse_output": True})
    (asked,) = rig.link.requests
    assert asked.parse_output
    begun, more = b'[{"index":0,"name":"f","arguments":"{"}]', b'[{"index":0,"arguments":"}"}]'
    rig.link.answer(started(asked.id), parsed(asked.id, reasoning="a"), parsed(asked.id, reasoning="b"))
    sender.wait_answers(1)
    rig.link.answer(parsed(asked.id, calls=begun), parsed(asked.id, "c", calls=more))
    sender.wait_answers(2)
    rig.link.answer(Finished(asked.id, "", b"", FinishReason.STOP, 3, 2))
    answers = sender.wait_final().answers
    assert [answer.text for answer in answers] == ["", "c", ""] and [answer.final for answer in answers][-1]
    assert [answer.more for answer in answers] == [
        {"reasoning_output": ["ab"], "tool_calls": ["[]"]},
        {"reasoning_output": [""], "tool_calls": [(begun[:-1] + b"," + more[1:]).decode()]},
        {"reasoning_output": [""], "tool_calls": ["[]"]},
    ]


def test_parsed_parts_stand_once_for_each_of_several_answers(rig: Rig) -> None:
    sender = rig.ask(tensors=CHAT, params={"parse_output": True})
    (asked,) = rig.link.requests
    calls = b'[{"name":"f","arguments":"{}"}]'
    last = Finished(asked.id, "x", b"", FinishReason.STOP, 3, 2, 1, b"", 0.0, "", calls)
    start = Started(asked.id, 3, 2, 1.5, 20.25, 2)
    rig.link.answer(start, parsed(asked.id, "y", "z"), last)
    (answer,) = sender.wait_final().answers
    assert answer.more["text_output"] == ["y", "x"]
    assert answer.more["reasoning_output"] == ["z", ""] and answer.more["tool_calls"] == ["[]", calls.decode()]


def test_logprobs_that_no_parameter_asks_for_are_null(rig: Rig) -> None:
    sender = rig.ask(params={"return_logprobs": True})
    (asked,) = rig.link.requests
    rig.link.answer(started(asked.id), finished(asked.id, "x", tokens=[9]))
    assert sender.wait_final().answers == [Answer("x", "stop", None, None, True, {"logprobs": ["null"]})]


def test_what_is_told_of_the_prompt_comes_once(rig: Rig) -> None:
    sender = rig.ask(stream=True)
    (asked,) = rig.link.requests
    begun = Started(asked.id, 2, 0, 0.0, 0.0, 1, pack_tokens([7, 8]))
    rig.link.answer(begun, PromptLogprobs(asked.id, b"[null,{}]"), chunk(asked.id, "a", 5))
    sender.wait_answers(1)
    rig.link.answer(finished(asked.id, "b", tokens=[6]))
    first = {"output_ids": [5], "prompt_token_ids": [7, 8], "prompt_logprobs": ["[null,{}]"]}
    assert [answer.more for answer in sender.wait_final().answers] == [first, {"output_ids": [6]}]


@pytest.mark.parametrize("stream", [True, False])
def test_several_answers_have_an_element_each_and_a_reason_stays(rig: Rig, stream: bool) -> None:
    sender = rig.ask(stream=stream, params={"return_num_output_tokens": True, "return_output_ids": True})
    (asked,) = rig.link.requests
    rig.link.answer(
        Started(asked.id, 3, 0, 0.0, 0.0, 2),
        Chunk(asked.id, "a", pack_tokens([1])),
        Chunk(asked.id, "x", pack_tokens([2, 3]), 1, FinishReason.STOP),
    )
    if stream:
        sender.wait_answers(1)
    rig.link.answer(Finished(asked.id, "b", pack_tokens([4]), FinishReason.LENGTH, 3, 4, 0))
    told = [answer.more for answer in sender.wait_final().answers]
    last = {"finish_reason": ["length", "stop"]}
    if stream:
        assert told == [
            {
                "text_output": ["a", "x"],
                "finish_reason": ["None", "stop"],
                "num_output_tokens": [1, 2],
                "output_ids": [1, 2, 3],
            },
            {**last, "text_output": ["b", ""], "num_output_tokens": [1, 0], "output_ids": [4]},
        ]
    else:
        assert told == [{**last, "text_output": ["ab", "x"], "num_output_tokens": [2, 2], "output_ids": [1, 4, 2, 3]}]


# ── what config.pbtxt declares ───────────────────────────────────────────────────────────────────────────────────


def _declared(block: str) -> dict[str, tuple[str, str]]:
    text = (MODEL / "config.pbtxt").read_text()
    body = text.split(f"{block} [", 1)[1].split("\n]", 1)[0]
    found = re.findall(r'name: "(\w+)", data_type: TYPE_(\w+), dims: \[ (-?\d+) \]', body)
    assert len(found) == body.count("name:")
    return {name: (kind, dims) for name, kind, dims in found}


def test_the_configuration_declares_what_the_bridge_reads() -> None:
    declared = _declared("input")
    assert set(declared) == set(INPUTS)
    assert {declared[name] for name in BOOL_OPTIONS} == {("BOOL", "1")}
    assert {name: declared[name] for name in ("input_ids", "stop_token_ids")} == {
        "input_ids": ("INT32", "-1"),
        "stop_token_ids": ("INT32", "-1"),
    }
    text = (MODEL / "config.pbtxt").read_text()
    assert text.count("optional: true") == len(INPUTS)
    assert "decoupled: true" in text and "max_batch_size: 0" in text


def test_the_configuration_declares_what_the_bridge_sends() -> None:
    types = {np.object_: "STRING", np.uint32: "UINT32", np.int32: "INT32", np.float32: "FP32"}
    sent = {name: (types[dtype], str(size or -1)) for name, (dtype, size) in DECLARED.items()}
    assert _declared("output") == sent
