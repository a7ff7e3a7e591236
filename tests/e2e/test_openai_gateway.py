"""OpenAI's own Python client against `minisgl serve --openai` and a real model.

The model is SmolLM2 with a chat template that takes tools and has the marks of reasoning, as in
test_decoding_features.py: a small model calls nothing by itself, so where a call must come by the model's own way a
structural tag has it think and call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import psutil
import pydantic
import pytest
from openai import AsyncOpenAI, OpenAI

from fakes.chat_templates import HERMES
from load.serving import PATIENCE_S, Server, engine_processes, eventually, serving, stop
from minisgl_backend.models.locate import fetched_folder
from minisgl_client.gateway.settings import KEYS_VARIABLE

KEY = "key-of-this-test"
HEADERS = {"Authorization": f"Bearer {KEY}"}
MODEL = "minisgl"
PROMPT = "The capital of France is"
CHAT: Any = [{"role": "user", "content": "Name a river."}]
TOKENS = 4000
ENDLESS: Any = {"prompt": PROMPT, "max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
GREEDY: Any = {"model": MODEL, "temperature": 0}


class Weather(pydantic.BaseModel):
    """How warm it is in a city."""

    city: Literal["Paris", "Oslo"]


class Person(pydantic.BaseModel):
    """What the answer is made of."""

    name: Literal["Ada", "Alan"]
    age: int = pydantic.Field(ge=1, le=9)


WEATHER = openai.pydantic_function_tool(Weather)


@dataclass
class Gateway:
    """And the server behind it."""

    server: Server
    url: str

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=self.url, **{"api_key": KEY, "max_retries": 0, **options})

    def async_client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.url, api_key=KEY, max_retries=0)

    def plain(self) -> httpx.Client:
        """Of what is not OpenAI's."""
        return httpx.Client(base_url=self.url.removesuffix("/v1"), headers=HEADERS, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("smollm2")
    for file in fetched_folder("smollm2").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text("{#- thinks in <think> -#}\n" + HERMES)
    model = ("--model", str(folder), "--dtype", "fp32", "--openai", "0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEYS_VARIABLE, KEY)
        with serving(*model, kv_bytes=512 << 20, max_running=24, queue_limit=0, lease_s=2) as server:
            yield gateway_of(server)


def gateway_of(server: Server) -> Gateway:
    """That of `minisgl serve --openai`."""

    def url() -> str | None:
        found = re.search(r"OpenAI +(http://\S+)", "\n".join(server.lines))
        return found[1] if found else None

    return Gateway(server, eventually(url, PATIENCE_S, lambda: "\n".join(server.lines)))


@pytest.fixture
def gateway(running: Gateway) -> Iterator[Gateway]:
    """Idle again after the test."""
    yield running
    running.server.until_idle()


@pytest.fixture
def client(gateway: Gateway) -> Iterator[OpenAI]:
    with gateway.client() as client:
        yield client


def test_a_completion_is_the_same_whole_and_streamed_and_its_prompt_is_cached(client: OpenAI) -> None:
    asked: Any = {**GREEDY, "prompt": PROMPT * 5, "max_tokens": 6}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].text and whole.choices[0].finish_reason == "length"
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    usage = chunks[-1].usage
    assert usage and whole.usage and chunks[-1].choices == [] and chunks[0].usage is None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 6)
    assert usage.prompt_tokens_details and (usage.prompt_tokens_details.cached_tokens or 0) >= 16


async def test_many_ask_at_once_and_each_gets_its_own_answer(gateway: Gateway) -> None:
    prompts = ["One, two, three,", "The sun rises in the", "A, B, C,"]

    async def streamed(client: AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(**GREEDY, prompt=prompt, max_tokens=4, stream=True)
        return "".join([choice.text async for chunk in stream for choice in chunk.choices])

    async with gateway.async_client() as client:
        together = await client.completions.create(**GREEDY, prompt=prompts, max_tokens=4)
        each = await asyncio.gather(*(streamed(client, prompt) for prompt in prompts))
    assert [choice.text for choice in together.choices] == each and len(set(each)) == 3


def test_several_seeded_answers_come_whole_and_streamed(client: OpenAI) -> None:
    few = {"top_k": 20, "seed": 11}
    asked: Any = {"model": MODEL, "messages": CHAT, "n": 2, "max_completion_tokens": 5, "extra_body": few}
    whole = client.chat.completions.create(**asked)
    texts = ["", ""]
    reasons: list[list[str | None]] = [[], []]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index].append(choice.finish_reason)
    assert texts == [choice.message.content for choice in whole.choices] and texts[0] != texts[1]
    for told, choice in zip(reasons, whole.choices, strict=True):
        assert [reason for reason in told if reason] == [choice.finish_reason]


