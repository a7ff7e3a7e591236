"""Every parameter and output that the server knows, as a caller of either client writes and reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

from fakes.clients import generate_async, generate_sync
from fakes.inference_server import InferenceServer, inputs_of, response, says
from minisgl_backend.text.parameters import BOOL_OPTIONS, PROMPT_INPUTS, SamplingParams
from minisgl_client.client import Client
from minisgl_client.errors import RequestRefused, ServerFault
from minisgl_client.pieces import Answer, Piece, Sample, ToolCall, whole_calls
from minisgl_client.requests import RequestFields, SamplingFields

CHAT = [{"role": "user", "content": "How warm is it in Paris?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
FORMS: dict[str, Any] = {
    "structured_outputs": {"json": {"type": "integer"}},
    "guided_json": {"enum": ["é"]},
    "guided_regex": "[a-z]+",
    "guided_choice": ("yes", "no"),
    "guided_grammar": 'root ::= "a"',
    "response_format": {"type": "json_object"},
    "json_schema": '{"type": "null"}',
}

both = pytest.mark.parametrize("generate", [generate_sync, generate_async])
Generate = Callable[..., Answer]


def test_the_sampling_fields_are_the_servers() -> None:
    assert set(get_type_hints(SamplingFields)) == set(SamplingParams.__struct_fields__)


def test_every_input_of_the_model_has_a_field() -> None:
    """Counts and times are one field, and what the client always asks for, or never, has none."""
    by_itself = {"stream", "exclude_input_in_output", "return_finish_reason", "return_logprobs"}
    usage = {"return_num_input_tokens", "return_num_output_tokens", "return_perf_metrics"}
    own = {*RequestFields.__annotations__} - {*SamplingFields.__annotations__}
    inputs = {*PROMPT_INPUTS, *BOOL_OPTIONS} - {"text_input", "image"} - by_itself - usage
    assert inputs <= own and own - inputs == {"timeout_s", "request_id", "return_usage"}


@both
@pytest.mark.parametrize("name", FORMS)
def test_a_form_of_the_answer_is_a_sampling_parameter(server: InferenceServer, generate: Generate, name: str) -> None:
    generate(server.url, text="x", **{name: FORMS[name]})
    sent = json.loads(inputs_of(server.requests[0])["sampling_parameters"])
    assert sent == {name: list(FORMS[name]) if name == "guided_choice" else FORMS[name]}


@both
def test_tools_and_what_is_to_be_told_are_inputs_of_their_own(server: InferenceServer, generate: Generate) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "parse_output": True, "return_cumulative_logprob": True}
    generate(server.url, messages=CHAT, return_usage=False, **asked)
    sent = inputs_of(server.requests[0])
    assert json.loads(sent.pop("tools")) == TOOLS and json.loads(sent.pop("messages")) == CHAT
    assert sent == {"parse_output": True, "return_cumulative_logprob": True}
    generate(server.url, messages=CHAT, return_usage=False, tools=None, parse_output=False)
    assert inputs_of(server.requests[1]).keys() == {"messages"}


def test_tools_that_json_can_not_hold_are_refused_by_name(server: InferenceServer) -> None:
    with Client(server.url) as client, pytest.raises(RequestRefused, match=r"^tools: "):
        client.stream(messages=CHAT, tools=[{"type": object()}])
    assert server.requests == []


def deltas(*calls: tuple[Any, ...]) -> str:
    """(index, name, arguments), or (index, arguments)."""
    keys = {2: ("index", "arguments"), 3: ("index", "name", "arguments")}
    return json.dumps([dict(zip(keys[len(call)], call, strict=True)) for call in calls])


STREAMED = says(
    response(final=False, text_output=[""], finish_reason=["None"], reasoning_output=["It is "], tool_calls=["[]"]),
    response(
        final=False,
        text_output=["Let me"],
        finish_reason=["None"],
        reasoning_output=["a city."],
        tool_calls=[deltas((0, "weather", '{"ci'))],
        cumulative_logprob=[-1.5],
    ),
    response(
        final=True,
        text_output=[" see."],
        finish_reason=["stop"],
        reasoning_output=[""],
        tool_calls=[deltas((0, 'ty": "é"}'), (1, "clock", ""))],
        cumulative_logprob=[-2.0],
    ),
)
CALLS = (ToolCall(0, "weather", '{"city": "é"}'), ToolCall(1, "clock", ""))


def test_pieces_carry_deltas_of_reasoning_and_calls(server: InferenceServer) -> None:
    server.script = STREAMED
    with Client(server.url) as client:
        first, second, last = client.stream(messages=CHAT, tools=TOOLS, parse_output=True)
    assert (first.text, first.reasoning, first.tool_calls) == ("", "It is ", ())
    assert second.tool_calls == (ToolCall(0, "weather", '{"ci'),) and second.cumulative_logprob == -1.5
    assert last.tool_calls == (ToolCall(0, "", 'ty": "é"}'), ToolCall(1, "clock", ""))
    assert whole_calls(call for piece in (first, second, last) for call in piece.tool_calls) == CALLS


@both
def test_an_answer_has_the_whole_of_them(server: InferenceServer, generate: Generate) -> None:
    server.script = STREAMED
    answer = generate(server.url, messages=CHAT, tools=TOOLS, parse_output=True)
    assert (answer.text, answer.reasoning) == ("Let me see.", "It is a city.")
    assert answer.tool_calls == CALLS and answer.cumulative_logprob == -2.0


@both
def test_calls_that_come_whole_are_counted_from_zero(server: InferenceServer, generate: Generate) -> None:
    calls = json.dumps([{"name": "weather", "arguments": '{"city": "é"}'}, {"name": "clock", "arguments": ""}])
    server.script = says(
        response(final=True, text_output=["ok"], finish_reason=["stop"], reasoning_output=["so"], tool_calls=[calls])
    )
    answer = generate(server.url, messages=CHAT, tools=TOOLS, parse_output=True)
    assert (answer.tool_calls, answer.reasoning, answer.text) == (CALLS, "so", "ok")


@both
def test_each_of_several_answers_has_its_own(server: InferenceServer, generate: Generate) -> None:
    server.script = says(
        response(
            final=False,
            text_output=["", "b"],
            finish_reason=["None", "stop"],
            reasoning_output=["one", ""],
            tool_calls=[deltas((0, "weather", "{")), "[]"],
            cumulative_logprob=[-1.0, -4.0],
        ),
        response(
            final=True,
            text_output=["a", ""],
            finish_reason=["length", "stop"],
            reasoning_output=["", ""],
            tool_calls=[deltas((0, "}")), "[]"],
            cumulative_logprob=[-2.0, -4.0],
        ),
    )
    answer = generate(server.url, messages=CHAT, tools=TOOLS, parse_output=True, n=2, return_cumulative_logprob=True)
    assert answer.samples == (
        Sample("a", "length", None, None, "one", (ToolCall(0, "weather", "{}"),), -2.0),
        Sample("b", "stop", None, None, "", (), -4.0),
    )
    assert answer.tool_calls == answer.samples[0].tool_calls and answer.reasoning == "one"


def test_an_answer_that_was_not_parsed_has_nothing_apart_from_its_text(server: InferenceServer) -> None:
    with Client(server.url) as client:
        first: Piece = next(client.stream("x"))
    assert (first.reasoning, first.tool_calls, first.cumulative_logprob) == ("", (), None)


@pytest.mark.parametrize("calls", ["{", "[5]", '[{"name": "f"}]', "7"])
def test_calls_that_can_not_be_read_are_the_servers_fault(server: InferenceServer, calls: str) -> None:
    server.script = says(response(final=True, text_output=["a"], finish_reason=["stop"], tool_calls=[calls]))
    with Client(server.url) as client, pytest.raises(ServerFault, match="can not be read"):
        client.generate("x")
