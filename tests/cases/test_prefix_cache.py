"""Reported faults of other servers about prefix caches, on the scheduler with a page-exact fake model.

KV-01 GeeeekExplorer/nano-vllm#144; KV-02 sgl-project/mini-sglang PR #80; KV-03 sgl-project/mini-sglang PR #46;
KV-06 sgl-project/sglang#24590; KV-07 vllm-project/vllm#42125; KV-08 sgl-project/mini-sglang PR #124;
KV-09 GeeeekExplorer/nano-vllm PR #211; KV-10 sgl-project/sglang#38031; KV-11 rwlove/home-ops PR #13384.

Every answer is compared with the one that the sequence gets alone, and everything is counted after every step: see
fakes/scheduler_bench.py.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from fakes.fake_worker import VOCABULARY
from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.config import resolve_config
from minisgl_backend.errors import ConfigError, UnsupportedFeature
from minisgl_backend.messages.engine import EndReason
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.sampling import GREEDY, Sampling
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.text.parameters import parse_parameters

LOGPROBS = msgspec.structs.replace(GREEDY, logprobs=2)
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def bench(
    *, page_size: int = 16, num_pages: int = 64, depth: int = 0, max_running: int = 8, token_budget: int = 512
) -> SchedulerBench:
    limits = Limits(max_running, token_budget, page_size, num_pages, 4096)
    return SchedulerBench(limits, depth=depth, early_uploads=True)


def prompt(length: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(length)]


def answer(engine: SchedulerBench, tokens: list[int], new: int = 8, sampling: Sampling = GREEDY) -> SequenceId:
    """One request, alone, to its end."""
    id = engine.add(tokens, new, sampling=sampling)
    engine.finish()
    assert engine.life(id).ended is EndReason.LENGTH
    return id


@DEPTHS
@pytest.mark.parametrize("page_size", [16, 1])
@pytest.mark.parametrize("sampling", [GREEDY, LOGPROBS], ids=["plain", "logprobs"])
def test_kv_01_a_prompt_that_is_wholly_cached_still_computes_something(
    sampling: Sampling, page_size: int, depth: int
) -> None:
    engine = bench(page_size=page_size, num_pages=1024 // page_size, depth=depth)
    tokens = prompt(49)
    first, second, third, shorter, longer = (
        answer(engine, tokens[:length], sampling=sampling) for length in (48, 48, 48, 32, 49)
    )
    assert engine.life(second).tokens == engine.life(third).tokens == engine.life(first).tokens
    cached = [engine.life(id).cached_tokens for id in (first, second, third, shorter, longer)]
    assert cached == ([0, 32, 32, 16, 48] if page_size == 16 else [0, 47, 47, 31, 48])


@DEPTHS
def test_kv_02_eviction_counts_pages_not_tokens_and_hands_each_out_once(depth: int) -> None:
    engine = bench(num_pages=64, depth=depth)
    draw = random.Random(2)
    heads = [prompt(150, seed) for seed in (3, 4, 5)]
    for _ in range(200):
        head = draw.choice(heads)[: draw.randrange(0, 150)]
        engine.add(head + prompt(draw.randrange(20, 51), draw.randrange(1000)), draw.randrange(1, 12))
        if (draw.randrange(3) == 0 and engine.plan() is not None) or engine.scheduler.in_flight:
            engine.apply()
    engine.finish()
    assert sum(life.cached_tokens or 0 for life in engine.lives.values()) > 1000
    gauges = engine.scheduler.gauges()
    assert gauges.free_pages + gauges.cached_pages == 64


@DEPTHS
def test_kv_03_a_prefix_in_use_is_not_evicted_and_newcomers_wait(depth: int) -> None:
    engine = bench(num_pages=40, depth=depth)  # 640 tokens: A needs 600
    head = prompt(400)
    answer(engine, head, 1)
    slow = engine.add(head, 200)
    engine.step()
    assert engine.life(slow).cached_tokens == 384
    cold = [engine.add(prompt(300, seed), 4) for seed in (11, 12, 13)]
    while engine.life(slow).ended is None:
        if engine.plan() is None or not depth:
            engine.apply()
    assert all(not engine.life(id).tokens for id in cold), "no room for a cold prompt beside it"
    engine.finish()


@DEPTHS
def test_kv_06_what_is_cached_is_the_same_with_and_without_overlap(depth: int) -> None:
    engine = bench(page_size=1, num_pages=64, depth=depth)
    tokens = prompt(5)
    first = engine.life(answer(engine, tokens, 3))
    longer = engine.life(answer(engine, [*tokens, *first.tokens, 7], 3))
    assert longer.cached_tokens == 5 + 3 - 1, "the last token's K/V was never computed"


@pytest.mark.parametrize("depth", [0, 1])
def test_kv_06_nor_does_an_end_token_make_a_difference(depth: int) -> None:
    engine = bench(page_size=1, num_pages=64, depth=depth)
    tokens = prompt(5)
    free = engine.life(answer(engine, tokens, 3)).tokens
    fresh = bench(page_size=1, num_pages=64, depth=depth)
    stopped = fresh.add(tokens, 30, stop_token_ids=(free[2],))
    fresh.finish()
    told = fresh.life(stopped).tokens
    longer = fresh.life(answer(fresh, [*tokens, *told, 7], 3))
    assert longer.cached_tokens == 5 + len(told) - 1


def test_kv_07_adapters_are_refused_and_what_keeps_caches_apart_is_the_salt() -> None:
    with pytest.raises(UnsupportedFeature, match="lora_name"):
        parse_parameters(b'{"lora_name": "x"}')
    engine = bench()
    tokens = prompt(100)
    one, other = (engine.add(tokens, 4, cache_salt=salt) for salt in (b"x", b"y"))
    engine.finish()
    again = [engine.add(tokens, 4, cache_salt=salt) for salt in (b"x", b"y", b"", b"z")]
    engine.finish()
    assert [engine.life(id).cached_tokens for id in (one, other)] == [0, 0], "no sharing, not even within a batch"
    assert [engine.life(id).cached_tokens for id in again] == [96, 96, 0, 0]


def test_kv_08_a_prefix_in_use_again_and_again_is_evicted_after_what_is_cold() -> None:
    engine = bench(num_pages=24)
    shared, cold = prompt(64), prompt(16 * 9, 9)
    answer(engine, [*shared, *prompt(64, 2)], 1)
    answer(engine, cold, 1)
    for seed in (3, 4, 5):
        answer(engine, [*shared, *prompt(16, seed)], 1)
    answer(engine, prompt(16 * 8, 10), 1)  # 8 pages more than are free: something must go
    assert engine.life(answer(engine, [*shared, 1], 1)).cached_tokens == 64
    assert engine.life(answer(engine, [*cold, 1], 1)).cached_tokens < 16 * 9


@DEPTHS
def test_kv_09_a_retracted_sequence_that_finds_its_own_prefix_goes_on_where_it_was(depth: int) -> None:
    engine = bench(page_size=4, num_pages=130, depth=depth, max_running=16, token_budget=256)
    head = prompt(100)
    for number in range(64):
        engine.add([*head, *prompt(5, number)], 40 if number % 8 else 200)
    engine.finish()
    assert all(life.ended is EndReason.LENGTH for life in engine.lives.values())
    assert engine.retractions > 0, "the pool was not small enough to show anything"


@pytest.mark.parametrize("name", ["host_kv_bytes", "hicache", "disk_kv_path"])
def test_kv_10_a_host_tier_is_refused_by_name_until_it_is_built(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'"):
        resolve_config({name: 1})


@pytest.mark.parametrize("name", ["kv_dtype", "kv_cache_dtype"])
def test_kv_11_fp8_kv_is_refused_and_never_silently_without_a_cache(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'"):
        resolve_config({name: "fp8"})
    with pytest.raises(ConfigError, match="dtype"):
        resolve_config({"dtype": "fp8"})
