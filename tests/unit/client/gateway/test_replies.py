from __future__ import annotations

import itertools
from typing import Any

from minisgl_client.gateway.chats import ChatTeller
from minisgl_client.gateway.completions import CompletionTeller
from minisgl_client.gateway.fields import ChatBody, CompletionBody, StreamOptions
from minisgl_client.gateway.mapping import Plan, plan_chat, plan_completion
from minisgl_client.gateway.replies import Reply
from minisgl_client.pieces import Logprob, Piece, Sample, ToolCall, Usage

CLOCK = {"type": "function", "function": {"name": "clock"}}


def chat(**fields: Any) -> Plan:
    return plan_chat(ChatBody(messages=[{"role": "user", "content": "Hi"}], **fields))


def reply(plan: Plan) -> Reply:
    numbers = itertools.count()
    is_chat = "messages" in plan.prompts[0]
    teller = ChatTeller(plan, lambda: f"call_{next(numbers)}") if is_chat else CompletionTeller(plan)
    return Reply(plan, teller, id="id", model="minisgl", created=1)


def piece(text: str = "", reason: str | None = None, tokens: int = 1, **fields: Any) -> Piece:
    return Piece(text, reason, None, Usage(input_tokens=5, output_tokens=tokens, cached_tokens=4), **fields)