def test_token_ids_are_a_prompt_and_an_answer(client: OpenAI) -> None:
    shown: Any = {"extra_body": {"return_token_ids": True}}
    first = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=3, **shown).choices[0]
    ids: Any = first.model_extra
    again = client.completions.create(**GREEDY, prompt=ids["prompt_token_ids"], max_tokens=3, **shown).choices[0]
    assert (again.text, again.model_extra) == (first.text, ids) and len(ids["token_ids"]) == 3


def test_logprobs_of_both_endpoints_are_of_the_tokens_that_were_chosen(client: OpenAI) -> None:
    plain = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=4, logprobs=2, echo=True).choices[0]
    told = plain.logprobs
    assert told and told.tokens and told.token_logprobs and told.top_logprobs and told.text_offset
    assert "".join(told.tokens) == plain.text and plain.text.startswith(PROMPT)
    assert [plain.text[at:].startswith(token) for at, token in zip(told.text_offset, told.tokens, strict=True)]
    for token, logprob, best in list(zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True))[-4:]:
        assert best[token] == logprob == max(best.values()) and len(best) == 2
    chat = client.chat.completions.create(
        **GREEDY, messages=CHAT, max_tokens=4, logprobs=True, top_logprobs=2, stop=["\0"]
    ).choices[0]
    assert chat.logprobs and chat.logprobs.content and len(chat.logprobs.content) == 4
    assert b"".join(bytes(one.bytes or ()) for one in chat.logprobs.content).decode() == chat.message.content
    for one in chat.logprobs.content:
        assert one.top_logprobs[0].logprob == one.logprob >= one.top_logprobs[1].logprob


def test_a_bias_and_a_stop_string_shape_the_answer(client: OpenAI) -> None:
    free = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=4)
    stopped = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=4, stop=["ris"])
    assert (free.choices[0].text[:6], free.choices[0].finish_reason) == (" Paris", "length")
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (" Pa", "stop")
    told: Any = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=1, extra_body={"return_token_ids": True}
    ).choices[0]
    biased = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=1, logit_bias={str(told.model_extra["token_ids"][0]): -100}
    )
    assert biased.choices[0].text != told.text == " Paris"


async def test_a_parsed_answer_is_of_the_class_that_was_asked_for(gateway: Gateway) -> None:
    async with gateway.async_client() as client:
        chats = client.chat.completions

        async def streamed() -> Any:
            async with chats.stream(**GREEDY, messages=CHAT, response_format=Person, max_tokens=64) as stream:
                return await stream.get_final_completion()

        whole, stream, any_object = await asyncio.gather(
            chats.parse(**GREEDY, messages=CHAT, response_format=Person, max_tokens=64),
            streamed(),
            chats.create(**GREEDY, messages=CHAT, response_format={"type": "json_object"}, max_tokens=6),
        )
    (choice,) = whole.choices
    assert isinstance(choice.message.parsed, Person) and choice.finish_reason == "stop"
    assert stream.choices[0].message.parsed == choice.message.parsed
    assert (any_object.choices[0].message.content or "").startswith("{")


async def test_a_call_that_must_come_comes_whole_and_streamed(gateway: Gateway) -> None:
    named = {"type": "function", "function": {"name": "Weather"}}
    asked: Any = {**GREEDY, "messages": CHAT, "tools": [WEATHER], "parallel_tool_calls": False, "max_tokens": 64}

    async with gateway.async_client() as client:

        async def streamed(choice: Any) -> Any:
            async with client.chat.completions.stream(**asked, tool_choice=choice) as stream:
                return await stream.get_final_completion()

        ways = [
            way(choice)
            for choice in ("required", named)
            for way in (lambda choice: client.chat.completions.parse(**asked, tool_choice=choice), streamed)
        ]
        answers = await asyncio.gather(*ways)
    for answer in answers:
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        (call,) = choice.message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather) and call.function.name == "Weather"
        assert call.id.startswith("call_")
    assert len({answer.choices[0].message.tool_calls[0].function.arguments for answer in answers}) == 1


