"""LangChain's ChatOpenAI, and OpenAI for plain completions, against the gateway."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pydantic
from checks import ENDLESS_TOKENS, Addresses, raised
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI


@tool
def weather(city: Literal["Paris", "Oslo"]) -> str:
    """How warm it is in a city."""
    return f"20 degrees in {city}"


class Person(pydantic.BaseModel):
    """What an answer is made of."""

    name: Literal["Ada", "Alan"]


def chat(at: Addresses, **options: Any) -> ChatOpenAI:
    """Greedy."""
    where = {"base_url": at.gateway, "api_key": at.key, "model": "minisgl", "max_retries": 0}
    return ChatOpenAI(**{**where, "temperature": 0, "max_tokens": at.tokens, **options})


def check_that_a_chat_is_the_gateways_answer_whole_and_streamed(at: Addresses) -> None:
    whole = chat(at).invoke(at.prompt)
    assert whole.content == at.chat and whole.response_metadata["finish_reason"] == "length"
    told = whole.usage_metadata
    assert (told["input_tokens"], told["output_tokens"]) == (at.chat_tokens, at.tokens)
    chunks = list(chat(at).stream(at.prompt, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == at.chat and len(chunks) > 2
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == at.tokens


async def check_that_asyncio_and_a_batch_get_the_same(at: Addresses) -> None:
    model = chat(at)

    async def streamed() -> str:
        return "".join([chunk.content async for chunk in model.astream(at.prompt)])

    stream, whole, batch = await asyncio.gather(streamed(), model.ainvoke(at.prompt), model.abatch([at.prompt] * 3))
    assert stream == whole.content == at.chat and [answer.content for answer in batch] == [at.chat] * 3


def check_that_a_completion_is_the_engines_answer_whole_and_streamed(at: Addresses) -> None:
    where = {"base_url": at.gateway, "api_key": at.key, "model": "minisgl", "max_retries": 0}
    model = OpenAI(**where, temperature=0, max_tokens=at.tokens)
    assert model.invoke(at.prompt) == at.completion
    assert "".join(model.stream(at.prompt)) == at.completion


def check_that_a_tool_is_called_and_its_answer_goes_back(at: Addresses) -> None:
    model = chat(at, max_tokens=64)
    history: list[Any] = [SystemMessage("Be short."), HumanMessage("How warm is it in Oslo?")]
    answer = model.bind_tools([weather], tool_choice="weather").invoke(history)
    (call,) = answer.tool_calls
    assert call["name"] == "weather" and answer.response_metadata["finish_reason"] == "tool_calls"
    history += [answer, weather.invoke(call)]
    answer = chat(at).bind_tools([weather]).invoke(history)  # "auto": it may call again, or say something
    assert isinstance(answer, AIMessage) and (answer.content or answer.tool_calls)


def check_that_a_call_is_streamed(at: Addresses) -> None:
    whole = None
    for chunk in chat(at, max_tokens=64).bind_tools([weather], tool_choice="any").stream("How warm is it in Oslo?"):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    assert (call["name"], set(call["args"])) == ("weather", {"city"}) and not whole.invalid_tool_calls


def check_that_an_answer_has_the_class_that_was_asked_for(at: Addresses) -> None:
    model = chat(at, max_tokens=64)
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Person, method=method).invoke("Who?"), Person), method
    *_, last = model.with_structured_output(Person).stream("Who?")
    assert isinstance(last, Person)


def check_that_fields_of_vllm_go_through_extra_body(at: Addresses) -> None:
    model = chat(at, max_tokens=64, extra_body={"guided_choice": ["yes and no"], "min_p": 0.1})
    assert model.invoke(at.prompt).content == "yes and no"


def check_that_logprobs_are_told(at: Addresses) -> None:
    told = chat(at, logprobs=True, top_logprobs=2).invoke(at.prompt).response_metadata["logprobs"]["content"]
    assert "".join(one["token"] for one in told) == at.chat and {len(one["top_logprobs"]) for one in told} == {2}


def check_that_refusals_are_the_exceptions_of_openai_and_langchain(at: Addresses) -> None:
    def ask(**options: Any) -> Any:
        return lambda: chat(at, **options).invoke(at.prompt)

    raised(openai.BadRequestError, "temperature: must be a number in", ask(temperature=300))
    raised(openai.BadRequestError, "reasoning_effort: is not supported", ask(reasoning_effort="low"))
    raised(openai.AuthenticationError, "Incorrect API key", ask(api_key="another"))
    raised(openai.NotFoundError, "The model 'another' does not exist", ask(model="another"))
    raised(openai.NotFoundError, "there is no such URL here", ask(use_responses_api=True))
    error = raised(ContextOverflowError, "the prompt is too long: 90", lambda: chat(at).invoke("word " * 9000))
    assert error.code == "context_length_exceeded"


def check_that_a_stream_that_is_closed_ends_its_request(at: Addresses) -> int:
    stream = chat(at, max_tokens=ENDLESS_TOKENS, extra_body={"ignore_eos": True}).stream(at.prompt)
    assert next(stream) and next(stream)
    stream.close()
    return ENDLESS_TOKENS


async def check_that_a_stream_of_asyncio_that_is_closed_ends_its_request(at: Addresses) -> int:
    stream = chat(at, max_tokens=ENDLESS_TOKENS, extra_body={"ignore_eos": True}).astream(at.prompt)
    assert await anext(stream) and await anext(stream)
    await stream.aclose()
    return ENDLESS_TOKENS