def choices(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"]]


def test_a_whole_completion() -> None:
    told = reply(plan_completion(CompletionBody(prompt="x"))).whole([piece(" Paris", "stop", 2)])
    assert told == {
        "id": "id",
        "object": "text_completion",
        "created": 1,
        "model": "minisgl",
        "choices": [{"index": 0, "text": " Paris", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


def test_choices_of_several_prompts_are_numbered_through() -> None:
    plan = plan_completion(CompletionBody(prompt=["x", "y"], n=2))
    pieces = [
        piece("a", "stop", samples=(Sample("a", "stop", None, None), Sample("b", "length", None, None))),
        piece("c", "stop", samples=(Sample("c", "stop", None, None), Sample("d", "length", None, None))),
    ]
    told = reply(plan).whole(pieces)
    assert [(choice["index"], choice["text"]) for choice in told["choices"]] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert told["usage"]["prompt_tokens"] == 10


def test_logprobs_of_a_completion_go_on_where_the_piece_before_ended() -> None:
    made = reply(plan_completion(CompletionBody(prompt="x", logprobs=1, stream=True)))
    one = {7: Logprob(-1.5, 2, " Pa"), 8: Logprob(-0.5, 1, " Lo")}
    (first,) = choices(made.chunks(0, piece(" Pa", logprobs=(one,))))
    (second,) = choices(made.chunks(0, piece("ris", "stop", logprobs=({9: Logprob(-0.1, 1, "ris")},))))
    assert first["logprobs"] == {
        "text_offset": [0],
        "token_logprobs": [-1.5],
        "tokens": [" Pa"],
        "top_logprobs": [{" Lo": -0.5}],
    }
    assert second["logprobs"]["text_offset"] == [3] and second["logprobs"]["top_logprobs"] == [{"ris": -0.1}]


def test_an_echoed_prompt_has_logprobs_and_its_first_token_the_rest_of_the_text() -> None:
    plan = plan_completion(CompletionBody(prompt="The city", logprobs=0, echo=True))
    prompt = (None, {3: Logprob(-2.0, 9, " city")})
    told = reply(plan).whole(
        [piece("The city is", "stop", prompt_logprobs=prompt, logprobs=({4: Logprob(-1.0, 1, " is")},))]
    )
    assert told["choices"][0]["logprobs"] == {
        "text_offset": [0, 3, 8],
        "token_logprobs": [None, -2.0, -1.0],
        "tokens": ["The", " city", " is"],
        "top_logprobs": None,
    }


def test_logprobs_of_a_chat_have_exact_bytes() -> None:
    plan = chat(logprobs=True, top_logprobs=1)
    part = {7: Logprob(-1.0, 1, "\ufffd", (0xC3,))}
    told = reply(plan).whole([piece("", "length", logprobs=(part,))])
    token = {"token": "\ufffd", "logprob": -1.0, "bytes": [0xC3]}
    assert told["choices"][0]["logprobs"] == {"content": [{**token, "top_logprobs": [token]}], "refusal": None}


def test_a_streamed_chat_says_who_speaks_then_the_words_then_why_it_ends() -> None:
    made = reply(chat(stream=True))
    told = choices([*made.opening(), *made.chunks(0, piece("Par")), *made.chunks(0, piece("is", "stop"))])
    assert [choice["delta"] for choice in told] == [
        {"role": "assistant", "content": ""},
        {"content": "Par"},
        {"content": "is"},
    ]
    assert [choice["finish_reason"] for choice in told] == [None, None, "stop"]
    assert made.closing() == [] and made.finish_reasons == ["stop"]


def test_each_of_several_streamed_answers_ends_once() -> None:
    made = reply(chat(stream=True, n=2))
    ended, more, end = Sample("a", "stop", None, None), Sample("b", None, None, None), Sample("", "length", None, None)
    told = choices(made.chunks(0, piece("a", "stop", samples=(ended, more))))
    told += choices(made.chunks(0, piece("", "stop", samples=(Sample("", "stop", None, None), end))))
    assert [(choice["index"], choice["delta"], choice["finish_reason"]) for choice in told] == [
        (0, {"content": "a"}, "stop"),
        (1, {"content": "b"}, None),
        (1, {}, "length"),
    ]


def test_usage_comes_at_the_end_and_in_all_chunks_as_asked() -> None:
    silent = reply(chat(stream=True))
    assert "usage" not in silent.chunks(0, piece("a"))[0]
    at_end = reply(chat(stream=True, stream_options=StreamOptions(include_usage=True)))
    assert at_end.chunks(0, piece("a", tokens=2))[0]["usage"] is None
    at_end.chunks(0, piece("b", "stop", tokens=3))
    (last,) = at_end.closing()
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 5
    always = reply(chat(stream=True, stream_options=StreamOptions(continuous_usage_stats=True)))
    told = [always.chunks(0, piece(text, tokens=2))[0]["usage"]["completion_tokens"] for text in "ab"]
    assert told == [2, 4] and always.closing() == []


def test_reasoning_and_calls_come_apart_from_the_content() -> None:
    whole = reply(chat(tools=[CLOCK])).whole(
        [piece("Look:", "stop", reasoning="hm", tool_calls=(ToolCall(0, "clock", "{}"), ToolCall(1, "clock", "{}")))]
    )
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"] == {
        "role": "assistant",
        "content": "Look:",
        "refusal": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": f"call_{i}", "type": "function", "function": {"name": "clock", "arguments": "{}"}} for i in range(2)
        ],
    }


def test_a_call_streams_with_its_name_once() -> None:
    made = reply(chat(tools=[CLOCK], stream=True))
    told = choices(made.chunks(0, piece("", tool_calls=(ToolCall(0, "clock", ""), ToolCall(0, "", "{")))))
    told += choices(made.chunks(0, piece("", "stop", tool_calls=(ToolCall(0, "", "}"),))))
    assert [choice["delta"]["tool_calls"] for choice in told] == [
        [{"index": 0, "id": "call_0", "type": "function", "function": {"name": "clock", "arguments": "{"}}],
        [{"index": 0, "function": {"arguments": "}"}}],
    ]
    assert told[-1]["finish_reason"] == "tool_calls"


def test_without_parallel_calls_only_the_first_is_told() -> None:
    plan = chat(tools=[CLOCK], parallel_tool_calls=False)
    both = (ToolCall(0, "clock", "{}"), ToolCall(1, "clock", "{}"))
    (choice,) = reply(plan).whole([piece("", "stop", tool_calls=both)])["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


def test_a_forced_call_is_read_out_of_the_text_and_a_cut_one_has_the_lengths_reason() -> None:
    plan = chat(tools=[CLOCK], tool_choice="required")
    text = '{"name": "clock", "arguments": {"zone": "U'
    (choice,) = reply(plan).whole([piece(text, "length")])["choices"]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "clock", "arguments": '{"zone": "U'}


def test_ids_of_tokens_are_told_when_asked() -> None:
    plan = chat(return_token_ids=True)
    told = reply(plan).whole([Piece("a", "stop", (7, 8), Usage(), prompt_ids=(1, 2))])
    assert told["choices"][0]["token_ids"] == [7, 8] and told["choices"][0]["prompt_token_ids"] == [1, 2]
