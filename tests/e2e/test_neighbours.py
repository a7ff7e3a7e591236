"""Beside other models on the real server: `summarise`, loading and unloading, an ensemble, two LLMs.

The files and commands are those of docs/neighbours.md.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from fakes.scripted_model import write_scripted_model
from load.serving import PATIENCE_S, Server, eventually, serving
from load.streams import ask, inputs
from minisgl_backend.actors.connection import inspect
from minisgl_backend.serving.parts import BETWEEN
from minisgl_backend.serving.summarise import prompt_of

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = ROOT / "model_repository"
DOCUMENT = (ROOT / "docs" / "neighbours.md").read_text()
CLIENT_S = 300  # of a client, on a machine that does much else
FAKE = {"device": "fake", "fake_step_ms": 5, "lease_s": 2}


def documented(path: str) -> str:
    """The file of the page that stands under its name."""
    found = re.search(rf"^`{re.escape(path)}`[^\n]*\n\n```\w+\n(.*?)```$", DOCUMENT, re.DOTALL | re.MULTILINE)
    assert found is not None, path
    return found[1]


def documented_posts() -> list[str]:
    """The paths of the page's commands for loading and unloading, in order."""
    return re.findall(r"^curl -X POST http://127.0.0.1:8000(/v2/repository/\S+)$", DOCUMENT, re.MULTILINE)


def summariser(folder: Path, **settings: str) -> None:
    """A copy of `summarise` with other settings."""
    shutil.copytree(REPOSITORY / "summarise", folder)
    with (folder / "config.pbtxt").open("a") as file:
        for key, value in settings.items():
            file.write(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n')


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """minisgl, summarise, the page's ensemble, and a summariser that asks a parrot."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ("minisgl", "summarise"):
        shutil.copytree(REPOSITORY / name, folder / name)
    (folder / "assistant" / "1").mkdir(parents=True)
    (folder / "prepare" / "1").mkdir(parents=True)
    for path in ("prepare/config.pbtxt", "prepare/1/model.py", "assistant/config.pbtxt"):
        (folder / path).write_text(documented(path))
    summariser(folder / "summarise_parrot", model="parrot", parallel_parts="4", slice_tokens="4")
    config = (REPOSITORY / "minisgl" / "config.pbtxt").read_text()
    (folder / "parrot" / "1").mkdir(parents=True)
    (folder / "parrot" / "config.pbtxt").write_text(config)
    shutil.copy(ROOT / "tests" / "fakes" / "parrot_model.py", folder / "parrot" / "1" / "model.py")
    return folder


@pytest.fixture(scope="module")
def neighbours(repository: Path) -> Iterator[Server]:
    loaded = ("minisgl", "summarise", "assistant", "parrot", "summarise_parrot")
    options = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in loaded)]
    with serving("--model-repository", str(repository), options=options, **FAKE) as server:
        ready = f"{server.http}/v2/health/ready"
        eventually(
            lambda: httpx.get(ready, timeout=CLIENT_S).status_code == 200, PATIENCE_S, lambda: "\n".join(server.lines)
        )
        yield server


def parts(*lines: str) -> str:
    """A text of which each line begins a part of 66 bytes."""
    return "".join(f"{line}\n{'x' * (63 - len(line))}\n\n" for line in lines)


def post(server: Server, model: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.http}/v2/models/{model}/generate", json=body, timeout=CLIENT_S)


def stream(server: Server, model: str, **body: Any) -> list[dict[str, Any]]:
    url = f"{server.http}/v2/models/{model}/generate_stream"
    with httpx.stream("POST", url, json={"stream": True, **body}, timeout=CLIENT_S) as response:
        return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]


def test_the_parts_of_a_text_are_summarised_at_once_and_streamed_in_their_order(neighbours: Server) -> None:
    text = parts("after four one", "say two", "say three", "say four", "say five")
    events = stream(neighbours, "summarise_parrot", text_input=text, part_bytes=66)
    assert "".join(event["text_output"] for event in events) == BETWEEN.join(["one", "two", "three", "four", "five"])
    assert [event["finish_reason"] for event in events] == ["None"] * (len(events) - 1) + ["stop"]
    whole = post(neighbours, "summarise_parrot", text_input=text, part_bytes=66).json()
    assert whole["text_output"] == "one\n\ntwo\n\nthree\n\nfour\n\nfive"


async def test_the_first_part_is_streamed_while_the_others_are_not_done(neighbours: Server) -> None:
    """The second part ends only because the client, having seen the first, asks a third for it."""
    async with triton.InferenceServerClient(neighbours.grpc) as client:
        responses = summaries(client, "summarise_parrot", parts("say first", "after released second"), part_bytes=66)
        assert await anext(responses) == "first"
        released = summaries(client, "summarise_parrot", parts("say released"), part_bytes=66)
        assert [piece async for piece in released] == ["released"]
        assert [piece async for piece in responses] == [f"{BETWEEN}second"]


async def summaries(
    client: triton.InferenceServerClient, model: str, text: str, **parameters: Any
) -> AsyncIterator[str]:
    """The pieces of one stream. Leaving the iteration cancels it."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        tensors = inputs(text, stream=True, sampling_parameters=parameters)
        yield {"model_name": model, "inputs": tensors, "enable_empty_final_response": True}

    responses = client.stream_infer(requests())
    try:
        async for result, error in responses:
            if error is not None:
                raise error
            for piece in result.as_numpy("text_output").reshape(-1):
                yield piece.decode()
    finally:
        responses.cancel()


def test_a_failed_part_fails_the_answer_with_its_own_words(neighbours: Server) -> None:
    text = parts("go on", "fail on it", "go on")
    answer = post(neighbours, "summarise_parrot", text_input=text, part_bytes=66, max_tokens=4096)
    assert (answer.status_code, answer.json()) == (400, {"error": "top_k: refused by it"})
    after = post(neighbours, "summarise_parrot", text_input=parts("say well"), part_bytes=66)
    assert after.json()["text_output"] == "well", "the workers are free again"


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"text_input": ""}, "text_input"),
        ({"text_input": "a", "part_bytes": 1}, "part_bytes"),
        ({"text_input": "a", "max_tokens": 0}, "max_tokens"),
        ({"text_input": "a", "temprature": 1}, "did you mean 'temperature'"),
        ({"text_input": "a", "return_num_output_tokens": True}, "return_num_output_tokens"),
        ({"text_input": "a", "messages": "[]"}, "messages"),
    ],
)
def test_a_bad_request_is_refused_by_name(neighbours: Server, body: dict[str, Any], names: str) -> None:
    answer = post(neighbours, "summarise", **body)
    assert answer.status_code == 400 and names in answer.json()["error"], answer.text


