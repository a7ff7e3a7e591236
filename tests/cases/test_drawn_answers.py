"""Reported faults of other servers, class "sampling parameters", on a small real model.

SP-03 vllm-project/vllm PR #16529, PR #5963; SP-05 huggingface/text-generation-inference#1810; SP-07
sgl-project/sglang#39260; SP-08 vllm-project/vllm PR #11898; ST-08 (see test_stop_strings.py) end to end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.tiny_model import make_tiny_llama
from minisgl_backend.answers import Completion, Piece
from minisgl_backend.errors import InvalidRequest
from minisgl_backend.llm import LLM
from minisgl_backend.text.parameters import SamplingParams

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model: Path = make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    with LLM(model, device="cpu", executor="inline", threads=1, max_running=8) as llm:
        yield llm


VOCAB = 320
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("bias", [{str(VOCAB + 5): 3}, {"cat": -10}, {"-1": 1}, {"12": "x"}])
def test_sp_03_a_bias_for_what_is_no_token_is_refused_and_the_next_request_served(
    llm: LLM, bias: dict[Any, Any]
) -> None:
    with pytest.raises(InvalidRequest, match=r"^logit_bias: "):
        llm.generate("the cat", SamplingParams(logit_bias=bias))
    assert llm.generate("the cat", GREEDY)[0].num_output_tokens == 12


def test_sp_03_no_bias_and_three_hundred_are_fine_and_neighbours_unchanged(llm: LLM) -> None:
    (alone,) = llm.generate("the cat", GREEDY)
    many = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias=dict.fromkeys(range(300), -100.0))
    none = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias={})
    first, biased, last = llm.generate(["the cat"] * 3, [GREEDY, many, none])
    assert first.token_ids == last.token_ids == alone.token_ids
    assert all(token >= 300 for token in biased.token_ids)


def test_sp_05_a_neighbours_penalties_change_nothing(llm: LLM) -> None:
    (alone,) = llm.generate("the cat", GREEDY)
    penalised = SamplingParams(
        temperature=0.0, max_tokens=30, ignore_eos=True, frequency_penalty=1.2, presence_penalty=0.5
    )
    (b_alone,) = llm.generate("the dog", penalised)
    for b_tokens in (3, 30):  # B ends first, and late
        b = SamplingParams(
            temperature=0.0, max_tokens=b_tokens, ignore_eos=True, frequency_penalty=1.2, presence_penalty=0.5
        )
        a, other = llm.generate(["the cat", "the dog"], [GREEDY, b])
        assert a.token_ids == alone.token_ids
        assert other.token_ids == b_alone.token_ids[:b_tokens]


def joined(pieces: list[Piece], index: int = 0) -> tuple[str, tuple[int, ...], tuple[Any, ...]]:
    mine = [piece for piece in pieces if piece.index == index]
    return (
        "".join(piece.text for piece in mine),
        tuple(token for piece in mine for token in piece.token_ids),
        tuple(entry for piece in mine for entry in piece.logprobs or ()),
    )


def test_sp_07_every_token_has_its_own_alternatives_streamed_or_not(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=3)
    pieces = list(llm.stream("the cat", params))
    (whole,) = llm.generate("the cat", params)
    text, ids, logprobs = joined(pieces)
    assert (text, ids, logprobs) == (whole.text, whole.token_ids, whole.samples[0].logprobs)
    assert len(logprobs) == 20
    for token, entries in zip(ids, logprobs, strict=True):
        assert entries[token].rank == 1 and len(entries) == 3
    assert whole.samples[0].cumulative_logprob == pytest.approx(
        sum(entries[token].logprob for token, entries in zip(ids, logprobs, strict=True)), abs=1e-4
    )


@pytest.mark.parametrize("stop", [[], ["e"]])
def test_sp_08_seeded_answers_differ_repeat_and_each_ends_for_itself(llm: LLM, stop: list[str]) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=9, max_tokens=40, stop=stop, ignore_eos=True)
    runs = [list(llm.stream("the cat", params)) for _ in range(2)]
    first, second = ([joined(pieces, index)[:2] for index in range(4)] for pieces in runs)
    assert first == second
    assert len({ids for _, ids in first}) == 4
    for pieces in runs:
        ends = {piece.index: piece.finish_reason for piece in pieces if piece.finish_reason}
        assert sorted(ends) == [0, 1, 2, 3]
    (whole,) = llm.generate("the cat", params)
    assert [(sample.text, sample.token_ids) for sample in whole.samples] == first
    if stop:
        assert all("e" not in text for text, _ in first)
        assert any(sample.finish_reason == "stop" for sample in whole.samples)


def test_sp_08_an_answer_is_the_same_whatever_n_is(llm: LLM) -> None:
    def samples(n: int) -> list[tuple[int, ...]]:
        (got,) = llm.generate("the cat", SamplingParams(n=n, seed=5, max_tokens=10, ignore_eos=True))
        return [sample.token_ids for sample in got.samples]

    assert samples(3)[:1] == samples(1)
    assert samples(5)[:3] == samples(3)


def test_st_08_min_tokens_holds_every_end_back(llm: LLM) -> None:
    ends = list(range(0, VOCAB, 2))  # half of the vocabulary ends the answer
    params = SamplingParams(seed=3, max_tokens=30, stop_token_ids=ends[:256])

    def tokens(answer: Completion) -> int:
        return answer.num_output_tokens

    short, held = llm.generate(
        ["the cat"] * 2, [params, SamplingParams(seed=3, max_tokens=30, min_tokens=12, stop_token_ids=ends[:256])]
    )
    assert tokens(short) < 12 < tokens(held) + 1
    assert all(token % 2 for token in held.token_ids[:12])
