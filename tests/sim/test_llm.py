"""The engine without Triton, as a script uses it."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl_backend.errors import InvalidRequest, ModelNotFound, RequestCancelled, StartError
from minisgl_backend.llm import LLM
from minisgl_backend.text.parameters import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(tiny_llama, device="fake", executor="inline", max_running=4, queue_limit=8) as llm:
        yield llm


def _until_idle(llm: LLM) -> None:
    deadline = time.monotonic() + 10
    while (stats := llm.stats()).open_requests or stats.running or stats.free_pages < stats.total_pages:
        assert time.monotonic() < deadline, stats


def test_answers_come_in_the_order_of_the_prompts_however_many_they_are(llm: LLM) -> None:
    prompts = [("the cat " * (1 + 11 * i % 17)).strip() for i in range(50)]  # far over the queue limit
    answers = llm.generate(prompts, GREEDY, progress=False)
    assert [answer.prompt for answer in answers] == prompts
    for prompt, answer in list(zip(prompts, answers, strict=True))[:5]:
        assert llm.generate(prompt, GREEDY) == [answer]


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=number) for number in (1, 5, 9)]
    assert [one.num_output_tokens for one in llm.generate(["the"] * 3, params)] == [1, 5, 9]
    with pytest.raises(ValueError, match="3 for 2 prompts"):
        llm.generate(["the"] * 2, params)


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


def test_after_close_everything_says_so(tiny_llama: Path) -> None:
    llm = LLM(tiny_llama, device="fake", executor="inline")
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


def test_a_wrong_model_raises_with_its_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="nowhere") as caught:
        LLM(tmp_path / "nowhere")
    assert caught.value.exit_code == ModelNotFound.exit_code
    gc.collect()
