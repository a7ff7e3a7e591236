"""The same texts, tokens and logprobs alone, batched, chunked, cached and retracted, at both depths, in fp32; in bf16
logprobs within a bound, and the same tokens but where two are as likely within it.

The real runner on a tiny random model in fp32, through the engine as users have it (`LLM`, actors inline). Greedy and
seeded draws, plain and with every feature of sampling beside each other, with forms and stop strings; prompts that
share prefixes, so that the cache matters; pools so small that sequences are retracted. A smaller matrix on the real
small model.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fakes.tiny_model import make_tiny_llama
from minisgl_backend.answers import Completion, Logprobs, Sample
from minisgl_backend.llm import LLM
from minisgl_backend.models.locate import locate_model
from minisgl_backend.text.parameters import SamplingParams

NEW_TOKENS = 40
PREFIX = [(7 * place) % 250 + 3 for place in range(37)]
PROMPTS = [
    PREFIX[: 5 + 4 * number] + [(number * 31 + place) % 250 + 3 for place in range(number)] for number in range(9)
]
PARAMS = [
    SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.0 if number % 2 else 0.9, seed=number)
    for number in range(len(PROMPTS))
]
LONG: dict[str, Any] = {"max_tokens": NEW_TOKENS, "ignore_eos": True}
INTEGERS = {"type": "array", "items": {"type": "integer"}, "minItems": 200}
FEATURES = [
    SamplingParams(**LONG, temperature=0.9, seed=0, min_p=0.05, top_k=60, top_p=0.95),
    SamplingParams(**LONG, temperature=0.0, presence_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(**LONG, temperature=0.9, seed=2, repetition_penalty=1.3, logprobs=3),
    SamplingParams(**LONG, temperature=0.0, logit_bias={40: 3.0, 41: -3.0}, bad_words=["a", "the"], logprobs=0),
    SamplingParams(**LONG, temperature=1.2, seed=4, prompt_logprobs=2, min_p=0.02),
    SamplingParams(**LONG, temperature=0.0, prompt_logprobs=0, logprobs=2, repetition_penalty=1.2),
    SamplingParams(max_tokens=NEW_TOKENS, temperature=0.9, seed=6, allowed_token_ids=[2, *range(40, 70)], min_tokens=9),
    SamplingParams(**LONG, temperature=0.0, bad_words=["b"], frequency_penalty=1.0),
    SamplingParams(**LONG, temperature=0.9, seed=8, n=2, presence_penalty=1.0, logprobs=1),
]
FORM: dict[str, Any] = {"max_tokens": NEW_TOKENS, "guided_json": INTEGERS}
FORMS = [
    SamplingParams(**FORM, temperature=0.9, seed=0, n=2, logprobs=1),
    SamplingParams(**FORM, temperature=0.0, frequency_penalty=1.0),
    SamplingParams(**FORM, temperature=0.9, seed=2, min_tokens=9, prompt_logprobs=1),
    SamplingParams(**FORM, temperature=1.2, seed=3, n=2, stop=["7", "9"]),
    *FEATURES[4:8],
    SamplingParams(**LONG, temperature=0.9, seed=8, stop=list("aeiou st"), include_stop_str_in_output=True),
]
"""Forms of answers and stop strings, beside rows that have none."""

BASE: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "executor": "inline", "threads": 1, "context_tokens": 128}
SMALL_POOL = {"kv_bytes": 144 * 1024, "page_size": 4, "max_running": 9, "token_budget": 64}

MODES: dict[str, dict[str, Any]] = {
    "batched": {},
    "batched without a cache": {"prefix_cache": False},
    "chunked": {"token_budget": 20, "max_running": 9, "page_size": 4},
    "either-or": {"mixed": False},
    "pages of one token": {"page_size": 1},
    "not recorded": {"decode_graphs": False},
    "by torch's kernels": {"kernels": "torch"},
    "retracted": SMALL_POOL,
    "retracted without a cache": {**SMALL_POOL, "prefix_cache": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=128)


def alone(folder: Path, prompts: list[Any], params: list[SamplingParams]) -> list[Completion]:
    """The answer to each prompt at depth 0, in an engine that has nothing else to do and remembers nothing."""
    with LLM(folder, **{**BASE, "prefix_cache": False, "overlap": False}) as engine:
        return [engine.generate([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Completion]:
    return alone(folder, PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def featured(folder: Path) -> list[Completion]:
    answers = alone(folder, PROMPTS, FEATURES)
    assert all(len(answer.token_ids) == NEW_TOKENS for answer in answers if answer is not answers[6])
    assert len(set(answers[1].token_ids)) > 30, "penalties keep it from repeating itself"
    return answers


@pytest.fixture(scope="module")
def formed(folder: Path) -> list[Completion]:
    answers = alone(folder, PROMPTS, FORMS)
    assert all(len(sample.token_ids) == NEW_TOKENS for answer in answers[:3] for sample in answer.samples)
    assert all(re.match(r"\s*\[\s*(-?\d|$)", answer.text) for answer in answers[:3])
    assert "stop" in {sample.finish_reason for sample in answers[3].samples}, "no form is whole yet: by a string"
    assert answers[8].finish_reason == "stop"
    return answers


def assert_same(answers: list[Completion], expected: list[Completion]) -> None:
    """Text and tokens to the last, logprobs to what another order of additions makes of them."""
    for answer, one in zip(answers, expected, strict=True):
        assert [said(sample) for sample in answer.samples] == [said(sample) for sample in one.samples]
        for sample, other in zip(answer.samples, one.samples, strict=True):
            assert_near(sample.logprobs, other.logprobs)
        assert_near(answer.prompt_logprobs, one.prompt_logprobs)


def said(sample: Sample) -> tuple[str, tuple[int, ...], str]:
    return sample.text, sample.token_ids, sample.finish_reason


def assert_near(told: Logprobs | None, expected: Logprobs | None) -> None:
    if told is None or expected is None:
        assert told is expected
        return
    assert len(told) == len(expected)
    for here, there in zip(told, expected, strict=True):
        if here is None or there is None:
            assert here is there
            continue
        assert list(here) == list(there)
        for id, entry in here.items():
            assert entry.rank == there[id].rank
            assert entry.logprob == pytest.approx(there[id].logprob, abs=1e-4)


both_depths = pytest.mark.parametrize("overlap", [False, True], ids=["depth-0", "overlap"])


@both_depths
@pytest.mark.parametrize("mode", MODES)
def test_answers_are_those_of_each_prompt_alone(
    mode: str, overlap: bool, folder: Path, plain: list[Completion]
) -> None:
    check_mode(mode, overlap, folder, PARAMS, plain)


@both_depths
@pytest.mark.parametrize("mode", MODES)
def test_every_feature_gives_what_it_gives_alone(
    mode: str, overlap: bool, folder: Path, featured: list[Completion]
) -> None:
    check_mode(mode, overlap, folder, FEATURES, featured)


@pytest.mark.slow
@both_depths
@pytest.mark.parametrize("mode", MODES)
def test_every_form_and_stop_string_gives_what_it_gives_alone(
    mode: str, overlap: bool, folder: Path, formed: list[Completion]
) -> None:
    check_mode(mode, overlap, folder, FORMS, formed)


def check_mode(
    mode: str, overlap: bool, folder: Path, params: list[SamplingParams], expected: list[Completion]
) -> None:
    with LLM(folder, **{**BASE, **MODES[mode], "overlap": overlap}) as engine:
        for _ in range(2):  # the second time the cache is warm
            assert_same(engine.generate(PROMPTS, params), expected)
        stats = engine.stats()
    assert (stats.retractions > 0) == mode.startswith("retracted"), f"{stats.retractions} retractions"
    assert (stats.matched_pages > 0) == MODES[mode].get("prefix_cache", True)


BF16_BOUND = 0.1
"""Of a token's logprob between two modes in bf16: sums in other orders, rounded at each layer."""