def test_thousands_of_calls_leave_the_stub_as_it_was(neighbours: Server) -> None:
    """The heap takes a step once in a while, and then stands; what is kept of each call grows with every round."""
    stub = psutil.Process(neighbours.pid_of("triton_python_b", "summarise"))
    text = parts(*(f"part {number}" for number in range(700)))

    def summarise() -> str:
        return str(post(neighbours, "summarise", text_input=text, part_bytes=66, max_tokens=1).json()["text_output"])

    first = summarise()
    assert first.count(BETWEEN) > 450, "one word a part, a few of them blanks"
    threads, growth = stub.num_threads(), [1 << 40]
    while growth[-1] >= 8 << 20:
        assert len(growth) < 6, f"bytes more after each round: {growth[1:]}"
        before = stub.memory_info().rss
        assert summarise() == first
        growth.append(stub.memory_info().rss - before)
    eventually(lambda: stub.num_threads() <= threads, PATIENCE_S, lambda: f"{stub.num_threads()} threads of {threads}")
    neighbours.until_idle()


def until_open(server: Server, count: int) -> None:
    eventually(lambda: server.stats().open_requests >= count, PATIENCE_S, lambda: f"not {count} open: {server.stats()}")


async def test_a_cancel_ends_every_call_that_was_made_for_it(neighbours: Server) -> None:
    text = "Some words of a long text. " * 400  # minutes, if nobody ended it
    async with triton.InferenceServerClient(neighbours.grpc) as client:
        pieces = summaries(client, "summarise", text, part_bytes=100, max_tokens=4096, ignore_eos=True)
        await anext(pieces)
        await asyncio.to_thread(until_open, neighbours, 1)
        await pieces.aclose()

    def alone() -> bool:
        """No part goes on: nothing else runs before, beside or after an answer. One look may fall between two calls."""
        before = neighbours.until_idle().steps
        assert asyncio.run(ask(neighbours.grpc, "a", max_tokens=20)).reason == "length"
        return neighbours.stats().steps == before + 20

    await asyncio.to_thread(eventually, alone, PATIENCE_S, lambda: f"it goes on: {neighbours.stats()}")


def test_a_dropped_http_stream_ends_its_calls_too(neighbours: Server) -> None:
    url = f"{neighbours.http}/v2/models/summarise/generate_stream"
    body = {"text_input": "Some words. " * 800, "part_bytes": 100, "max_tokens": 4096, "stream": True}
    with httpx.stream("POST", url, json=body, timeout=CLIENT_S) as response:
        next(response.iter_lines())
    neighbours.until_idle()


