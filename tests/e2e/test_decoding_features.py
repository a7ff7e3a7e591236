"""What answers are held to and made of, on the real model behind a real server: forms, stop strings, several answers,
reasoning and tool calls apart from the words, logprobs.

The model is SmolLM2 with another chat template, one that takes tools and has the marks of reasoning: a small model
calls nothing by itself, so a structural tag has it think and call. tests/cases and tests/numeric look closer at each;
here stands that all of it reaches a client whole, by every way.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fakes.chat_templates import HERMES
from fakes.hostile_forms import costly
from load.serving import Server, serving
from load.transports import Ask, generate_stream
from minisgl_backend.models.locate import fetched_folder
from minisgl_client.aio import AsyncClient
from minisgl_client.client import Client
from minisgl_client.errors import ClientError, RequestRefused, Unavailable, Unsupported
from minisgl_client.pieces import Answer, Logprobs, Sample, ToolCall

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "A city and the year in which it was founded:"

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
}
GRAMMAR = 'root ::= "<" word ("," word)? ">"\nword ::= [a-z] [a-z] [a-z]?'
FORMS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "schema": ({"guided_json": PERSON}, lambda text: jsonschema.validate(json.loads(text), PERSON) is None),
    "regex": ({"structured_outputs": {"regex": r"[a-z]{3,8} \d{2}"}}, re.compile(r"[a-z]{3,8} \d{2}").fullmatch),
    "choice": ({"guided_choice": ["Rome", "Paris", "São Paulo"]}, ["Rome", "Paris", "São Paulo"].__contains__),
    "grammar": ({"guided_grammar": GRAMMAR}, re.compile("<[a-z]{2,3}(,[a-z]{2,3})?>").fullmatch),
}
GREEDY: dict[str, Any] = {"temperature": 0, "return_output_ids": True}
FEW = {"temperature": 1.2, "top_k": 20}
"""Draws that the last digits of logits, which depend on what else is in a batch, hardly ever turn. A draw from the
whole vocabulary, whose 49,000 bounds all move with them, they turn in one of 400 (seen on this model in fp32).
"""
DRAWN: dict[str, Any] = {**FEW, "seed": 11, "n": 2, "return_output_ids": True}

WEATHER = {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
CHAT = [{"role": "user", "content": "How warm is it in Paris?"}]
THOUGHT = "[a-z]{2,6} [a-z]{2,6}"
THINKS_AND_CALLS = {
    "format": {
        "type": "sequence",
        "elements": [
            {
                "type": "tag",
                "begin": "<think>",
                "content": {"type": "regex", "pattern": THOUGHT},
                "end": "</think>\n\n",
            },
            {"type": "const_string", "value": "Look:"},
            {
                "type": "tag",
                "begin": '<tool_call>{"name": "weather", "arguments": ',
                "content": {"type": "json_schema", "json_schema": WEATHER},
                "end": "}</tool_call>",
            },
        ],
    }
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("smollm2")
    for file in fetched_folder("smollm2").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text("{#- thinks in <think> -#}\n" + HERMES)
    with serving("--model", str(folder), "--dtype", "fp32", kv_bytes=512 << 20, max_running=32, lease_s=2) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    """Idle again after the test."""
    yield running
    running.until_idle()


async def streamed(client: AsyncClient, text: str | None = None, **fields: Any) -> Answer:
    """The pieces of a stream, joined."""
    return Answer.of([piece async for piece in client.stream(text, **fields)])


def samples(answer: Answer) -> list[Sample]:
    """Of n answers all, of one it alone."""
    if answer.samples:
        return list(answer.samples)
    return [Sample(answer.text, answer.finish_reason, answer.output_ids, answer.logprobs)]


@pytest.mark.parametrize("draw", [GREEDY, DRAWN], ids=["greedy", "two seeded answers"])
async def test_every_form_holds_and_a_stream_is_the_whole_answer(server: Server, draw: dict[str, Any]) -> None:
    asked = [{"max_tokens": 64, **draw, **form} for form, _ in FORMS.values()]
    async with AsyncClient(server.grpc) as client:
        whole = [client.generate(PROMPT, **fields) for fields in asked]
        answers = await asyncio.gather(*whole, *(streamed(client, PROMPT, **fields) for fields in asked))
    for (name, (_, holds)), answer, stream in zip(FORMS.items(), answers, answers[len(FORMS) :], strict=False):
        assert samples(stream) == samples(answer), name
        assert len(samples(answer)) == draw.get("n", 1)
        for sample in samples(answer):
            assert sample.finish_reason == "stop" and holds(sample.text), (name, sample)


async def test_a_stop_string_cuts_a_form_where_it_stands(server: Server) -> None:
    form = {"guided_regex": "[a-z]{2,6}(-[a-z]{2,6}){3}", "max_tokens": 48}
    async with AsyncClient(server.grpc) as client:
        uncut, cut, shown, *streams = await asyncio.gather(
            client.generate(PROMPT, **DRAWN, **form),
            client.generate(PROMPT, **DRAWN, **form, stop=["-"]),
            client.generate(PROMPT, **DRAWN, **form, stop=["-"], include_stop_str_in_output=True),
            streamed(client, PROMPT, **DRAWN, **form, stop=["-"]),
        )
    assert [samples(stream) for stream in streams] == [samples(cut)]
    for long, short, ended in zip(samples(uncut), samples(cut), samples(shown), strict=True):
        assert re.fullmatch("[a-z]{2,6}(-[a-z]{2,6}){3}", long.text)
        assert re.fullmatch("[a-z]{2,6}", short.text) and short.finish_reason == ended.finish_reason == "stop"
        assert long.text.startswith(ended.text) and ended.text == short.text + "-"
        assert short.output_ids == ended.output_ids == (long.output_ids or ())[: len(short.output_ids or ())]


async def test_hostile_forms_are_refused_by_name_and_change_no_running_stream(server: Server) -> None:
    """One that is killed as it is compiled (on a machine without time it is put off: UNAVAILABLE), one that is refused
    unread, and one whose keyword nobody enforces.
    """
    hostile = [costly()[0], {"guided_json": "[" * 60_000}, {"guided_json": {"type": "array", "uniqueItems": True}}]
    asked = [{**FEW, "max_tokens": 24, "return_output_ids": True, "ignore_eos": True, "seed": i} for i in range(3)]
    async with AsyncClient(server.grpc) as client:

        async def read(fields: dict[str, Any], begun: asyncio.Event) -> Answer:
            pieces = []
            async for piece in client.stream(PROMPT, **fields):
                pieces.append(piece)
                begun.set()
            return Answer.of(pieces)

        async def refusal(form: dict[str, Any], begun: list[asyncio.Event]) -> ClientError:
            await asyncio.gather(*(event.wait() for event in begun))
            with pytest.raises(ClientError) as refused:
                await client.generate("x", max_tokens=1, **form)
            return refused.value

        quiet = await asyncio.gather(*(read(fields, asyncio.Event()) for fields in asked))
        begun = [asyncio.Event() for _ in asked]
        *errors, first, second, third = await asyncio.gather(
            *(refusal(form, begun) for form in hostile), *map(read, asked, begun)
        )
    for form, error in zip(hostile, errors, strict=True):
        assert isinstance(error, RequestRefused | Unsupported | Unavailable), error
        assert str(error).startswith(f"{next(iter(form))}: "), error
    assert not isinstance(errors[1], Unavailable) and isinstance(errors[2], Unsupported)
    assert "uniqueItems" in str(errors[-1]), "the keyword is named"
    assert [samples(answer) for answer in (first, second, third)] == [samples(answer) for answer in quiet]


def parts(answer: Answer | Sample) -> tuple[str, str, tuple[ToolCall, ...]]:
    return answer.reasoning, answer.text, answer.tool_calls


async def test_reasoning_and_calls_come_apart_from_the_words_by_every_way(server: Server) -> None:
    asked: dict[str, Any] = {"messages": CHAT, "tools": TOOLS, "max_tokens": 96}
    form = {"structured_outputs": {"structural_tag": THINKS_AND_CALLS}, "temperature": 0, "return_output_ids": True}
    several = {**form, "temperature": 1.0, "seed": 4, "n": 2}
    sampling = {"structured_outputs": form["structured_outputs"], "temperature": 0, "max_tokens": 96}
    over_http = Ask(
        {
            "messages": json.dumps(CHAT),
            "tools": json.dumps(TOOLS),
            "sampling_parameters": sampling,
            "parse_output": True,
            "stream": True,
        }
    )
    async with AsyncClient(server.grpc) as client:
        plain, whole, stream, both, events = await asyncio.gather(
            client.generate(**asked, **form),
            client.generate(**asked, **form, parse_output=True),
            streamed(client, **asked, **form, parse_output=True),
            streamed(client, **asked, **several, parse_output=True),
            asyncio.to_thread(generate_stream, server.http, over_http),
        )
    for answer in (whole, *both.samples):
        assert re.fullmatch(THOUGHT, answer.reasoning) and answer.text == "Look:"
        (call,) = answer.tool_calls
        assert (call.index, call.name) == (0, "weather")
        jsonschema.validate(json.loads(call.arguments), WEATHER)
    assert parts(stream) == parts(whole) and stream.output_ids == whole.output_ids == plain.output_ids
    assert (plain.reasoning, plain.tool_calls) == ("", ())
    for part in (f"<think>{whole.reasoning}</think>", "Look:<tool_call>", whole.tool_calls[0].arguments):
        assert part in plain.text
    assert events.error is None and events.joined("finish_reason")[-1] == "stop"
    assert ("".join(events.joined("reasoning_output")), events.text) == (whole.reasoning, whole.text)
    deltas = [delta for response in events.joined("tool_calls") for delta in json.loads(response)]
    assert [delta["name"] for delta in deltas if "name" in delta] == ["weather"]
    assert "".join(delta["arguments"] for delta in deltas) == whole.tool_calls[0].arguments


def own(told: Logprobs | None) -> list[tuple[int, float, int]]:
    """Of each token itself: id, logprob, rank; None, which a prompt's first token has, is left out."""
    entries = [next(iter(entry.items())) for entry in told or () if entry is not None]
    return [(token, logprob.logprob, logprob.rank) for token, logprob in entries]


