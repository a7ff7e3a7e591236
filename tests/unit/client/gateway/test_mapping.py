from __future__ import annotations

from typing import Any

import pytest

from minisgl_client.gateway.errors import ApiError
from minisgl_client.gateway.fields import ChatBody, CompletionBody, StreamOptions
from minisgl_client.gateway.mapping import MAX_PROMPTS, Plan, plan_chat, plan_completion
from minisgl_client.requests import Request

USER = {"role": "user", "content": "How warm is it?"}
WEATHER = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": {"type": "object"}}}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def completion(**fields: Any) -> Plan:
    return plan_completion(CompletionBody(**{"prompt": "x", **fields}))


def chat(**fields: Any) -> Plan:
    return plan_chat(ChatBody(**{"messages": [USER], **fields}))


def refused_param(plan: Any, **fields: Any) -> str | None:
    with pytest.raises(ApiError) as caught:
        plan(**fields)
    assert caught.value.status == 400
    return caught.value.param


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("x", [{"text": "x"}]),
        ("", [{"text": ""}]),
        ([5, 6], [{"input_ids": [5, 6]}]),
        (["x", "y"], [{"text": "x"}, {"text": "y"}]),
        ([[5], [6, 7]], [{"input_ids": [5]}, {"input_ids": [6, 7]}]),
    ],
)
def test_every_kind_of_prompt_is_asked_for(prompt: Any, asked: list[dict[str, Any]]) -> None:
    assert completion(prompt=prompt).prompts == asked


@pytest.mark.parametrize("prompt", [None, 5, [], ["x", 5], [["x"]], [True], [[1], "x"], {}, ["x"] * (MAX_PROMPTS + 1)])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    assert refused_param(completion, prompt=prompt) == "prompt"


def test_what_is_left_of_a_text_has_no_logprobs() -> None:
    cut: Any = {"prompt": "x", "truncate_prompt_tokens": 3}
    assert completion(**cut, echo=True).prompts[0]["echo"] is True
    assert refused_param(completion, **cut, echo=True, logprobs=0) == "truncate_prompt_tokens"
    assert refused_param(completion, **cut, echo=True, max_tokens=0) == "truncate_prompt_tokens"


def test_an_error_of_one_of_several_prompts_has_its_place() -> None:
    plan = completion(prompt=["x", "y"], regex="a")
    assert plan.names_of(1)["text_input"] == "prompt[1]" and plan.names_of(1)["guided_regex"] == "regex"


def test_fields_go_to_the_engine_under_their_names() -> None:
    given = {
        "temperature": 0.5,
        "top_k": 3,
        "seed": 7,
        "logit_bias": {"5": 1.0},
        "stop": ["a"],
        "cache_salt": "s",
        "n": 2,
    }
    assert completion(**given, max_tokens=4).prompts == [{"text": "x", "max_tokens": 4, **given}]


def test_sglangs_names_are_the_engines_in_a_refusal_too() -> None:
    plan = chat(regex="[a-z]", no_stop_trim=True)
    assert plan.prompts[0]["guided_regex"] == "[a-z]" and plan.prompts[0]["include_stop_str_in_output"] is True
    assert "regex" not in plan.prompts[0] and plan.names["guided_regex"] == "regex"
    assert completion(ebnf="root ::= [a]").prompts[0]["guided_grammar"] == "root ::= [a]"
    assert refused_param(completion, regex="a", guided_regex="a") == "regex"


def test_a_completion_leaves_the_length_to_the_engine_and_a_chat_takes_what_fits() -> None:
    assert "max_tokens" not in completion().prompts[0]
    assert chat().prompts[0]["max_tokens"] == 2**31 - 1


def test_both_names_of_the_length_are_one_and_a_refusal_has_the_one_that_was_used() -> None:
    assert chat(max_completion_tokens=5).prompts[0]["max_tokens"] == 5
    assert chat(max_completion_tokens=5).names["max_tokens"] == "max_completion_tokens"
    assert chat(max_tokens=5, max_completion_tokens=5).prompts[0]["max_tokens"] == 5
    assert chat(max_tokens=5).names["max_tokens"] == "max_tokens"
    assert refused_param(chat, max_tokens=5, max_completion_tokens=6) == "max_completion_tokens"