async def test_each_is_unloaded_and_loaded_while_the_other_serves(neighbours: Server) -> None:
    """The commands of the page, in their order, with streams of the other model in flight."""
    unload_summarise, load_summarise, unload_minisgl, load_minisgl, index = documented_posts()

    async def command(path: str) -> httpx.Response:
        answer = await asyncio.to_thread(httpx.post, neighbours.http + path, timeout=CLIENT_S)
        assert answer.status_code == 200, answer.text
        return answer

    running = asyncio.create_task(ask(neighbours.grpc, "a", max_tokens=400, ignore_eos=True))

    def begun() -> bool:  # or, where the test had no time to look, over
        return bool(neighbours.stats().running) or running.done()

    await asyncio.to_thread(eventually, begun, PATIENCE_S, lambda: "it never ran")
    await command(unload_summarise)
    assert "summarise" in (await asyncio.to_thread(post, neighbours, "summarise", text_input="a")).json()["error"]
    await command(load_summarise)
    answer = await running
    assert (answer.reason, answer.error) == ("length", None)

    await command(unload_minisgl)
    refused = await asyncio.to_thread(post, neighbours, "summarise", text_input="a text")
    assert refused.json() == {"error": "the model 'minisgl' is not loaded, try again later"}
    parrot = await asyncio.to_thread(post, neighbours, "summarise_parrot", text_input=parts("say hello"))
    assert parrot.json()["text_output"] == "hello"
    await command(load_minisgl)
    states = {entry["name"]: entry["state"] for entry in (await command(index)).json() if "state" in entry}
    assert (states["minisgl"], states["summarise"]) == ("READY", "READY")
    again = await asyncio.to_thread(post, neighbours, "summarise", text_input="a text", max_tokens=2)
    assert again.status_code == 200, again.text


async def test_an_unload_of_the_model_that_is_asked_lets_the_slices_under_way_end(neighbours: Server) -> None:
    async with triton.InferenceServerClient(neighbours.grpc) as client:
        pieces = summaries(client, "summarise", "Some words. " * 40, part_bytes=100, max_tokens=4096, ignore_eos=True)
        await anext(pieces)
        await client.unload_model("minisgl")
        with pytest.raises(InferenceServerException, match="the model 'minisgl' is not loaded"):
            async for _ in pieces:
                pass
        await client.load_model("minisgl")
    assert post(neighbours, "summarise", text_input="a text", max_tokens=2).status_code == 200


def test_an_ensemble_with_minisgl_in_it_streams(neighbours: Server) -> None:
    prompt = "Question: Why?\nAnswer:"
    expected = asyncio.run(ask(neighbours.grpc, prompt, max_tokens=50)).pieces
    events = stream(neighbours, "assistant", question="Why?", max_tokens=50)
    assert "".join(event["text_output"] for event in events) == "".join(expected)
    assert [event["finish_reason"] for event in events] == ["None"] * (len(events) - 1) + ["length"]
    assert len(events) > 3
    whole = post(neighbours, "assistant", question="Why?", stream=False, max_tokens=50).json()
    assert whole["text_output"] == prompt + "".join(expected)
    refused = post(neighbours, "assistant", question="Why?", stream=False, max_tokens=0).json()
    assert refused["error"].startswith("in ensemble 'assistant', max_tokens: must be")


def test_the_real_model_summarises_a_text_as_if_each_part_had_been_asked_alone(server: Server) -> None:
    """But for the words at the end that `max_tokens` cuts: slices use some tokens up by saying a word twice."""
    story = ["The cat sat on the mat all day long.", "A dog came by and barked at the sun."]
    body = {"text_input": "\n\n".join(story), "part_bytes": 64, "max_tokens": 24}
    told = post(server, "summarise", **body).json()["text_output"]
    left = told
    for part in story:
        prompt = {"text_input": prompt_of(part, ""), "max_tokens": 24, "temperature": 0}
        alone = post(server, "minisgl", **prompt, exclude_input_in_output=True).json()["text_output"].strip()
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(left, alone, strict=False))))
        assert same > 0.7 * len(alone), (left[:same], alone)
        left = left[same:].lstrip()
    assert left == ""
    events = stream(server, "summarise", **body)
    assert "".join(event["text_output"] for event in events) == told
    assert len(events) > 1


def two_models(folder: Path) -> Path:
    """As the page says: a copy of the folder, with another 1/model.json."""
    for name in ("minisgl", "writer"):
        shutil.copytree(REPOSITORY / "minisgl", folder / name)
        model = write_scripted_model(folder.parent / f"model-{name}", {"?": [f" I am {name}.".encode()]})
        settings = {"model": str(model), "device": "cpu", "kv_bytes": 1 << 20, "threads": 1, "lease_s": 2}
        (folder / name / "1" / "model.json").write_text(json.dumps(settings))
    return folder


def test_two_llms_side_by_side_answer_each_for_itself_from_engines_of_their_own(tmp_path: Path) -> None:
    repository = two_models(tmp_path / "repository")
    with serving("--model-repository", str(repository)) as server:
        ready = f"{server.http}/v2/health/ready"
        eventually(
            lambda: httpx.get(ready, timeout=CLIENT_S).status_code == 200, PATIENCE_S, lambda: "\n".join(server.lines)
        )
        for name in ("minisgl", "writer"):
            answer = post(server, name, text_input="Who are you?", exclude_input_in_output=True).json()
            assert answer["text_output"] == f" I am {name}."
        engines = [asyncio.run(inspect(folder)) for folder in server.runtime.iterdir()]
        workers = {dict(engine.pids)["worker-0"] for engine in engines if engine is not None}
        assert len(workers) == 2