def test_a_model_that_thinks_and_calls_in_its_own_way_is_read(client: OpenAI) -> None:
    call = {
        "type": "tag",
        "begin": '<tool_call>{"name": "Weather", "arguments": ',
        "content": {"type": "json_schema", "json_schema": Weather.model_json_schema()},
        "end": "}</tool_call>",
    }
    thought = {
        "type": "tag",
        "begin": "<think>",
        "content": {"type": "regex", "pattern": "[a-z]{2,6}"},
        "end": "</think>",
    }
    form = {"format": {"type": "sequence", "elements": [thought, {"type": "const_string", "value": "Look:"}, call]}}
    asked: Any = {
        **GREEDY,
        "messages": CHAT,
        "tools": [WEATHER],
        "max_tokens": 64,
        "extra_body": {"structured_outputs": {"structural_tag": form}},
    }
    message = client.chat.completions.create(**asked).choices[0].message
    extra: Any = message.model_extra
    assert re.fullmatch("[a-z]{2,6}", extra["reasoning_content"]) and message.content == "Look:"
    (made,) = message.tool_calls or ()
    assert made.function.name == "Weather" and Weather.model_validate_json(made.function.arguments)
    history = [*CHAT, message.model_dump(), {"role": "tool", "tool_call_id": made.id, "content": "20 degrees"}]
    on = client.chat.completions.create(**GREEDY, messages=history, tools=[WEATHER], tool_choice="none", max_tokens=2)
    assert on.usage and on.usage.completion_tokens in (1, 2)