BF16_PARAMS = SamplingParams(**LONG, temperature=0.0, logprobs=5)


@pytest.fixture(scope="module")
def rounded(folder: Path) -> list[Completion]:
    with LLM(folder, **{**BASE, "dtype": "bf16", "prefix_cache": False, "overlap": False}) as engine:
        return [engine.generate([prompt], BF16_PARAMS)[0] for prompt in PROMPTS]


@both_depths
@pytest.mark.parametrize("mode", MODES)
def test_in_bf16_answers_are_those_of_each_prompt_alone_within_the_bound(
    mode: str, overlap: bool, folder: Path, rounded: list[Completion]
) -> None:
    settings = {**BASE, **MODES[mode], "dtype": "bf16", "overlap": overlap}
    if "kv_bytes" in settings:
        settings["kv_bytes"] //= 2  # as many pages as in fp32
    with LLM(folder, **settings) as engine:
        same = 0
        for _ in range(2):  # the second time the cache is warm
            for answer, one in zip(engine.generate(PROMPTS, BF16_PARAMS), rounded, strict=True):
                same += same_tokens(answer.samples[0], one.samples[0])
        stats = engine.stats()
    assert same > 0.8 * 2 * NEW_TOKENS * len(PROMPTS), f"{same} tokens before the first that differs"
    assert (stats.retractions > 0) == mode.startswith("retracted"), f"{stats.retractions} retractions"