def close(one: list[tuple[int, float, int]], other: list[tuple[int, float, int]]) -> bool:
    """The same tokens and ranks. 1e-3: of one computation in fp32 in chunks of other sizes; seen are 2e-5."""
    return [(i, rank) for i, _, rank in one] == [(i, rank) for i, _, rank in other] and all(
        abs(a - b) < 1e-3 for (_, a, _), (_, b, _) in zip(one, other, strict=True)
    )


async def test_logprobs_are_those_of_the_tokens_streamed_or_not(server: Server) -> None:
    asked: dict[str, Any] = {"max_tokens": 8, "logprobs": 2, "return_output_ids": True}
    drawn = {**FEW, "seed": 3, "n": 2, "return_cumulative_logprob": True}
    async with AsyncClient(server.grpc) as client:
        greedy, whole, stream = await asyncio.gather(
            client.generate(PROMPT, **asked, temperature=0),
            client.generate(PROMPT, **asked, **drawn),
            streamed(client, PROMPT, **asked, **drawn),
        )
    assert {rank for _, _, rank in own(greedy.logprobs)} == {1}
    for sample, other in zip(whole.samples, stream.samples, strict=True):
        assert [token for token, _, _ in own(sample.logprobs)] == list(sample.output_ids or ())
        assert (other.text, other.output_ids) == (sample.text, sample.output_ids)
        assert close(own(other.logprobs), own(sample.logprobs))
        total = sum(value for _, value, _ in own(sample.logprobs))
        assert sample.cumulative_logprob == pytest.approx(total, abs=1e-4)
        assert {len(entry or ()) for entry in sample.logprobs or ()} <= {2, 3}, "the two best, and the token itself"


