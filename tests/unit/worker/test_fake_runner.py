"""The fake device: exact about pages, and strict with the plans it is given."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from array import array
from pathlib import Path

import msgspec
import pytest

from fakes.plans import Planner, generate
from minisgl_backend.config import EngineConfig, resolve_config
from minisgl_backend.messages.ids import SlotId, StepId
from minisgl_backend.messages.plan import Admission, BatchPlan, Logprobs, PageGrant
from minisgl_backend.messages.sampling import GREEDY, Sampling
from minisgl_backend.messages.tokens import pack_tokens, unpack_tokens
from minisgl_backend.worker.build import build_runner
from minisgl_backend.worker.fake import FakeRunner, fake_continuation

PROMPTS = [[5, 6, 7], list(range(40, 90)), [9], list(range(100, 117))]
CONFIG = resolve_config({"device": "fake", "page_size": 4, "max_running": 4, "token_budget": 64})


def plan(
    step: int,
    rows: tuple[tuple[int, int, int, int], ...],
    admissions: tuple[Admission, ...] = (),
    grants: tuple[PageGrant, ...] = (),
) -> BatchPlan:
    """rows: (slot, start, length, sample)."""
    columns = zip(*rows, strict=True) if rows else ((), (), (), ())
    return BatchPlan(StepId(step), admissions, grants, *columns)


def admission(slot: int, prompt: list[int]) -> Admission:
    return Admission(SlotId(slot), pack_tokens(prompt), GREEDY)


def grant(slot: int, *pages: int) -> PageGrant:
    return PageGrant(SlotId(slot), pages)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 16])
def test_tokens_are_those_of_each_sequence_alone(page_size: int, chunk_tokens: int) -> None:
    runner = FakeRunner(msgspec.structs.replace(CONFIG, page_size=page_size))
    answers = generate(runner.run, Planner(page_size, runner.num_pages), PROMPTS, 20, chunk_tokens=chunk_tokens)
    assert answers == [fake_continuation(prompt, 20) for prompt in PROMPTS]
    assert len({token for answer in answers for token in answer}) > 60, "tokens should differ"


def test_it_tells_plausible_logprobs_of_prompts_and_tokens_to_those_who_ask() -> None:
    runner = FakeRunner(CONFIG, vocabulary=range(10, 15))
    asks = Sampling(0.0, 0, 1.0, 0, 0, logprobs=2, prompt_logprobs=0)
    begin = Admission(SlotId(0), pack_tokens([11, 12, 13, 14]), asks, num_outputs=1)
    first = runner.run(plan(1, ((0, 0, 2, 0),), (begin,), (grant(0, 0),)))
    (told,) = first.prompt_logprobs
    assert told == Logprobs(1, pack_tokens([12, 13]), told.values, pack_tokens([1, 1]))
    second = runner.run(plan(2, ((0, 2, 2, 1),)))
    assert second.prompt_logprobs == (), "what was sampled before is no prompt"
    (told,) = second.logprobs
    (token,) = second.tokens
    assert told.position == 4 and list(unpack_tokens(told.ids)) == [token, token, (token - 9) % 5 + 10]
    values = [math.exp(value) for value in array("f", told.values)]
    assert values == pytest.approx([0.5, 0.5, 0.25])


def test_tokens_lie_in_the_vocabulary_and_are_never_reserved() -> None:
    runner = FakeRunner(CONFIG, vocabulary=range(10, 15), reserved=(11, 12))
    (answer,) = generate(runner.run, Planner(4, runner.num_pages), [[1, 2]], 60)
    assert set(answer) == {10, 13, 14}
    assert answer == fake_continuation([1, 2], 60, range(10, 15), (11, 12))


def test_steps_must_come_in_order_without_a_gap() -> None:
    runner = FakeRunner(CONFIG)
    runner.run(plan(1, ()))
    for step in (1, 3):
        with pytest.raises(AssertionError, match=f"step {step} after step 1"):
            runner.run(plan(step, ()))


BEGIN = plan(1, ((0, 0, 4, 0),), admissions=(admission(0, [1, 2, 3, 4, 5, 6]),), grants=(grant(0, 7),))


@pytest.mark.parametrize(
    ("second", "fault"),
    [
        (plan(2, ((0, 4, 2, 1),)), "row ends beyond its pages"),
        (plan(2, ((0, 5, 1, 1),), grants=(grant(0, 8),)), "row starts at 5, written are 4"),
        (plan(2, ((0, 3, 2, 0),), grants=(grant(0, 8),)), "row starts at 3, written are 4"),
        (plan(2, ((0, 4, 3, 1),), grants=(grant(0, 8),)), "computes a token that is not known"),
        (plan(2, ((0, 4, 1, 1),), grants=(grant(0, 8),)), "samples too early"),
        (plan(2, ((0, 4, 0, 0),), grants=(grant(0, 8),)), "a row without tokens"),
        (plan(2, ((0, 4, 1, 0), (0, 5, 1, 1)), grants=(grant(0, 8),)), "a slot in two rows"),
        (plan(2, ((0, 4, 2, 1),), grants=(grant(0, 7),)), "twice in its table"),
        (plan(2, ((0, 4, 2, 1),), grants=(grant(0, 4096),)), "no such page"),
        (plan(2, (), admissions=(admission(4, [1]),)), "slot 4 of 4"),
        (  # slot 1 is given the page that slot 0 still lives on
            plan(
                2, ((0, 4, 2, 1), (1, 0, 2, 1)), admissions=(admission(1, [8, 9]),), grants=(grant(0, 8), grant(1, 7))
            ),
            r"page 7 \(place 0 of its table\) is written by somebody else",
        ),
        (  # slot 1 starts behind a prefix that nobody computed
            plan(2, ((1, 4, 1, 1),), admissions=(admission(1, [1, 2, 3, 4, 5]),), grants=(grant(1, 9, 10),)),
            r"page 9 \(place 0 of its table\) is never written",
        ),
        (  # … or that belongs to other tokens
            plan(2, ((1, 4, 1, 1),), admissions=(admission(1, [1, 2, 3, 0, 5]),), grants=(grant(1, 7, 10),)),
            "written by somebody else",
        ),
    ],
)
def test_a_plan_that_breaks_a_promise_is_an_assertion(second: BatchPlan, fault: str) -> None:
    runner = FakeRunner(CONFIG)
    runner.run(BEGIN)
    with pytest.raises(AssertionError, match=fault):
        runner.run(second)


def test_a_sequence_may_start_behind_pages_that_hold_its_prefix() -> None:
    """What a prefix cache will plan."""
    runner = FakeRunner(CONFIG)
    runner.run(BEGIN)
    sharing = plan(2, ((1, 4, 1, 1),), admissions=(admission(1, [1, 2, 3, 4, 9]),), grants=(grant(1, 7, 10),))
    assert list(runner.run(sharing).tokens) == fake_continuation([1, 2, 3, 4, 9], 1)


def test_more_tokens_than_the_budget_are_an_assertion() -> None:
    runner = FakeRunner(msgspec.structs.replace(CONFIG, token_budget=8))
    big = plan(1, ((0, 0, 9, 1),), admissions=(admission(0, [1] * 9),), grants=(grant(0, 0, 1, 2),))
    with pytest.raises(AssertionError, match="more tokens than the budget"):
        runner.run(big)


def fake_folder(folder: Path, **fields: object) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "eos_token_id": [25, 26],
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_built_fake_stays_in_the_models_vocabulary_and_never_ends_by_itself(tmp_path: Path) -> None:
    runner = build_runner(CONFIG, fake_folder(tmp_path))
    runner.warm_up()
    assert runner.num_pages == 4096
    (answer,) = generate(runner.run, Planner(4, 4096), [[1]], 800)
    assert set(answer) <= set(range(20, 300)) - {25, 26} and len(set(answer)) > 200


def test_kv_bytes_give_the_fake_the_pages_of_the_real_pool(tmp_path: Path) -> None:
    page_bytes = 2 * 2 * 4 * 2 * 8 * 4  # k and v, layers, tokens, heads, head_dim, fp32
    config: EngineConfig = msgspec.structs.replace(CONFIG, kv_bytes=10 * page_bytes + 5)
    assert build_runner(config, fake_folder(tmp_path)).num_pages == 10


def test_the_fake_device_loads_no_torch(tmp_path: Path) -> None:
    fake_folder(tmp_path)
    code = (
        "import sys, pathlib\n"
        "from minisgl_backend.config import resolve_config\n"
        "from minisgl_backend.worker.build import build_runner\n"
        f"build_runner(resolve_config({{'device': 'fake'}}), pathlib.Path({str(tmp_path)!r}))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rows_may_begin_behind_and_jump_over_pages_that_others_have_filled() -> None:
    """Slot 1 begins behind a page of slot 0 in the same step, and jumps over another one in the next."""
    runner = FakeRunner(CONFIG)
    prompt = list(range(30, 44))
    both = (admission(0, prompt), admission(1, prompt))
    grants = (grant(0, 0, 1, 2, 3), grant(1, 0, 5))
    first = runner.run(plan(1, ((1, 4, 4, 0), (0, 0, 14, 1)), both, grants))
    second = runner.run(plan(2, ((1, 12, 2, 1),), grants=(grant(1, 2, 6),)))
    assert first.tokens == second.tokens == tuple(fake_continuation(prompt, 1))
