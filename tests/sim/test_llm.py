"""The engine without Triton, as a script uses it."""

from __future__ import annotations

import gc
import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.errors import InvalidRequest, ModelNotFound, RequestCancelled, StartError, UnsupportedFeature
from minisgl_backend.llm import LLM, Room
from minisgl_backend.text.parameters import SamplingParams
from minisgl_backend.text.tokenizer import Tokenizer

PATIENCE_S = 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)


@pytest.fixture(scope="module", params=[False, True], ids=["depth-0", "overlap"])
def llm(tiny_llama: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    sizes = {"max_running": 4, "queue_limit": 8}
    with LLM(tiny_llama, device="fake", executor="inline", overlap=request.param, **sizes) as llm:
        yield llm


def _until_idle(llm: LLM) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (stats := llm.stats()).open_requests or stats.running or stats.free_pages < stats.total_pages:
        assert time.monotonic() < deadline, stats


def test_answers_come_in_the_order_of_the_prompts_however_many_they_are(llm: LLM) -> None:
    prompts = [("the cat " * (1 + 11 * i % 17)).strip() for i in range(50)]  # far over the queue limit
    answers = llm.generate(prompts, GREEDY, progress=False)
    assert [answer.prompt for answer in answers] == prompts
    for prompt, answer in list(zip(prompts, answers, strict=True))[:5]:
        assert llm.generate(prompt, GREEDY)[0].samples == answer.samples


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=number) for number in (1, 5, 9)]
    assert [one.num_output_tokens for one in llm.generate(["the"] * 3, params)] == [1, 5, 9]
    with pytest.raises(ValueError, match="3 for 2 prompts"):
        llm.generate(["the"] * 2, params)


def test_several_answers_to_a_prompt_are_its_samples(llm: LLM) -> None:
    (answer,) = llm.generate("the cat", SamplingParams(n=3, max_tokens=4, return_token_ids=True))
    assert [len(sample.token_ids) for sample in answer.samples] == [4, 4, 4] and answer.num_output_tokens == 12
    assert (answer.text, answer.token_ids) == (answer.samples[0].text, answer.samples[0].token_ids)
    assert answer.prompt_token_ids is not None and len(answer.prompt_token_ids) == answer.num_input_tokens
    pieces = list(llm.stream("the cat", SamplingParams(n=3, max_tokens=4)))
    assert {piece.index for piece in pieces} == {0, 1, 2}
    assert len(llm.generate(["the cat"] * 20, SamplingParams(n=5, max_tokens=2), progress=False)) == 20


def test_room_for_several_is_given_together() -> None:
    room = Room(4)
    assert room.take(3, wait=True) and not room.take(2, wait=False) and room.take(1, wait=False)
    room.give_back(3)
    room.give_back(1)
    assert room.take(9, wait=False), "more than there is: all of it"
    room.close()
    assert room.take(4, wait=True), "who waits finds it closed"


def test_two_threads_may_generate_at_once(llm: LLM) -> None:
    """Together they ask for far more than the engine takes in at a time; none is refused for it."""
    answers: list[int] = []

    def work() -> None:
        answers.extend(one.num_output_tokens for one in llm.generate(["the cat"] * 60, GREEDY, progress=False))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [10] * 180


def test_rb_07_ten_thousand_prompts_in_one_list_are_answered_in_order(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=1 + index % 2) for index in range(10_000)]
    answers = llm.generate(["the"] * 10_000, params, progress=False)
    assert [one.num_output_tokens for one in answers] == [1 + index % 2 for index in range(10_000)]


def test_a_stream_joined_is_the_answer(llm: LLM) -> None:
    pieces = list(llm.stream("the cat", GREEDY))
    (answer,) = llm.generate("the cat", GREEDY)
    assert "".join(piece.text for piece in pieces) == answer.text
    assert tuple(token for piece in pieces for token in piece.token_ids) == answer.token_ids
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == answer.finish_reason == "length"


def test_leaving_a_stream_cancels_it(llm: LLM) -> None:
    stream = llm.stream("the cat", SamplingParams(max_tokens=900))
    next(stream)
    stream.close()
    _until_idle(llm)


def test_a_refused_prompt_raises_and_cancels_the_others(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="text_input"):
        llm.generate(["the cat", "", "the cat"], SamplingParams(max_tokens=900))
    _until_idle(llm)
    with pytest.raises(InvalidRequest, match="temperature"):
        llm.generate("the", SamplingParams(temperature=float("nan")))
    with pytest.raises(InvalidRequest, match="text_input"):
        llm.generate("a lone surrogate \ud800")


CHAT = [{"role": "user", "content": "the cat"}]


def test_a_text_token_ids_and_a_chat_are_prompts_alone_and_in_one_list(llm: LLM, tiny_llama: Path) -> None:
    tokenizer = Tokenizer.load(tiny_llama)
    for prompt, ids in (("the cat", tokenizer.encode("the cat")), (CHAT, tokenizer.encode_chat(CHAT))):
        (answer,), (by_ids,) = llm.generate(prompt, GREEDY), llm.generate(ids, GREEDY)
        assert (answer.prompt, answer.num_input_tokens) == (prompt, len(ids))
        assert (by_ids.prompt, by_ids.token_ids, by_ids.text) == (ids, answer.token_ids, answer.text)
        for streamed in (prompt, ids):
            assert "".join(piece.text for piece in llm.stream(streamed, GREEDY)) == answer.text
        assert [one.samples for one in llm.generate([ids, prompt, "the", ids], GREEDY)[:2]] == [answer.samples] * 2


def test_a_template_of_the_caller_is_used_where_the_setting_allows_it(llm: LLM, tiny_llama: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=10, chat_template="{{ messages[0].content }}")
    with pytest.raises(UnsupportedFeature, match=r"^chat_template: .*allow_client_template"):
        llm.generate(CHAT, params)
    with LLM(tiny_llama, device="fake", executor="inline", allow_client_template=True) as open_llm:
        (by_chat,) = open_llm.generate(CHAT, params)
        assert by_chat.num_input_tokens == len(Tokenizer.load(tiny_llama).encode("the cat", add_special_tokens=False))


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([[]], "input_ids"),
        ([1, 2**31], "input_ids"),
        ([1, "x"], "input_ids"),
        ([10**6], "input_ids"),
        ([{"role": "user", "content": b"x"}], "messages"),
        ([{"role": "user", "content": "\ud800"}], "messages"),
        ([{"content": "hi"}], "messages"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, prompt: Any, field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        llm.generate(prompt)
    _until_idle(llm)


def test_after_close_everything_says_so(tiny_llama: Path) -> None:
    llm = LLM(tiny_llama, device="fake", executor="inline", fake_step_ms=20.0)
    stream = llm.stream("the cat", SamplingParams(max_tokens=900))
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(RequestCancelled):
        for _ in stream:
            pass
    with pytest.raises(RequestCancelled):
        llm.generate("the")
    with pytest.raises(RequestCancelled):
        llm.stats()


def test_the_log_tells_how_a_worker_within_this_process_computes(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with LLM(tiny_llama, device="fake", executor="inline", threads=3):
        pass
    told = [
        line for line in caplog.messages if re.search(r"worker-0: 3 threads on any of .*, in the host's process", line)
    ]
    assert len(told) == 2, "at the start, and again when it is ready"


def test_a_wrong_model_raises_with_its_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="nowhere") as caught:
        LLM(tmp_path / "nowhere")
    assert caught.value.exit_code == ModelNotFound.exit_code
    gc.collect()
