"""The benchmarks of the real model, on a tiny one: they run, and what they compare is the same on both sides."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fakes.tiny_model import make_tiny_llama
from load.bench import mixed, overlap, retraction
from load.step_trace import read_trace
from load.workloads import independent
from minisgl_backend.llm import LLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[dict[str, LLM]]:
    modes = {
        "mixed": {"mixed": True},
        "either-or": {"mixed": False},
        "target": {"mixed": True, "target_itl_ms": 20.0},
        "depth 0": {"overlap": False},
    }
    sizes = {"device": "cpu", "executor": "inline", "max_running": 4, "token_budget": 32, "kv_bytes": 8 << 20}
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(LLM(folder, **sizes, **settings))  # type: ignore[arg-type]
            for name, settings in modes.items()
        }


def test_greedy_tokens_are_the_same_mixed_either_or_under_a_target_and_at_depth_0(engines: dict[str, LLM]) -> None:
    mixed.check_same_answers(list(engines.values()), ["the cat", "a thing of the"], "in the world " * 30)


def test_a_round_measures_every_stream_while_the_prompts_arrive(engines: dict[str, LLM]) -> None:
    for number, (name, engine) in enumerate(engines.items()):
        waits = mixed.Waits()
        prompts = [f"{number} {prompt} " + "in the world " * 60 for prompt in range(2)]
        mixed.measure_round(engine, ["the cat", "a thing"], prompts, waits, stream_tokens=1900)
        assert len(waits.ttft_s) == 2 and len(waits.itl_s) >= 2
        assert mixed.describe(name, waits)["tokens"] == len(waits.itl_s)
        assert engine.stats().running <= 2, "the streams were left"


def test_what_a_worker_waits_for_is_counted_at_both_depths_where_all_streams_run(folder: Path, tmp_path: Path) -> None:
    prompts = ["the cat", "a thing", "of the", "in the world"]
    files = {depth: tmp_path / f"{number}.json" for number, depth in enumerate(overlap.DEPTHS)}
    with ExitStack() as stack:
        engines = {
            depth: stack.enter_context(
                LLM(
                    folder,
                    device="fake",
                    executor="inline",
                    fake_step_ms=20.0,
                    overlap=ahead,
                    step_trace=str(files[depth]),
                )
            )
            for depth, ahead in overlap.DEPTHS.items()
        }
        overlap.check_same_tokens(engines, prompts)
        windows = {depth: overlap.measure_round(engine, depth, prompts, 40) for depth, engine in engines.items()}
    rows = {depth: overlap.describe(read_trace(files[depth]), [window]) for depth, window in windows.items()}
    for row in rows.values():
        assert (row["streams"], row["rows"]) == (4, 4.0) and 20 <= row["steps"] < 40
        assert row["step_ms"] >= 20.0 and 0.0 < row["idle_share"] < 1.0
    assert rows["depth 0"]["early_share"] == 0.0
    assert rows["overlap"]["early_share"] >= 0.5


def test_depths_that_disagree_end_the_benchmark(folder: Path) -> None:
    with ExitStack() as stack:
        fake, real = (
            stack.enter_context(LLM(folder, device=device, executor="inline", kv_bytes=8 << 20))
            for device in ("fake", "cpu")
        )
        with pytest.raises(AssertionError, match="the depths disagree"):
            overlap.check_same_tokens({"depth 0": fake, "overlap": real}, ["the cat"])


def test_learned_room_and_the_worst_case_give_the_same_answers_and_learned_runs_more(folder: Path) -> None:
    requests = independent.generate(40, retraction.PROMPT_TOKENS, retraction.MAX_NEW_TOKENS, (1, 512), 0)
    arguments = Namespace(model=str(folder), device="fake")
    full, learned = (
        retraction.run(retraction._config(arguments, reserve, folder), folder, requests)
        for reserve in ("full", "learned")
    )
    assert full.tokens == learned.tokens
    assert all(len(full.tokens[request.number]) == len(request.answer) for request in requests)
    assert full.retractions == 0
    assert sum(learned.running) / len(learned.running) >= 1.4 * sum(full.running) / len(full.running)