def same_tokens(sample: Sample, expected: Sample) -> int:
    """How many before the first that differs, all of them about as likely in both; and so is the other token there."""
    assert sample.logprobs is not None and expected.logprobs is not None
    for place, (token, other) in enumerate(zip(sample.token_ids, expected.token_ids, strict=True)):
        here, there = sample.logprobs[place], expected.logprobs[place]
        assert here is not None and there is not None and token in there and other in here
        for id in {*here} & {*there}:
            assert here[id].logprob == pytest.approx(there[id].logprob, abs=BF16_BOUND)
        if token != other:
            assert there[token].logprob >= there[other].logprob - 2 * BF16_BOUND
            return place
    return len(expected.token_ids)


REAL_MODES: dict[str, dict[str, Any]] = {
    "batched, then cached": {},
    "chunked": {"token_budget": 24, "max_running": 6, "page_size": 4},
    "retracted": {"kv_bytes": 16 * 184_320, "page_size": 4, "max_running": 4},
}
REAL_PROMPTS = [
    "The capital of France is",
    "The capital of France is Paris. The capital of Italy is",
    "Once upon a time there was a",
    "def fibonacci(n):",
]


@pytest.mark.slow
def test_the_real_small_model_gives_the_same_with_every_feature() -> None:
    folder = locate_model("smollm2")
    short: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
    params = [
        SamplingParams(**short, temperature=0.0, repetition_penalty=1.2, logprobs=2, prompt_logprobs=1),
        SamplingParams(**short, temperature=0.8, seed=1, min_p=0.05, frequency_penalty=0.7, logprobs=0),
        SamplingParams(**short, temperature=0.0, logit_bias={28: -5.0}, bad_words=["little", "girl"]),
        SamplingParams(**short, temperature=1.0, seed=3, top_k=40, top_p=0.9, presence_penalty=0.5),
    ]
    expected = alone(folder, REAL_PROMPTS, params)
    for mode, settings in REAL_MODES.items():
        with LLM(folder, **{**BASE, **settings}) as engine:
            for _ in range(2):
                assert_same(engine.generate(REAL_PROMPTS, params), expected)
            assert (engine.stats().retractions > 0) == mode.startswith("retracted"), mode