def test_logprobs_of_a_chat_are_a_switch_and_a_number() -> None:
    assert chat(logprobs=True).prompts[0]["logprobs"] == 0
    assert chat(logprobs=True, top_logprobs=3).prompts[0]["logprobs"] == 3
    assert "logprobs" not in chat(logprobs=False).prompts[0] and chat(logprobs=False).top_logprobs is None
    assert refused_param(chat, top_logprobs=3) == "top_logprobs"


def test_an_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    plan = completion(echo=True, logprobs=2)
    assert plan.prompts == [{"text": "x", "echo": True, "logprobs": 2, "prompt_logprobs": 2}] and plan.echoed == ["x"]
    assert "prompt_logprobs" not in completion(logprobs=2).prompts[0]


@pytest.mark.parametrize("n", [0, -1, 129, 10**19])
def test_the_number_of_answers_is_bounded_before_they_are_laid_out(n: int) -> None:
    assert refused_param(chat, n=n) == "n"


def test_options_of_a_stream_need_one() -> None:
    assert refused_param(chat, stream_options=StreamOptions(include_usage=True)) == "stream_options"
    plan = chat(stream=True, stream_options=StreamOptions(include_usage=True, continuous_usage_stats=True))
    assert plan.stream and plan.usage_at_end and plan.usage_in_all


def test_messages_lose_what_has_no_value_and_the_developer_is_the_system() -> None:
    messages = [
        {"role": "developer", "content": "a"},
        {"role": "assistant", "content": None, "refusal": None, "audio": None},
    ]
    assert chat(messages=messages).prompts[0]["messages"] == [
        {"role": "system", "content": "a"},
        {"role": "assistant", "content": None},
    ]


def test_tools_are_offered_without_what_is_said_to_the_api_alone() -> None:
    plan = chat(tools=[WEATHER])
    assert plan.tools and plan.parses and not plan.forced
    assert plan.prompts[0]["tools"] == [
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    ]


def test_tools_that_may_not_be_called_are_not_shown_to_the_model() -> None:
    plan = chat(tools=[WEATHER], tool_choice="none")
    assert "tools" not in plan.prompts[0] and not plan.tools


@pytest.mark.parametrize(
    ("choice", "parallel", "forced", "several"),
    [
        ("required", None, ["weather", "clock"], True),
        ("required", False, ["weather", "clock"], False),
        ({"type": "function", "function": {"name": "clock"}}, None, ["clock"], False),
    ],
)
def test_a_call_that_must_come_is_held_to_a_form(choice: Any, parallel: Any, forced: list[str], several: bool) -> None:
    plan = chat(tools=[WEATHER, CLOCK], tool_choice=choice, parallel_tool_calls=parallel)
    form = plan.prompts[0]["structured_outputs"]["structural_tag"]["format"]
    assert plan.forced == forced and len(form["tags"]) == len(forced)
    assert form["stop_after_first"] is not several and form["at_least_one"] is True
    assert len(plan.prompts[0]["tools"]) == 2 and not plan.parses


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "often", "tools": [CLOCK]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [CLOCK]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [CLOCK]}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
        ({"tools": [CLOCK], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": "required", "ebnf": "a"}, "tool_choice"),
    ],
)
def test_a_choice_that_can_not_be_met_is_refused(fields: dict[str, Any], param: str) -> None:
    assert refused_param(chat, **fields) == param


def test_a_form_that_asks_for_text_goes_with_a_call() -> None:
    plan = chat(tools=[CLOCK], tool_choice="required", response_format={"type": "text"})
    assert "response_format" not in plan.prompts[0]


@pytest.mark.parametrize("parameters", [{"type": "array"}, {"type": ["object", "null"]}, 5])
def test_arguments_of_a_call_are_an_object(parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert refused_param(chat, tools=[tool], tool_choice="required") == "tools"


def test_every_plan_is_a_request_of_the_clients() -> None:
    whole = completion(echo=True, logprobs=1, return_token_ids=True, deadline_ms=5.0, guided_choice=["a"])
    for plan in (whole, chat(tools=[CLOCK], continue_final_message=True, chat_template_kwargs={"a": 1})):
        request = Request.of(
            plan.prompts[0].get("text"), False, **{k: v for k, v in plan.prompts[0].items() if k != "text"}
        )
        assert not {"messages", "tools", "input_ids"} & request.sampling.keys()