def test_refusals_are_the_clients_own_exceptions_with_the_field(gateway: Gateway, client: OpenAI) -> None:
    for fields, param in (
        ({"temperature": 300}, "temperature"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "messages"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{"model": MODEL, "messages": CHAT, **fields})
        assert caught.value.param == param, caught.value
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")
    with gateway.client(api_key="another") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    assert [model.id for model in client.models.list()] == [MODEL]


def test_the_metrics_are_the_servers(gateway: Gateway) -> None:
    url = gateway.url.replace("/v1", "/metrics")
    told = httpx.get(url, headers={"Authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S).text
    names = set(re.findall(r"^# TYPE (\S+)", told, re.M))
    assert names and names == set(
        re.findall(r"^# TYPE (\S+)", httpx.get(gateway.server.metrics, timeout=PATIENCE_S).text, re.M)
    )
    assert httpx.get(url, timeout=PATIENCE_S).status_code == 401


def test_the_pages_example_is_a_script(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "openai.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = code.replace("http://127.0.0.1:9000/v1", gateway.url).replace('"none"', repr(KEY))
    exec(code.replace("stream=True", "stream=True, max_tokens=3"), {})
    assert capsys.readouterr().out


def test_a_client_that_leaves_a_stream_ends_its_request(gateway: Gateway, client: OpenAI) -> None:
    with gateway.server.cut_short(TOKENS):
        stream = client.completions.create(model=MODEL, **ENDLESS, stream=True)
        next(iter(stream))
        assert gateway.server.stats().running == 1
        stream.close()


def test_a_full_queue_says_when_to_come_again(gateway: Gateway, client: OpenAI) -> None:
    with client.completions.create(model=MODEL, **ENDLESS, n=20, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=MODEL, **ENDLESS, n=20)
    assert caught.value.code == "queue_full" and int(caught.value.response.headers["retry-after"]) >= 1


def test_tokens_of_texts_and_chats_are_those_that_are_generated_with(gateway: Gateway, client: OpenAI) -> None:
    with gateway.plain() as http:
        for path, body in (("/tokenize", {"prompt": PROMPT}), ("/v1/tokenize", {"messages": CHAT})):
            told = http.post(path, json=body).json()
            assert told["count"] == len(told["tokens"]) and told["max_model_len"] > 1000 and told["token_strs"] is None
            back = http.post(path.replace("tok", "detok"), json={"tokens": told["tokens"]}).json()
            if "prompt" in body:
                assert back == {"prompt": PROMPT}
                usage = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1).usage
            else:
                assert "Name a river." in back["prompt"] and "<|im_start|>" in back["prompt"]
                usage = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=1).usage
            assert usage and usage.prompt_tokens == told["count"]
        long = http.post("/tokenize", json={"prompt": "river " * 300_000}).json()
        assert long["count"] >= 300_000, "longer than the context, in a response larger than Triton's first pages"
        assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
        refused = http.post("/detokenize", json={"tokens": [1 << 30]})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tokens"
        assert httpx.post(f"{http.base_url}/tokenize", json={"prompt": PROMPT}, timeout=PATIENCE_S).status_code == 401


def test_the_view_of_the_engine_moves_and_tells_no_words(gateway: Gateway, client: OpenAI) -> None:
    with client.completions.create(model=MODEL, **ENDLESS, stream=True) as stream, gateway.plain() as http:
        next(iter(stream))
        outputs: list[int] = []
        with http.stream("GET", "/engine/stream", timeout=PATIENCE_S) as events:
            assert events.headers["content-type"].startswith("text/event-stream")
            for line in events.iter_lines():
                if not line:
                    continue
                told = json.loads(line.removeprefix("data: "))
                assert told["state"] == "ready" and "capital" not in line and not told["shows_prompts"]
                outputs += [row["output_tokens"] for row in told["running"]]
                if outputs and outputs[-1] > outputs[0]:
                    break
        told = http.get("/engine").json()
        assert [row["phase"] for row in told["running"]] == ["decode"] and told["tokens_per_s"] > 0
        pages = told["pages"]
        assert pages["total"] == sum(count for owner, count in pages.items() if owner != "total")
        assert httpx.get(f"{http.base_url}/engine", timeout=PATIENCE_S).status_code == 401


async def test_a_client_that_leaves_before_an_answer_ends_its_request(gateway: Gateway) -> None:
    before = (await asyncio.to_thread(gateway.server.stats)).steps
    async with gateway.async_client() as client:
        asking = asyncio.create_task(client.completions.create(model=MODEL, **ENDLESS))
        await asyncio.to_thread(eventually, lambda: gateway.server.stats().running, PATIENCE_S, lambda: "it never ran")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        after = await asyncio.to_thread(gateway.server.until_idle)
    assert after.steps - before < TOKENS, "it ran on to its end"


def test_a_gateway_that_is_told_to_end_finishes_its_answers(gateway: Gateway) -> None:
    minisgl = Path(sys.executable).with_name("minisgl")
    command = [str(minisgl), "gateway", "--port", "0", "--url", gateway.server.grpc]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = process.stderr.readline().split()[3]
            with OpenAI(base_url=url, api_key=KEY, max_retries=5) as client, contextlib.ExitStack() as stack:
                stream = client.completions.create(
                    **GREEDY, prompt=PROMPT, max_tokens=12, stream=True, timeout=PATIENCE_S
                )
                chunks = [next(iter(stream))]
                looking = stack.enter_context(
                    httpx.stream("GET", url.replace("/v1", "/engine/stream"), headers=HEADERS, timeout=PATIENCE_S)
                )
                process.send_signal(signal.SIGTERM)
                chunks += list(stream)
                looking.read()  # its end: who only looks on does not keep the gateway
            assert chunks[-1].choices[0].finish_reason == "length"
            assert process.wait(timeout=PATIENCE_S) == 0
            assert "out=12 finish=length" in process.stderr.read()
        finally:
            stop(process)


@contextmanager
def no_engine_can_start(server: Server) -> Iterator[None]:
    """In the body: the place of its log is taken."""
    logs = [server.run_dir / name for name in ("engine.log", "engine.log.1")]
    for log in logs:
        log.unlink(missing_ok=True)
        (log / "in the way").mkdir(parents=True)
    yield
    for log in logs:
        shutil.rmtree(log)


def test_an_engine_that_dies_is_told_to_who_waits_to_who_asks_and_to_the_health() -> None:
    """Of the fake device, whose answer goes on for more than a minute."""
    with serving("--openai", "0", device="fake", fake_step_ms=20) as server:
        gateway = gateway_of(server)

        def health() -> int:
            return httpx.get(gateway.url.replace("/v1", "/health"), timeout=PATIENCE_S).status_code

        assert health() == 200
        with gateway.client() as client:
            stream = client.completions.create(model=MODEL, **ENDLESS, stream=True)
            next(iter(stream))
            with no_engine_can_start(server):
                for pid in engine_processes(server.runtime):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        psutil.Process(pid).kill()
                with pytest.raises(openai.APIError, match="the engine stopped unexpectedly"):
                    list(stream)
                with pytest.raises(openai.InternalServerError) as caught:
                    client.completions.create(model=MODEL, prompt=PROMPT)
                assert (caught.value.status_code, caught.value.code) == (503, "unavailable")
                eventually(lambda: health() == 503, PATIENCE_S, lambda: "the gateway takes the dead for healthy")
            eventually(lambda: health() == 200, PATIENCE_S, lambda: "the engine did not come back")
            assert client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2).choices[0].finish_reason