async def test_prompt_logprobs_are_right_on_a_cached_prefix(server: Server) -> None:
    """Asked twice they are the same, and those of a prompt that holds an answer are the answer's own."""
    ids = list(range(1000, 1040))  # several pages, that nobody has asked for before
    async with AsyncClient(server.grpc) as client:
        answer = await client.generate(input_ids=ids, max_tokens=8, temperature=0, logprobs=0, return_output_ids=True)
        assert answer.usage.cached_tokens == 0
        longer = [*ids, *(answer.output_ids or ())]
        first = await client.generate(input_ids=longer, max_tokens=1, prompt_logprobs=1)
        plain = await client.generate(input_ids=longer, max_tokens=1)
        again, stream = await asyncio.gather(
            client.generate(input_ids=longer, max_tokens=1, prompt_logprobs=1),
            streamed(client, input_ids=longer, max_tokens=1, prompt_logprobs=1, return_token_ids=True),
        )
    assert plain.usage.cached_tokens and plain.usage.cached_tokens >= 32, "the prefix is in the cache"
    told = own(first.prompt_logprobs)
    assert [token for token, _, _ in told] == longer[1:] and (first.prompt_logprobs or ())[0] is None
    assert close(own(again.prompt_logprobs), told) and close(own(stream.prompt_logprobs), told)
    assert close(told[len(ids) - 1 :], own(answer.logprobs))
    assert stream.prompt_ids == tuple(longer)


def test_the_example_of_the_chat_page_runs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "chat.md").read_text(), re.DOTALL)
    assert '"127.0.0.1:8001"' in example
    exec(compile(example.replace("127.0.0.1:8001", server.grpc), "docs/chat.md", "exec"), {})
    name, _, arguments = capsys.readouterr().out.strip().partition(" ")
    assert name == "weather" and json.loads(arguments)["city"] in ("Paris", "Rome")
    with Client(server.grpc) as client, pytest.raises(RequestRefused, match=r"^parse_output: "):
        client.generate(PROMPT, parse_output=True)
