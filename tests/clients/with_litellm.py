"""litellm: `openai/` and `hosted_vllm/` to the gateway, `triton/` to /generate of `minisgl` and of `ensemble`."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import litellm
import pydantic
from checks import ENDLESS_TOKENS, MANY_TOKENS, Addresses, raised

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How warm it is in a city.",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"]},
    },
}


class Person(pydantic.BaseModel):
    """What an answer is made of."""

    name: Literal["Ada", "Alan"]


def gateway(at: Addresses, provider: str = "openai", **fields: Any) -> dict[str, Any]:
    """A chat with the test's prompt, greedy."""
    where = {"model": f"{provider}/minisgl", "api_base": at.gateway, "api_key": at.key, "max_retries": 0}
    return {**where, "messages": said(at), "temperature": 0, "max_tokens": at.tokens, **fields}


def triton(at: Addresses, model: str, **fields: Any) -> dict[str, Any]:
    """top_k: litellm passes on what it does not know, and of OpenAI's fields max_tokens alone."""
    where = {"model": f"triton/{model}", "api_base": f"{at.http}/v2/models/{model}/generate"}
    return {**where, "messages": said(at), "max_tokens": at.tokens, "top_k": 1, **fields}


def said(at: Addresses) -> list[dict[str, Any]]:
    return [{"role": "user", "content": at.prompt}]


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def check_that_a_chat_is_the_gateways_answer_whole_and_streamed(at: Addresses) -> None:
    whole = litellm.completion(**gateway(at))
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (at.chat, "length")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (at.chat_tokens, at.tokens)
    chunks = list(litellm.completion(**gateway(at), stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == at.chat and len(chunks) > 2
    assert chunks[-1].usage.completion_tokens == at.tokens
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def check_that_a_completion_is_the_engines_answer(at: Addresses) -> None:
    for model in ("text-completion-openai/minisgl", "hosted_vllm/minisgl"):
        asked = gateway(at, prompt=at.prompt, model=model)
        del asked["messages"]
        assert litellm.text_completion(**asked).choices[0].text == at.completion, model


async def check_that_asyncio_gets_the_same(at: Addresses) -> None:
    asked = gateway(at, "hosted_vllm")
    whole, stream = await asyncio.gather(litellm.acompletion(**asked), litellm.acompletion(**asked, stream=True))
    assert whole.choices[0].message.content == at.chat
    assert text_of([chunk async for chunk in stream]) == at.chat


def check_that_a_tool_is_called(at: Addresses) -> None:
    choice = litellm.completion(**gateway(at, tools=[TOOL], tool_choice="required", max_tokens=64)).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")


def check_that_an_answer_has_the_class_that_was_asked_for(at: Addresses) -> None:
    answer = litellm.completion(**gateway(at, response_format=Person, max_tokens=64))
    assert Person.model_validate_json(answer.choices[0].message.content)


def check_that_fields_of_vllm_go_through(at: Addresses) -> None:
    asked = gateway(at, "hosted_vllm", max_tokens=64, guided_choice=["yes and no"], min_p=0.1)
    assert litellm.completion(**asked).choices[0].message.content == "yes and no"


def check_that_refusals_are_litellms_exceptions(at: Addresses) -> None:
    def ask(**fields: Any) -> Any:
        return lambda: litellm.completion(**gateway(at, **fields))

    raised(litellm.BadRequestError, "temperature: must be a number in", ask(temperature=300))
    raised(
        litellm.BadRequestError, "temperature: must be a number in", lambda: list(ask(temperature=300, stream=True)())
    )
    raised(litellm.BadRequestError, "reasoning_effort: is not supported: give what", ask(reasoning_effort="low"))
    raised(litellm.AuthenticationError, "Incorrect API key", ask(api_key="another"))
    raised(litellm.NotFoundError, "The model 'another' does not exist", ask(model="openai/another"))
    long = [{"role": "user", "content": "word " * 9000}]
    for model in ("openai/minisgl", "hosted_vllm/minisgl"):
        raised(litellm.ContextWindowExceededError, "the prompt is too long: 90", ask(model=model, messages=long))
    raised(litellm.NotFoundError, "there is no such URL here", lambda: litellm.embedding(
        model="openai/minisgl", input=["x"], api_base=at.gateway, api_key=at.key, max_retries=0))  # fmt: skip


def check_that_a_stream_that_is_closed_ends_its_request(at: Addresses) -> int:
    stream = litellm.completion(**gateway(at, "hosted_vllm", max_tokens=ENDLESS_TOKENS, ignore_eos=True, stream=True))
    assert next(stream) and next(stream)
    stream.close()
    return ENDLESS_TOKENS


def check_that_generate_gives_the_engines_answer_whole_and_streamed(at: Addresses) -> None:
    """`minisgl` puts the prompt in front of a whole answer, as vLLM's backend does, unless told not to."""
    for model, echo in (("minisgl", at.prompt), ("ensemble", "")):
        whole = litellm.completion(**triton(at, model))
        assert whole.choices[0].message.content == echo + at.completion, model
        assert (whole.choices[0].finish_reason, whole.usage.total_tokens) == ("stop", 0), "litellm reads neither"
        chunks = list(litellm.completion(**triton(at, model), stream=True))
        assert text_of(chunks) == at.completion and len(chunks) <= at.tokens + 1, model
        chunks = list(litellm.completion(**triton(at, model, max_tokens=MANY_TOKENS, stream=True)))
        assert text_of(chunks).startswith(at.completion) and len(chunks) > 2, model
    greedy = triton(at, "minisgl", extra_body={"temperature": 0}, stream=True)
    del greedy["top_k"]
    assert text_of(litellm.completion(**greedy)) == at.completion


async def check_that_generate_by_asyncio_gives_the_same(at: Addresses) -> None:

    async def streamed(model: str) -> str:
        return text_of([chunk async for chunk in await litellm.acompletion(**triton(at, model), stream=True)])

    async def whole(model: str) -> str:
        answer = await litellm.acompletion(**triton(at, model, exclude_input_in_output=True))
        return answer.choices[0].message.content

    models = ("minisgl", "ensemble")
    texts = await asyncio.gather(*(way(model) for model in models for way in (whole, streamed)))
    assert texts == [at.completion] * 4


def check_that_refusals_of_generate_are_litellms_exceptions(at: Addresses) -> None:
    def ask(model: str = "minisgl", **fields: Any) -> Any:
        return lambda: litellm.completion(**triton(at, model, **fields))

    raised(litellm.BadRequestError, "top_k: must be an integer from -1 to", ask(top_k=-5))
    raised(litellm.BadRequestError, "top_k: must be an integer from -1 to", lambda: list(ask(top_k=-5, stream=True)()))
    raised(litellm.BadRequestError, "beam_width: must be 1, got 2", ask("ensemble", beam_width=2))
    raised(litellm.UnsupportedParamsError, "does not support parameters", ask(temperature=0))  # litellm's own
    long = [{"role": "user", "content": "word " * 9000}]
    raised(litellm.BadRequestError, "the prompt is too long: 90", ask(messages=long))
    gone = f"{at.http}/v2/models/none/generate"
    raised(litellm.NotFoundError, "unknown model: 'none' is not found", ask(api_base=gone))


def check_that_what_litellm_sends_and_triton_has_not_is_refused_by_name(at: Addresses) -> None:
    """docs/clients.md tells of both."""
    twice = triton(at, "minisgl", max_completion_tokens=4)  # which litellm sends beside max_tokens
    words = "sampling_parameters: unknown parameter 'max_completion_tokens'"
    raised(litellm.BadRequestError, words, lambda: litellm.completion(**twice))
    infer = triton(at, "minisgl_unary", api_base=f"{at.http}/v2/models/minisgl_unary/infer")
    del infer["top_k"]
    raised(litellm.BadRequestError, "unexpected inference input 'max_tokens'", lambda: litellm.completion(**infer))


def check_that_a_stream_of_generate_that_is_closed_ends_its_request(at: Addresses) -> int:
    stream = litellm.completion(**triton(at, "minisgl", max_tokens=ENDLESS_TOKENS, ignore_eos=True, stream=True))
    assert next(stream) and next(stream)
    stream.close()
    return ENDLESS_TOKENS
