"""Reported faults of other servers' OpenAI API, on the gateway: /v1/completions and what ends an answer.

OA-02 vllm-project/vllm#6521, EleutherAI/lm-evaluation-harness#1411; OA-03 vllm-project/vllm PR #7746, #7283; OA-04
vllm-project/vllm PR #3441; OA-06 vllm-project/vllm#5334; OA-07 pegainfer-project/pegainfer#238,
sgl-project/sglang#1609.
The path is whole but for tritonserver (`fakes/whole_path.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.scripted_model import ids_of
from fakes.tiny_model import TINY
from fakes.tokenizers import byte_level_folder, sentencepiece_folder
from fakes.whole_path import events, scripted, whole_path
from minisgl_backend.messages.plan import BatchPlan

SCRIPTS = {"A": [b"one", b" two"], "B": [b"go", b" on", b" and", b" go"], "C": [b"abc", b"def"]}
LLAMA = {**TINY, "vocab_size": 512, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
STREAM: Any = {"stream": True, "stream_options": {"include_usage": True}}
BOTH = pytest.mark.parametrize("more", [{}, STREAM], ids=["whole", "stream"])


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """A model that follows SCRIPTS; its tokenizer has bytes and whole words, and adds no BOS."""
    async with scripted(SCRIPTS) as http:
        yield http


@pytest.fixture(params=[byte_level_folder, sentencepiece_folder], ids=["no-bos", "bos"])
async def any_model(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """No model: what comes is any tokens. Of both kinds of tokenizer."""
    async with whole_path(request.param(tmp_path / "model", config=LLAMA)) as http:
        yield http


async def complete(http: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    """The choices, of a stream joined; and [-1], which is the usage."""
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        told = answer.json()
        return [*told["choices"], told["usage"]]
    *chunks, done = events(answer)
    assert done == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            _join(choices.setdefault(choice["index"], {"text": "", "logprobs": None}), choice)
    return [*(choices[index] for index in sorted(choices)), chunks[-1]["usage"]]


def _join(whole: dict[str, Any], delta: dict[str, Any]) -> None:
    assert whole.get("finish_reason") is None, "a choice goes on after its end"
    whole |= {**delta, "text": whole["text"] + delta["text"], "logprobs": whole["logprobs"]}
    for name, column in (delta["logprobs"] or {}).items():
        whole["logprobs"] = whole["logprobs"] or {}
        whole["logprobs"][name] = (whole["logprobs"].get(name) or []) + (column or [])


async def refusal(http: httpx.AsyncClient, **body: Any) -> tuple[str, str]:
    """(param, message); the server answers the next request all the same."""
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert len(await complete(http, prompt="hi", max_tokens=1)) == 2
    error = answer.json()["error"]
    return error["param"], error["message"]


@BOTH
async def test_oa_02_an_echo_with_no_tokens_is_the_prompt_and_its_logprobs(
    any_model: httpx.AsyncClient, more: dict[str, Any]
) -> None:
    asked: Any = {"prompt": "Verdict: No", "echo": True, "logprobs": 1, "max_tokens": 0}
    choice, usage = await complete(any_model, **asked, **more)
    told = choice["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == ("Verdict: No", "length")
    assert (len(told["tokens"]), usage["completion_tokens"]) == (usage["prompt_tokens"], 0)
    assert usage["total_tokens"] == usage["prompt_tokens"]
    assert told["token_logprobs"][0] is None and all(value < 0 for value in told["token_logprobs"][1:])
    plain, _ = await complete(any_model, prompt="Verdict: No", echo=True, max_tokens=0, **more)
    assert (plain["text"], plain["logprobs"]) == ("Verdict: No", None)


async def test_oa_02_no_tokens_without_an_echo_is_refused(any_model: httpx.AsyncClient) -> None:
    param, message = await refusal(any_model, prompt="Verdict: No", max_tokens=0, logprobs=1)
    assert param == "max_tokens" and message.startswith("max_tokens: must be an integer from 1 to ")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt: must not be empty"),
        ([""], "prompt: must not be empty"),
        ([], "prompt: must be a string, a list of token ids, or a list of one of these, not empty"),
        ([[]], "prompt[0]: must not be empty"),
        (["hi", ""], "prompt[1]: must not be empty"),
        ([[5], []], "prompt[1]: must not be empty"),
    ],
)
async def test_oa_03_an_empty_prompt_is_refused_by_its_place(
    any_model: httpx.AsyncClient, prompt: Any, message: str
) -> None:
    assert await refusal(any_model, prompt=prompt) == (message.partition(":")[0], message)


async def test_oa_03_a_chat_may_say_nothing(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": ""}], "max_tokens": 1}
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200


@BOTH
@pytest.mark.parametrize("echo", [False, True])
async def test_oa_04_choices_are_prompts_times_n_in_their_order(
    http: httpx.AsyncClient, more: dict[str, Any], echo: bool
) -> None:
    asked: Any = {"n": 2, "temperature": 1, "echo": echo, "max_tokens": 5}
    *choices, usage = await complete(http, prompt=["say A", "A C"], **asked, **more)
    front = ["say A", "A C"] if echo else ["", ""]
    wanted = [front[0] + "one two"] * 2 + [front[1] + "abcdef"] * 2
    assert [choice["text"] for choice in choices] == wanted
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5 + 3, 12)


@BOTH
async def test_oa_04_lists_of_ids_are_prompts(http: httpx.AsyncClient, more: dict[str, Any]) -> None:
    a, c = (ids_of(SCRIPTS)[character] for character in (b"A", b"C"))
    one, _ = await complete(http, prompt=[c, a], **more)
    first, second, _ = await complete(http, prompt=[[a], [a, c]], **more)
    assert [choice["text"] for choice in (one, first, second)] == ["one two", "one two", "abcdef"]


@BOTH
async def test_oa_04_an_echo_of_ids_is_their_text(http: httpx.AsyncClient, more: dict[str, Any]) -> None:
    a, c = (ids_of(SCRIPTS)[character] for character in (b"A", b"C"))
    asked: Any = {"echo": True, "n": 2, "temperature": 1, "max_tokens": 2}
    *choices, _ = await complete(http, prompt=[[c, a], [a, c]], **asked, **more)
    assert [choice["text"] for choice in choices] == ["CAone two"] * 2 + ["ACabcdef"] * 2
    alone, usage = await complete(http, prompt=[1, c, a], echo=True, logprobs=0, max_tokens=1, **more)
    assert alone["text"] == "<|im_start|>CAone" and alone["logprobs"]["tokens"] == ["<|im_start|>", "C", "A", "one"]
    nothing, usage = await complete(http, prompt=[c, a], echo=True, logprobs=1, max_tokens=0, **more)
    assert (nothing["text"], nothing["logprobs"]["tokens"], usage["completion_tokens"]) == ("CA", ["C", "A"], 0)


async def test_oa_04_ids_that_are_none_are_refused(http: httpx.AsyncClient) -> None:
    for echo in (False, True):
        answer = await http.post("/v1/completions", json={"prompt": [5, 10**6], "echo": echo})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@BOTH
@pytest.mark.parametrize("prompt", ["\n3) Total is 75", "你好, the fox é"])
async def test_oa_06_the_tokens_of_an_echo_are_its_text_and_their_offsets_are_right(
    any_model: httpx.AsyncClient, more: dict[str, Any], prompt: str
) -> None:
    shown: Any = {"echo": True, "logprobs": 1, "return_token_ids": True, "max_tokens": 0}
    choice, usage = await complete(any_model, prompt=prompt, **shown, **more)
    assert choice["text"] == prompt
    _check_columns(choice, usage["prompt_tokens"])
    again, usage = await complete(any_model, prompt=choice["prompt_token_ids"], **shown, **more)
    assert again["text"].endswith(prompt)
    _check_columns(again, usage["prompt_tokens"])


@BOTH
async def test_oa_06_and_the_tokens_of_the_answer_go_on_from_there(
    http: httpx.AsyncClient, more: dict[str, Any]
) -> None:
    choice, usage = await complete(http, prompt="\n3) A", echo=True, logprobs=1, max_tokens=2, **more)
    assert choice["text"] == "\n3) Aone two"
    _check_columns(choice, usage["prompt_tokens"] + 2)


def _check_columns(choice: dict[str, Any], tokens: int) -> None:
    told, text = choice["logprobs"], choice["text"]
    assert [len(column) for column in told.values()] == [tokens] * 4
    if "\ufffd" not in "".join(told["tokens"]):
        assert "".join(told["tokens"]) == text
    assert told["text_offset"] == sorted(told["text_offset"])
    for offset, token in zip(told["text_offset"], told["tokens"], strict=True):
        assert text[offset : offset + len(token)] == token or "\ufffd" in token


STOP_ID = ids_of(SCRIPTS)[b" and"]


@BOTH
@pytest.mark.parametrize(
    ("asked", "text", "reason", "tokens"),
    [
        ({"prompt": "A", "max_tokens": 9}, "one two", "stop", 3),  # the end-of-sequence token
        ({"prompt": "A", "max_tokens": 3}, "one two", "stop", 3),  # as the last token that is allowed
        ({"prompt": "A", "max_tokens": 2}, "one two", "length", 2),
        ({"prompt": "A", "max_tokens": 5, "ignore_eos": True}, "one two", "length", 5),
        ({"prompt": "B", "stop": ["n an"], "max_tokens": 9}, "go o", "stop", 3),
        ({"prompt": "B", "stop_token_ids": [STOP_ID], "max_tokens": 9}, "go on", "stop", 3),
        ({"prompt": "B", "stop": ["n an"], "max_tokens": 3}, "go o", "stop", 3),
        ({"prompt": "B", "stop": ["and?"], "max_tokens": 3}, "go on and", "length", 3),
    ],
)
async def test_oa_07_the_reason_is_true(
    http: httpx.AsyncClient, more: dict[str, Any], asked: Any, text: str, reason: str, tokens: int
) -> None:
    choice, usage = await complete(http, **asked, **more)
    told = choice["text"] if not asked.get("ignore_eos") else choice["text"][: len(text)]
    assert (told, choice["finish_reason"], usage["completion_tokens"]) == (text, reason, tokens)


async def test_oa_07_an_answer_that_is_cut_off_has_no_reason(tmp_path: Path) -> None:
    sent = asyncio.Event()

    async def die_at_the_sixth(plan: BatchPlan) -> None:
        if plan.step == 6:
            await sent.wait()
            raise RuntimeError("this test ends it")

    asked: Any = {"prompt": "hi", "max_tokens": 50}
    folder = byte_level_folder(tmp_path / "model", config=LLAMA)
    async with whole_path(folder, on_sent=sent.set, hook=die_at_the_sixth) as http:
        *chunks, last = events(await http.post("/v1/completions", json={**asked, "stream": True}))
        whole = await http.post("/v1/completions", json=asked)
    assert chunks and all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert last["error"]["code"] == whole.json()["error"]["code"] == "unavailable" and whole.status_code == 503
