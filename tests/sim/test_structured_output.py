"""Forms of answers through the whole engine: text actor, scheduler, worker, on a tiny model with random weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.grammar_compiler import grammar_compiler
from fakes.grammar_walk import random_answers
from fakes.tiny_model import make_tiny_llama
from fakes.tokenizers import byte_level_folder
from minisgl_backend.actors.grammars import GrammarCompiler, Lane
from minisgl_backend.errors import EngineUnavailable, InvalidRequest, RequestError, UnsupportedFeature
from minisgl_backend.llm import LLM
from minisgl_backend.messages.sampling import Grammar
from minisgl_backend.text.parameters import SamplingParams
from minisgl_backend.text.structured.nursery import Answer
from minisgl_backend.text.structured.spec import read_structured
from minisgl_backend.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 3, "maximum": 99}},
    "required": ["name", "age"],
}
HOSTILE: list[dict[str, Any]] = [
    *({"guided_regex": f"(.{{0,{1500 + i}}}b.{{0,900}}c){{1,3}}"} for i in range(2)),
    *({"guided_regex": pattern} for pattern in ("(a{1,1000}){1,1000}", "((.{0,90}x){0,20}y){0,99}")),
    *({"guided_regex": pattern} for pattern in ("(", "(?=a+)+", "[^")),
    {"guided_regex": "(" * 3000 + ")" * 3000},
    {"guided_grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
    {"guided_grammar": "root ::= root"},
    {"guided_grammar": 'root ::= "a" x\nx ::= x'},
    {"guided_grammar": "nonsense"},
    {"guided_json": {"enum": [f"value {i}" for i in range(20_000)]}},
    {"guided_json": "[" * 60_000},
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
    {"guided_json": {"type": "string", "pattern": "(.{1,900}x){1,200}"}},
    {"guided_json": {"$ref": "http://169.254.169.254/schema"}},
    {"guided_choice": ["x" * 70_000]},
    {"structured_outputs": {"structural_tag": {"format": {"type": "any_tokens"}}}},
]


def large_vocabulary() -> list[bytes]:
    """As large as a small model's: what a pattern costs goes by it. The ids 0 … 2 are special."""
    draw = random.Random(0)
    words = {"".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=draw.randint(2, 8))) for _ in range(40_000)}
    return [b"", b"", b"", *(bytes([byte]) for byte in range(256)), *(word.encode() for word in sorted(words))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlap"])
def llm(model: Path, request: Any) -> Iterator[LLM]:
    with LLM(str(model), device="cpu", executor="inline", overlap=request.param, max_running=8, threads=1) as found:
        yield found


@pytest.mark.slow
def test_samples_greedy_answers_and_free_neighbours_keep_to_their_own_forms(llm: LLM) -> None:
    params = [
        SamplingParams(max_tokens=300, temperature=1.3, seed=5, n=3, guided_json=SCHEMA),
        SamplingParams(max_tokens=40, temperature=0.0, guided_choice=["yes", "no"], logprobs=2),
        SamplingParams(max_tokens=12, seed=1),
        SamplingParams(max_tokens=40, seed=2, guided_regex=r"[a-f]{3}\d"),
        SamplingParams(max_tokens=40, seed=3, guided_grammar='root ::= "<" [0-9]+ ">"', temperature=0.7),
    ]
    together = llm.generate(["hello"] * len(params), params)
    for sample in together[0].samples:
        if sample.finish_reason == "stop":
            value = json.loads(sample.text)
            assert value.keys() == {"name", "age"} and len(value["name"]) <= 6 and 3 <= value["age"] <= 99
    assert together[1].text in ("yes", "no")
    assert re.fullmatch(r"[a-f]{3}\d", together[3].text)
    assert re.match(r"<[0-9]*", together[4].text)
    for one, alone in zip(params, together, strict=True):
        again = llm.generate(["hello"], one)[0]
        assert [sample.token_ids for sample in again.samples] == [sample.token_ids for sample in alone.samples]


@pytest.mark.slow
def test_min_tokens_yields_when_the_form_is_whole_and_nothing_may_follow(llm: LLM) -> None:
    answer = llm.generate(["hello"], SamplingParams(max_tokens=30, min_tokens=20, guided_choice=["yes", "no"]))[0]
    assert answer.text in ("yes", "no") and answer.finish_reason == "stop"


@pytest.mark.slow
def test_a_stop_token_that_has_a_text_ends_its_answer_where_the_form_lets_it_be_drawn(llm: LLM, model: Path) -> None:
    (x,) = Tokenizer.load(model).encode("x", add_special_tokens=False)
    params = [
        SamplingParams(max_tokens=40, seed=seed, guided_regex="[x-z]{4}[0-9]{4}", stop_token_ids=[x], logit_bias=bias)
        for seed, bias in ((4, {x: 100.0}), (5, {x: -100.0}))
    ]
    cut, whole = llm.generate(["hello"] * 2, params)
    assert (cut.finish_reason, cut.text, cut.token_ids) == ("stop", "", (x,))
    assert whole.finish_reason == "stop" and re.fullmatch("[yz]{4}[0-9]{4}", whole.text)
    assert whole.token_ids[-1] != x, "the end is the model's own"


@pytest.mark.slow
def test_a_form_and_ignore_eos_are_refused_together(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        llm.generate(["hello"], SamplingParams(guided_regex="a", ignore_eos=True))


@pytest.mark.slow
def test_a_retracted_sequence_goes_on_in_its_form_with_the_same_tokens(model: Path) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 40}
    params = [SamplingParams(max_tokens=120, seed=i, guided_json=schema, temperature=1.0) for i in range(4)]
    prompts = [f"prompt {i}" for i in range(4)]
    shared = {"device": "cpu", "executor": "inline", "threads": 1, "max_running": 4, "token_budget": 64}
    with LLM(str(model), **shared) as roomy:
        expected = [answer.token_ids for answer in roomy.generate(prompts, params)]
    page_bytes = 2 * 2 * 2 * 16 * 4 * 16
    with LLM(str(model), **shared, kv_bytes=22 * page_bytes) as tight:
        assert [answer.token_ids for answer in tight.generate(prompts, params)] == expected
        assert tight.stats().retractions > 0


@pytest.mark.slow
async def test_hostile_forms_are_refused_in_time_by_name_and_keep_no_honest_one_waiting() -> None:
    async with grammar_compiler(large_vocabulary()) as compiler:
        await _refuses_hostile_ones(compiler)


async def _refuses_hostile_ones(compiler: GrammarCompiler) -> None:
    async def refused(values: dict[str, Any]) -> str:
        try:
            spec = await asyncio.to_thread(read_structured, values)
            assert spec is not None
            await compiler.compile(spec, [2])
        except RequestError as error:
            return str(error)
        return ""

    async def honest() -> float:
        """Seconds; one that is put off, on a machine without time, asks again."""
        began_s = time.monotonic()
        spec = read_structured({"guided_json": SCHEMA})
        assert spec is not None
        while True:
            with contextlib.suppress(EngineUnavailable):
                await compiler.compile(spec, [2])
                return time.monotonic() - began_s
            await asyncio.sleep(0.05)

    async with asyncio.timeout(300.0), asyncio.TaskGroup() as tasks:
        hostile = [tasks.create_task(refused(values)) for values in HOSTILE]
        waiting = tasks.create_task(honest())
        await waiting
        assert not all(task.done() for task in hostile), "it had to wait for all that were there before"
    words = [task.result() for task in hostile]
    taken = [str(values)[:80] for values, word in zip(HOSTILE, words, strict=True) if not word]
    assert not taken
    for values, word in zip(HOSTILE, words, strict=True):
        assert word.startswith(next(iter(values))), word
    assert min([await honest() for _ in range(5)]) < 0.1, "one that is known is not compiled again"


def kill_child_of(pid: int) -> None:
    """As soon as there is one."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while not (found := children.read_text().split()):
        pass
    os.kill(int(found[0]), signal.SIGKILL)


@pytest.mark.slow
async def test_a_child_that_somebody_kills_leaves_its_process_to_the_next_grammar() -> None:
    dear, cheap = (read_structured(values) for values in (HOSTILE[0], {"guided_choice": ["yes"]}))
    assert dear is not None and cheap is not None
    lane = Lane("tested", large_vocabulary(), 60.0)
    try:
        assert (await lane.run(cheap)).compiled  # type: ignore[union-attr]
        assert lane._nursery is not None
        killed = asyncio.create_task(asyncio.to_thread(kill_child_of, lane._nursery.pid))
        assert await lane.run(dear) == Answer(killed=True)
        await killed
        assert (await lane.run(cheap)).compiled  # type: ignore[union-attr]
    finally:
        lane.close()


async def test_a_grammar_that_can_not_be_read_and_one_that_is_sound_share_a_batch(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level_folder(tmp_path))
    spec = read_structured({"guided_choice": ["yes"]})
    assert spec is not None
    async with grammar_compiler(tokenizer.shown_bytes) as compiler:
        sound = await compiler.compile(spec, [2])
    broken = Grammar(b"other", sound.compiled[:-9], sound.end_ids)
    assert random_answers(tokenizer, [broken, sound, broken], 2, 0) == [None, "yes", None]


async def test_without_the_grammar_library_a_form_is_refused_by_name() -> None:
    spec = read_structured({"guided_choice": ["yes"]})
    assert spec is not None
    async with grammar_compiler([b"a"], library="no_such_library_of_grammars") as compiler:
        with pytest.raises(UnsupportedFeature, match=r"^guided_choice: this server has no grammar library"):
            await compiler.compile(spec, [2])
