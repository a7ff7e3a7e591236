"""All that an answer is made of, as read off an LLM: text, reasoning, calls, logprobs, what its prompt cost."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from fakes.scripted_model import ids_of, write_scripted_model
from minisgl_backend.answers import Completion, Piece, ToolCall
from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.llm import LLM
from minisgl_backend.messages.client import Request
from minisgl_backend.text.parameters import SamplingParams

THOUGHTS = [b"<thi", b"nk>A ci", b"ty.</think>"]
WEATHER = [b"<tool_", b'call>{"name": "wea', b'ther", "argu', b'ments": {"city": "', b"Par", b'is"}}</tool_call>']
CLOCK = [b'<tool_call>{"name": "clock", "arguments": {}}</tool_call>']
SCRIPTS = {
    "?": [*THOUGHTS, b"\n\nLet me", b" see.", *WEATHER, *CLOCK],
    ":": [b" the", b" quick", b" fox"],
}
TEMPLATE = (
    "{% if tools %}Calls are <tool_call>s of {{ tools | tojson }}{% endif %}{# <think> #}"
    "{% for m in messages %}{{ m.role }} says {{ m.content }}{% endfor %}"
)
CHAT = [{"role": "user", "content": "How warm is it?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLS = (ToolCall(0, "weather", '{"city": "Paris"}'), ToolCall(1, "clock", "{}"))
LONG = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("scripted") / "model", SCRIPTS, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, device="cpu", executor="inline", threads=1, max_running=4) as llm:
        yield llm


def test_every_input_of_a_request_has_a_way_through_an_llm() -> None:
    """The prompt's three kinds are one argument; the deadline and logprobs' sum are asked for by the parameters. An
    operation is no generation.
    """
    by_prompt = {"text_input", "input_ids", "messages"}
    by_parameters = {"parameters", "exclude_input_in_output", "timeout_us", "return_cumulative_logprob"}
    left = {*Request.__struct_fields__} - {"id", "stream", "operation"} - by_prompt - by_parameters
    assert left == {"tools", "parse_output"} <= signature(LLM.generate).parameters.keys()
    assert left <= signature(LLM.stream).parameters.keys()


def test_reasoning_and_calls_come_apart_from_the_text(llm: LLM) -> None:
    (answer,) = llm.generate([CHAT], LONG, tools=TOOLS, parse_output=True)
    assert (answer.reasoning, answer.text, answer.tool_calls) == ("A city.", "Let me see.", CALLS)
    assert answer.finish_reason == "stop" and answer.samples[0].tool_calls == CALLS
    (plain,) = llm.generate([CHAT], LONG, tools=TOOLS)
    assert plain.text.startswith("<think>A city.") and plain.text.endswith("{}}</tool_call>")
    assert (plain.reasoning, plain.tool_calls) == ("", ())
    assert plain.token_ids == answer.token_ids


def test_a_stream_tells_their_deltas(llm: LLM) -> None:
    pieces = list(llm.stream(CHAT, LONG, tools=TOOLS, parse_output=True))
    assert "".join(piece.reasoning for piece in pieces) == "A city."
    assert "".join(piece.text for piece in pieces) == "Let me see."
    deltas = [call for piece in pieces for call in piece.tool_calls]
    assert [(call.index, call.name) for call in deltas if call.name] == [(0, "weather"), (1, "clock")]
    for call in CALLS:
        assert "".join(delta.arguments for delta in deltas if delta.index == call.index) == call.arguments
    assert len([delta for delta in deltas if delta.index == 0]) > 1, "arguments come as they are written"


def test_each_of_several_answers_is_parsed(llm: LLM) -> None:
    drawn = SamplingParams(n=3, max_tokens=40, seed=1)
    (answer,) = llm.generate([CHAT], drawn, tools=TOOLS, parse_output=True)
    parts = [(sample.reasoning, sample.text, sample.tool_calls) for sample in answer.samples]
    assert parts == [("A city.", "Let me see.", CALLS)] * 3


def test_calls_are_words_without_tools(llm: LLM) -> None:
    (answer,) = llm.generate([CHAT], LONG, parse_output=True)
    assert answer.reasoning == "A city." and answer.tool_calls == ()
    assert answer.text.startswith("Let me see.<tool_call>")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "asked", "field"),
    [
        ("the cat", {"parse_output": True}, "parse_output"),
        ("the cat", {"tools": TOOLS}, "tools"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"tools": {"type": "function"}}, "tools"),
        (CHAT, {"tools": [object()]}, "tools"),
        (CHAT, {"tools": 5}, "tools"),
    ],
)
def test_what_can_not_be_is_refused_by_name(
    llm: LLM, stream: bool, prompt: Any, asked: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        _ = list(llm.stream(prompt, **asked)) if stream else llm.generate([prompt], **asked)
    assert llm.stats().open_requests == 0


def test_a_model_without_parsers_refuses_to_parse(tmp_path: Path) -> None:
    model = write_scripted_model(tmp_path / "model", SCRIPTS, chat_template="{{ messages[0].content }}")
    with LLM(model, device="fake", executor="inline") as llm, pytest.raises(UnsupportedFeature, match=r"^parse_output"):
        llm.generate([CHAT], parse_output=True)


@pytest.mark.parametrize("n", [1, 2])
def test_echo_puts_the_text_in_front_of_every_answer_streamed_or_not(llm: LLM, n: int) -> None:
    params = SamplingParams(max_tokens=9, echo=True, n=n)
    (answer,) = llm.generate("say:", params)
    assert [sample.text for sample in answer.samples] == ["say: the quick fox"] * n
    pieces = list(llm.stream("say:", params))
    assert ["".join(piece.text for piece in pieces if piece.index == index) for index in range(n)] == [
        "say: the quick fox"
    ] * n
    assert llm.generate("say:", SamplingParams(max_tokens=9, echo=False))[0].text == " the quick fox"


def test_a_stream_tells_of_its_prompt_once_and_as_the_whole_answer_does(llm: LLM) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, prompt_logprobs=2, logprobs=1, return_token_ids=True)
    (answer,) = llm.generate("say:", params)
    pieces = list(llm.stream("say:", params))
    ids = tuple(ids_of(SCRIPTS)[bytes([byte])] for byte in b"say:")
    told = [piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None]
    assert told == [answer.prompt_logprobs]
    assert told[0] is not None and told[0][0] is None
    assert [next(iter(entries)) for entries in told[0][1:] if entries] == list(ids[1:])
    assert [piece.prompt_token_ids for piece in pieces if piece.prompt_token_ids] == [ids]
    assert answer.prompt_token_ids == ids and pieces[0].prompt_token_ids == ids
    assert sum((piece.logprobs or () for piece in pieces), ()) == answer.samples[0].logprobs


def test_what_a_prompt_cost_is_told_of_streams_and_answers(llm: LLM) -> None:
    prompt = "a prompt of several pages, the second time found in the cache:"
    params = SamplingParams(max_tokens=4, temperature=0.0)
    cold: Completion = llm.generate(prompt, params)[0]
    pieces: list[Piece] = list(llm.stream(prompt, params))
    assert len({piece.usage for piece in pieces}) == 1
    for usage in (cold.usage, pieces[0].usage):
        assert usage.num_input_tokens == cold.num_input_tokens == len(prompt)
        assert 0 <= usage.queue_ms <= usage.ttft_ms
    assert cold.usage.num_cached_tokens == 0 < pieces[0].usage.num_cached_tokens < len(prompt)
