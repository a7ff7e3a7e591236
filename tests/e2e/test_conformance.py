"""The contract of the model `minisgl`, black-box: what each input does, what each output says, what is refused and how.

One table of cases, four doors: tritonclient's synchronous and asyncio gRPC streams, /generate and /generate_stream.
Each case goes through every door that can carry it, and each answer is asked for whole and streamed. The model says
what a script tells it, so every text, token and reason is known. The tables are `contract_answers.py` and
`contract_refusals.py`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from e2e.contract_answers import (
    CHAT,
    CHATTED,
    CONTEXT,
    DOORS,
    ENDLESS,
    FOX,
    FOX_IDS,
    GOOD,
    GRPC,
    HTTP,
    SCRIPTS,
    TEMPLATE,
    Good,
    good,
    sampled,
)
from e2e.contract_refusals import REFUSED, Refused
from fakes.scripted_model import write_scripted_model
from load.serving import Server, serving
from load.streams import MODEL
from load.transports import Ask, Outcome, aio_grpc, generate, generate_stream, sync_grpc


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("scripted") / "model"
    return str(write_scripted_model(folder, SCRIPTS, context_tokens=CONTEXT, chat_template=TEMPLATE))


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[Server]:
    with serving("--model", model, lease_s=2, threads=1, reasoning_parser="think") as server:
        yield server


def through(door: str, server: Server, ask: Ask) -> Outcome:
    if door == "asyncio gRPC":
        return asyncio.run(aio_grpc(server.grpc, ask))
    doors: dict[str, Callable[[str, Ask], Outcome]] = {
        "sync gRPC": sync_grpc,
        "generate": generate,
        "generate_stream": generate_stream,
    }
    return doors[door](server.grpc if door in GRPC else server.http, ask)


def check_answer(outcome: Outcome, case: Good, stream: bool) -> None:
    assert outcome.error is None, outcome
    prompt = case.inputs.get("text_input", "") if case.prompt is None else case.prompt
    assert outcome.text == ("" if stream else prompt) + case.text, outcome
    reasons = ["None"] * (len(outcome.responses) - 1) + [case.reason]
    assert outcome.joined("finish_reason") == (reasons if case.reason else []), outcome
    assert stream or len(outcome.responses) == 1
    for response in outcome.responses:
        assert set(response) == {"text_output", *(["finish_reason"] if case.reason else []), *case.told}, outcome
    for output, expected in case.told.items():
        check_told(output, [response[output] for response in outcome.responses], expected)


def check_told(output: str, values: list[list[Any]], expected: list[Any] | None) -> None:
    """What is of the whole request stands in every response; what is of one response adds up."""
    if output in ("num_output_tokens", "output_ids"):
        joined = [element for response in values for element in response]
        assert (joined if output == "output_ids" else [sum(joined)]) == expected, values
    else:
        assert len(values[0]) == 1 and values[0][0] >= 0 and values == [values[0]] * len(values), values
        assert expected is None or values[0] == expected


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_a_request_is_answered_the_same_through_every_door(server: Server, case: Good) -> None:
    for door in case.doors:
        if door != "generate_stream":
            check_answer(through(door, server, Ask(case.inputs, case.parameters)), case, stream=False)
        if door != "generate" and case.streams:
            streamed = Ask({**case.inputs, "stream": True}, case.parameters)
            check_answer(through(door, server, streamed), case, stream=True)


@pytest.mark.parametrize("stream", [True, "true", "True"])
def test_streaming_may_be_a_request_parameter(server: Server, stream: bool | str) -> None:
    expected = good("", ENDLESS, text=" one two three" * 130, reason="length")
    for door in GRPC:
        outcome = through(door, server, Ask(ENDLESS, {"stream": stream, "max_tokens": 390}))
        check_answer(outcome, expected, stream=True)
        assert len(outcome.responses) > 1


@pytest.mark.parametrize("stream", [True, False])
def test_only_the_outputs_that_a_client_names_are_sent(server: Server, stream: bool) -> None:
    """Over gRPC. Naming an output does not turn it on: what is not asked for by its option does not come."""
    inputs = {"text_input": "say:", "return_output_ids": True, "return_num_input_tokens": True, "stream": stream}
    for door in GRPC:
        outcome = through(door, server, Ask(inputs, outputs=("output_ids", "num_output_tokens", "logprobs")))
        assert outcome.error is None and outcome.joined("output_ids") == FOX_IDS
        assert {name for response in outcome.responses for name in response} == {"output_ids"}


def _both(door: str, server: Server, ask: Ask) -> list[Outcome]:
    """Whole and streamed, as far as the door can."""
    outcomes = [through(door, server, ask)] if door != "generate_stream" else []
    if door != "generate":
        outcomes.append(through(door, server, replace(ask, inputs={**ask.inputs, "stream": True})))
    return outcomes


def test_logprobs_stand_beside_the_tokens_of_every_response(server: Server) -> None:
    asked = {"return_logprobs": True, "return_cumulative_logprob": True, "return_output_ids": True}
    for door in DOORS:
        for outcome in _both(door, server, Ask({"text_input": "say:", **asked, **sampled(logprobs=2)})):
            assert outcome.error is None, outcome
            told = [entry for response in outcome.responses for entry in json.loads(response["logprobs"][0])]
            assert [int(next(iter(entry))) for entry in told] == outcome.joined("output_ids") == FOX_IDS
            own = [next(iter(entry.values())) for entry in told]
            assert [entry["decoded_token"] for entry in own] == [" the", " quick", " fox", "<|im_end|>"]
            assert {entry["rank"] for entry in own} == {1} and {len(entry) for entry in told} == {2}
            cumulative = outcome.responses[-1]["cumulative_logprob"][0]
            assert abs(cumulative - sum(entry["logprob"] for entry in own)) < 1e-5
        for outcome in _both(door, server, Ask({"text_input": "say:", **asked})):
            assert set(outcome.joined("logprobs")) == {"null"} and outcome.joined("cumulative_logprob")


def test_reasoning_comes_apart_from_the_text_when_asked(server: Server) -> None:
    asked = {"messages": CHAT, "parse_output": True, **sampled(chat_template_kwargs={"ending": "?"})}
    for door in DOORS:
        for outcome in _both(door, server, Ask(asked)):
            assert outcome.error is None and outcome.text == "yes", outcome
            assert "".join(outcome.joined("reasoning_output")) == "hm"
            assert set(outcome.joined("tool_calls")) == {"[]"} and outcome.joined("finish_reason")[-1] == "stop"


def test_what_is_told_of_the_prompt_comes_once(server: Server) -> None:
    asked = sampled(prompt_logprobs=0, return_token_ids=True)
    for door in DOORS:
        for outcome in _both(door, server, Ask({"text_input": "say:", **asked})):
            ids = outcome.joined("prompt_token_ids")
            assert len(ids) == 4 and outcome.joined("output_ids") == FOX_IDS
            (told,) = outcome.joined("prompt_logprobs")
            first, *entries = json.loads(told)
            assert first is None and [list(entry) for entry in entries] == [[str(token)] for token in ids[1:]]


def test_several_answers_have_an_element_each_in_every_response(server: Server) -> None:
    asked = {"text_input": "say:", "exclude_input_in_output": True, "return_num_output_tokens": True, **sampled(n=3)}
    for door in DOORS:
        for outcome in _both(door, server, Ask(asked)):
            assert outcome.error is None, outcome
            assert {len(response["text_output"]) for response in outcome.responses} == {3}
            texts = ["".join(response["text_output"][index] for response in outcome.responses) for index in range(3)]
            assert texts == [FOX] * 3 and outcome.responses[-1]["finish_reason"] == ["stop"] * 3
            assert sum(outcome.joined("num_output_tokens")) == 12


def test_an_echo_stands_in_front_of_a_stream_too(server: Server) -> None:
    for door in DOORS[:2] + DOORS[3:]:
        outcome = through(door, server, Ask({"text_input": "say:", "stream": True, **sampled(echo=True)}))
        assert outcome.text == f"say:{FOX}"


def test_generate_answers_a_stream_of_several_responses_with_tritons_own_error(server: Server) -> None:
    outcome = generate(server.http, Ask({**ENDLESS, "stream": True}, {"max_tokens": 390}))
    assert outcome.error is not None and "use generate stream" in outcome.error


_PATH = re.compile(r"(?:^|[\s'\"(=:])/[\w.-]+")


def check_error(outcome: Outcome, says: str, status: str) -> None:
    assert outcome.error is not None and outcome.error.startswith(says), outcome
    assert outcome.status == status, outcome
    assert outcome.responses == []
    assert outcome.error.isascii() and len(outcome.error) < 600 and outcome.error.isprintable(), outcome
    assert not _PATH.search(outcome.error) and "Traceback" not in outcome.error, outcome


def check_healthy(server: Server) -> None:
    """A good request is served, through a door of each protocol."""
    for door in ("asyncio gRPC", "generate"):
        check_answer(through(door, server, Ask({"text_input": "say:"})), good("", {}), stream=False)


def named(case: Refused) -> str:
    given = {
        **{name: value for name, value in case.inputs.items() if not isinstance(value, str) or value != "say:"},
        **case.parameters,
    }
    return f"{case.says[:40]} {str(given)[:60]}"


@pytest.mark.parametrize("case", REFUSED, ids=named)
def test_a_refusal_names_its_field_through_every_door_and_the_next_request_is_served(
    server: Server, case: Refused
) -> None:
    for door in case.doors:
        status = case.status if door in GRPC else "400"
        ask = Ask(case.inputs, case.parameters, case.timeout_us)
        check_error(through(door, server, ask), case.says, status)
        if "stream" not in {**case.inputs, **case.parameters} and door in ("asyncio gRPC", "generate_stream"):
            streamed = replace(ask, inputs={**case.inputs, "stream": True})
            check_error(through(door, server, streamed), case.says, status)
    check_healthy(server)


# ── what Triton refuses itself, before the model ─────────────────────────────────────────────────────────────────

WRONG_TENSORS = {
    "text_input of integers": ({"text_input": np.array([5], dtype=np.int32)}, "'text_input' data-type is 'INT32'"),
    "two texts": ({"text_input": ["say:", "say:"]}, "unexpected shape for input 'text_input'"),
    "a matrix of texts": (
        {"text_input": np.array([[b"say:"]], dtype=object)},
        "unexpected shape for input 'text_input'",
    ),
    "input_ids of reals": ({"input_ids": np.array([5.0], dtype=np.float32)}, "'input_ids' data-type is 'FP32'"),
    "input_ids of 64 bits": ({"input_ids": np.array([5], dtype=np.int64)}, "'input_ids' data-type is 'INT64'"),
    "a matrix of input_ids": ({"input_ids": np.array([[5]], dtype=np.int32)}, "unexpected shape for input 'input_ids'"),
    "messages of integers": ({"messages": np.array([5], dtype=np.int32)}, "'messages' data-type is 'INT32'"),
    "stream as a string": ({"text_input": "say:", "stream": "true"}, "'stream' data-type is 'BYTES'"),
    "two streams": ({"text_input": "say:", "stream": np.array([True, True])}, "unexpected shape for input 'stream'"),
    "an option as an integer": (
        {"text_input": "say:", "return_output_ids": 1},
        "'return_output_ids' data-type is 'INT32'",
    ),
    "stop of integers": ({"text_input": "say:", "stop": [5]}, "'stop' data-type is 'INT32'"),
    "stop_token_ids as strings": (
        {"text_input": "say:", "stop_token_ids": ["5"]},
        "'stop_token_ids' data-type is 'BYTES'",
    ),
    "parameters as an integer": (
        {"text_input": "say:", "sampling_parameters": 5},
        "'sampling_parameters' data-type is 'INT32'",
    ),
    "an input that nobody declared": (
        {"text_input": "say:", "temperature": np.array([0.5], dtype=np.float32)},
        "unexpected inference input 'temperature'",
    ),
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_a_wrong_tensor_is_refused_by_name_over_grpc(server: Server, name: str) -> None:
    inputs, says = WRONG_TENSORS[name]
    for door in GRPC:
        outcome = through(door, server, Ask(inputs))
        assert outcome.error is not None and says in outcome.error and outcome.responses == []
    check_healthy(server)


@pytest.mark.parametrize(
    ("inputs", "status"),
    [
        ({"text_input": 5}, "500"),
        ({"text_input": None}, "500"),
        ({"text_input": ["say:", "say:"]}, "400"),
        ({"text_input": "a\ud800"}, "500"),
        ({"input_ids": [5.5]}, "500"),
        ({"input_ids": ["5"]}, "500"),
        ({"text_input": "say:", "stream": "true"}, "500"),
        ({"text_input": "say:", "sampling_parameters": 5}, "500"),
        ({"text_input": "say:", "seed": None}, "400"),
        ({"text_input": "say:", "logit_bias": [1]}, "400"),
    ],
    ids=str,
)
def test_json_of_the_wrong_type_is_refused_by_triton_with_a_json_error(
    server: Server, inputs: dict[str, Any], status: str
) -> None:
    for door in HTTP:
        outcome = through(door, server, Ask(inputs))
        assert outcome.error and outcome.status == status and outcome.responses == []
    check_healthy(server)


# ── the operator's side ──────────────────────────────────────────────────────────────────────────────────────────

BOOLS = (
    "stream",
    "exclude_input_in_output",
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_output_ids",
    "return_perf_metrics",
    "parse_output",
)
INPUTS = {
    **dict.fromkeys(("text_input", "messages", "tools", "sampling_parameters", "operation"), ("BYTES", ["1"])),
    **dict.fromkeys(("image", "stop", "stop_words", "bad_words"), ("BYTES", ["-1"])),
    **dict.fromkeys(("input_ids", "stop_token_ids"), ("INT32", ["-1"])),
    **dict.fromkeys(BOOLS, ("BOOL", ["1"])),
}
OUTPUTS = {
    **dict.fromkeys(("text_output", "finish_reason", "logprobs", "reasoning_output", "tool_calls"), ("BYTES", ["-1"])),
    **dict.fromkeys(("num_input_tokens", "num_cached_tokens"), ("UINT32", ["1"])),
    **dict.fromkeys(("ttft_ms", "queue_ms"), ("FP32", ["1"])),
    "num_output_tokens": ("UINT32", ["-1"]),
    "output_ids": ("INT32", ["-1"]),
    "prompt_token_ids": ("INT32", ["-1"]),
    "prompt_logprobs": ("BYTES", ["1"]),
    "result": ("BYTES", ["1"]),
    "cumulative_logprob": ("FP32", ["-1"]),
}


def test_the_declared_tensors_are_those_of_the_contract(server: Server) -> None:
    """No numeric scalar is declared: Triton would turn "0.5", "5" and 5.0 into HTTP 500."""
    assert httpx.get(f"{server.http}/v2/health/ready", timeout=60).status_code == 200
    assert httpx.get(f"{server.http}/v2/models/{MODEL}/ready", timeout=60).status_code == 200
    metadata = httpx.get(f"{server.http}/v2/models/{MODEL}", timeout=60).json()
    for kind, expected in (("inputs", INPUTS), ("outputs", OUTPUTS)):
        declared = {
            tensor["name"]: (tensor["datatype"], [str(size) for size in tensor["shape"]]) for tensor in metadata[kind]
        }
        assert declared == expected


def test_a_template_of_the_client_is_used_where_the_operator_allows_it(model: str) -> None:
    with serving("--model", model, lease_s=2, threads=1, allow_client_template="true") as server:

        def ask(template: str) -> Ask:
            return Ask({"messages": CHAT, **sampled(chat_template=template)})

        for door in DOORS[:3]:
            outcome = through(door, server, ask("{{ messages[0].content }} say:"))
            check_answer(outcome, good("", {"messages": CHAT}, prompt=""), stream=False)
            for broken in (
                "{% for %}",
                "{{ raise_exception('no') }}",
                "{{ messages.__class__.__mro__ }}",
                "{{ 1/0 }}",
                "",
            ):
                status = "INVALID_ARGUMENT" if door in GRPC else "400"
                check_error(through(door, server, ask(broken)), "", status)
        check_answer(sync_grpc(server.grpc, Ask({"messages": CHAT})), good("", {"messages": CHAT}, **CHATTED), False)
