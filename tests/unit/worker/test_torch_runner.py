"""The torch runner by its contract: order of steps, warm-up, promises of a plan, size of the pool.

That its tokens are right is the business of tests/numeric/.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from fakes.forward import load, logits_of
from fakes.plans import Planner, generate
from fakes.random_model import write_random_llama
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.config import resolve_config
from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.distributed.seat import ALONE
from minisgl_backend.errors import ConfigError, ModelUnsupported
from minisgl_backend.kvpool.paged import KvShape
from minisgl_backend.messages.ids import SlotId, StepId
from minisgl_backend.messages.plan import Admission, BatchPlan, PageGrant, StepResult
from minisgl_backend.messages.sampling import GREEDY, Sampling
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.worker import torch_runner
from minisgl_backend.worker.build import build_runner
from minisgl_backend.worker.runner import StepRunner
from minisgl_backend.worker.scratch_plans import largest_plan

PROMPTS = [[5, 6, 7], list(range(40, 90)), [9], list(range(100, 117))]
PAGE_BYTES = 2 * 2 * 16 * 2 * 8 * 4  # k and v, layers, tokens, kv heads, head_dim, fp32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("random"))


def build(folder: Path, **settings: Any) -> StepRunner:
    return build_runner(resolve_config({"device": "cpu", "max_running": 4, "threads": 1, **settings}), folder)


def empty(step: int) -> BatchPlan:
    return BatchPlan(StepId(step), (), (), (), (), (), ())


def first_step(*, pages: int = 1, start: int = 0, length: int = 3, slots: tuple[int, ...] = (0,)) -> BatchPlan:
    rows = len(slots)
    return BatchPlan(
        StepId(1),
        (Admission(SlotId(0), pack_tokens([1, 2, 3]), GREEDY),),
        (PageGrant(SlotId(0), tuple(range(pages))),),
        slots,
        (start,) * rows,
        (length,) * rows,
        (1,) * rows,
    )


def test_steps_must_come_in_order_without_a_gap(folder: Path) -> None:
    runner = build(folder)
    with pytest.raises(AssertionError, match="step 2 after step 0"):
        runner.run(empty(2))
    assert runner.run(empty(1)).tokens == ()
    for step in (1, 3):
        with pytest.raises(AssertionError, match=f"step {step} after step 1"):
            runner.run(empty(step))
    assert runner.run(empty(2)).step == 2


@pytest.mark.parametrize(
    ("settings", "context"),
    [
        ({}, 128),
        ({"max_running": 1}, 128),
        ({}, 2),
        ({}, 3),
        ({"max_running": 1, "token_budget": 2, "page_size": 1}, 5),
    ],
)
def test_warm_up_leaves_no_trace_whatever_the_limits(settings: dict[str, Any], context: int, folder: Path) -> None:
    warm, cold = (build(folder, context_tokens=context, **settings) for _ in range(2))
    warm.warm_up()
    planners = [Planner(settings.get("page_size", 16), runner.num_pages) for runner in (warm, cold)]
    answers = [generate(r.run, p, [[3]], context - 1) for r, p in zip((warm, cold), planners, strict=True)]
    assert answers[0] == answers[1] and len(answers[0][0]) == context - 1


def test_after_warm_up_no_slot_is_alive(folder: Path) -> None:
    runner = build(folder)
    runner.warm_up()
    with pytest.raises(AssertionError, match="computes a token that is not known"):
        runner.run(BatchPlan(StepId(1), (), (), (0,), (0,), (1,), (1,)))


def test_warm_up_runs_every_kind_of_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[bool, bool, bool]] = set()
    original = TorchAttention.begin

    def watch(self: TorchAttention, rows: Any) -> Any:
        step = original(self, rows)
        (view,) = step.views.values()
        fresh = any(chunk.table is None for chunk in view.chunks)
        prefixed = any(chunk.table is not None for chunk in view.chunks)
        seen.add((fresh, prefixed, bool(view.groups)))
        return step

    monkeypatch.setattr(TorchAttention, "begin", watch)
    build(folder, attention="torch").warm_up()
    alone = {(True, False, False), (False, True, False), (False, False, True)}
    assert seen == alone | {(True, True, False), (False, True, True)}


def test_warm_up_comes_before_the_first_plan(folder: Path) -> None:
    runner = build(folder)
    runner.run(empty(1))
    with pytest.raises(AssertionError, match="warm-up after the first plan"):
        runner.warm_up()


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        (first_step(pages=0), "ends beyond its slot's pages"),
        (first_step(length=4), "computes a token that is not known"),
        (first_step(length=0), "a row without tokens"),
        (first_step(slots=(0, 0)), "a slot in two rows"),
    ],
)
def test_a_plan_that_breaks_a_promise_is_an_assertion(plan: BatchPlan, fault: str, folder: Path) -> None:
    with pytest.raises(AssertionError, match=fault):
        build(folder).run(plan)


def test_a_step_that_samples_nothing_answers_with_nothing(folder: Path) -> None:
    plan = msgspec.structs.replace(first_step(length=2), row_samples=(0,))
    assert build(folder).run(plan).tokens == ()


def test_a_sequence_may_fill_its_context_to_the_last_token(folder: Path) -> None:
    runner = build(folder, context_tokens=20)
    (answer,) = generate(runner.run, Planner(16, runner.num_pages), [[4] * 15], 6)  # the last is token 21: not stored
    longer = build(folder, context_tokens=64)
    assert generate(longer.run, Planner(16, longer.num_pages), [[4] * 15], 6) == [answer]


@pytest.mark.parametrize(("max_running", "budget", "context"), [(4, 64, 128), (1, 300, 128), (8, 9, 2), (3, 4096, 100)])
def test_the_largest_plan_fills_budget_and_context_as_far_as_slots_go(
    max_running: int, budget: int, context: int
) -> None:
    plan = largest_plan(max_running, context, budget, page_size=1, scratch_page=0, vocab=9)
    assert plan.row_slots == tuple(range(max_running))
    ends = [start + length for start, length in zip(plan.row_starts, plan.row_lengths, strict=True)]
    assert ends == [context - 1] * max_running
    assert sum(plan.row_lengths) == min(budget, max_running - 1 + context - 1)


def test_the_largest_step_runs_on_the_scratch_page_alone(folder: Path) -> None:
    runner = build(folder, kv_bytes=PAGE_BYTES, max_running=8, token_budget=100)
    runner.run_largest()  # type: ignore[attr-defined]


def test_the_pool_holds_every_slot_at_its_context_when_memory_allows(folder: Path) -> None:
    assert build(folder, context_tokens=100).num_pages == 4 * 7


def test_kv_bytes_are_taken_as_given(folder: Path) -> None:
    assert build(folder, kv_bytes=3 * PAGE_BYTES + 7).num_pages == 3


def test_kv_bytes_below_one_page_or_beyond_the_memory_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=rf"at least one page of {PAGE_BYTES:,} bytes, but setting 'kv_bytes' = 100 "):
        build(folder, kv_bytes=100)
    monkeypatch.setattr(CpuDevice, "free_memory_bytes", lambda self: 10 * PAGE_BYTES)
    with pytest.raises(ConfigError, match=r"'kv_bytes' is .*, but cpu .* has .* bytes free"):
        build(folder, kv_bytes=11 * PAGE_BYTES)


class _NoRunner:
    def expected_recordings_bytes(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("free_pages", "each"), [(10_000, 28), (4 * 28 * 3, 28), (4 * 28 * 2, 18), (4 * 28, 9), (13, 1)]
)
def test_ranks_share_what_the_memory_of_their_machine_can_spare(
    monkeypatch: pytest.MonkeyPatch, free_pages: int, each: int
) -> None:
    """A quarter of it is the pools'. 28 pages are all that a rank can use."""
    shape = KvShape(2, 2, 16, torch.float32)
    page_bytes = shape.bytes_per_page(16)
    monkeypatch.setattr(CpuDevice, "free_memory_bytes", lambda self: free_pages * page_bytes)
    config = resolve_config({"device": "cpu", "max_running": 4})
    pages, _ = torch_runner._choose_pages(config, shape, CpuDevice(1), 100, 3, _NoRunner)  # type: ignore[arg-type]
    assert pages == each
    taken = resolve_config({"device": "cpu", "kv_bytes": free_pages // 2 * page_bytes})
    with pytest.raises(ConfigError, match=r"'kv_bytes' is .* on each of 3 ranks, but cpu .* has .* bytes free"):
        torch_runner._choose_pages(taken, shape, CpuDevice(1), 100, 3, _NoRunner)  # type: ignore[arg-type]


class _Metered(CpuDevice):
    """A device of which a process may take 100,000 bytes, and that knows what a piece of work takes."""

    def __init__(self) -> None:
        super().__init__(1)
        self.tried: list[str] = []
        self.reserved: list[int] = []

    def peak_memory_bytes(self, work: Callable[[], None]) -> int:
        work()
        self.tried.append("largest step")
        return 30_000

    def reserve_memory(self, size_bytes: int) -> None:
        self.reserved.append(size_bytes)

    def kv_pool_bytes(self, *, utilization: float, peak_bytes: int, useful_bytes: int) -> int:
        return 100_000 - peak_bytes


@pytest.mark.parametrize("recordings", [False, True])
def test_the_pool_is_what_activations_and_recordings_leave_and_the_warm_up_takes_what_it_leaves(
    recordings: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = _Metered()
    monkeypatch.setattr(torch_runner, "open_device", lambda setting, threads: device)
    held = 20_000 if recordings else 0
    monkeypatch.setattr(torch_runner.TorchRunner, "expected_recordings_bytes", lambda self: held)
    runner = build(folder)
    assert device.tried == ["largest step"]
    assert runner.num_pages == (70_000 - held) // PAGE_BYTES
    runner.warm_up()
    assert device.reserved == [30_000]


def test_no_room_for_one_page_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "free_memory_bytes", lambda self: 3 * PAGE_BYTES)  # a quarter of it is the pool's
    with pytest.raises(ConfigError, match=r"the free memory of cpu .* leaves"):
        build(folder)


def test_the_build_says_what_it_does(folder: Path) -> None:
    lines: list[str] = []
    build_runner(resolve_config({"device": "cpu", "dtype": "bf16", "threads": 1}), folder, ALONE, lines.append)
    assert lines[0].startswith("loading weights on cpu (") and " in bfloat16" in lines[0]
    assert lines[1].startswith("weights: ") and "at the peak of loading" in lines[1]
    assert "KV pages of 16 tokens" in lines[2]


def test_the_build_says_what_is_kept_of_layers_that_no_longer_see_it(tmp_path: Path) -> None:
    """Only where a sequence can be longer than the window."""
    windows = {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1}
    folder = write_random_llama(tmp_path, architectures=["Qwen2ForCausalLM"], num_hidden_layers=3, **windows)
    kept = "what they no longer see is kept all the same: 256 of 384 bytes a token"
    for context, expected in [(128, [f"2 of 3 layers see the last 48 tokens; {kept}"]), (48, [])]:
        lines: list[str] = []
        settings = {"device": "cpu", "dtype": "fp32", "threads": 1, "context_tokens": context}
        build_runner(resolve_config(settings), folder, ALONE, lines.append)
        assert [line for line in lines if "layers" in line] == expected


def test_threads_are_set_from_the_settings(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        build(folder, threads=3)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_wrong_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="no config"):
        build(tmp_path)


def test_no_result_carries_a_gradient_or_keeps_a_graph(folder: Path) -> None:
    runner = build(folder)
    with torch.enable_grad():
        generate(runner.run, Planner(16, runner.num_pages), PROMPTS, 3)
    assert not runner._slots._tokens.requires_grad and runner._slots._tokens.is_inference()  # type: ignore[attr-defined]


def test_a_slot_takes_the_sampling_of_its_present_life(folder: Path) -> None:
    runner = build(folder)
    planner = Planner(16, runner.num_pages)
    hot = Sampling(temperature=50.0, top_k=0, top_p=1.0, seed=3, sample_index=0)
    greedy = generate(runner.run, planner, [[7, 8]], 6)
    sampled = generate(runner.run, planner, [[7, 8]], 6, samplings=[hot])
    assert sampled != greedy
    assert generate(runner.run, planner, [[7, 8]], 6) == greedy


def test_a_step_out_of_memory_is_answered_so_and_the_runner_goes_on_with_who_is_admitted_anew(folder: Path) -> None:
    """The plan that was made before anybody knew is void; then the same prompt gives the same tokens as ever."""
    expected = generate(build(folder, kv_bytes=PAGE_BYTES * 64).run, Planner(16, 64), PROMPTS[:2], 4)
    runner = build(folder, kv_bytes=PAGE_BYTES * 64)
    planner = Planner(16, 64)
    for slot in range(2):
        planner.admit(slot, PROMPTS[slot])
    model = runner._model  # type: ignore[attr-defined]
    runner._model = ShortOfMemory()  # type: ignore[attr-defined]
    result = runner.run(planner.plan([(0, 99), (1, 99)]))
    assert (result.step, result.tokens, result.failed) == (1, (), "out of memory: 2 GiB wanted")
    runner._model = model  # type: ignore[attr-defined]
    late = BatchPlan(StepId(2), (), (), (0, 1), (3, 50), (1, 1), (1, 1))
    assert runner.run(late) == StepResult(StepId(2), (), "a step before it failed")
    again = Planner(16, 64)
    again._step = 2
    assert generate(runner.run, again, PROMPTS[:2], 4) == expected


def test_prompt_logprobs_of_a_runner_are_those_of_its_logits_in_any_chunks_and_not_of_its_outputs(folder: Path) -> None:
    """Against the model's own logits; a sequence that was retracted comes with three outputs behind its prompt."""
    prompt = list(range(40, 70))
    exact = logits_of(load(folder), prompt, [len(prompt)], 16, torch.float32).double().log_softmax(-1)
    asks = Sampling(0.0, 0, 1.0, 0, 0, prompt_logprobs=3)
    for chunk in (1, 7, 30):
        runner = build(folder)
        planner = Planner(16, runner.num_pages)
        planner.admit(0, prompt, asks)
        planner._admissions = [msgspec.structs.replace(planner._admissions[0], num_outputs=3)]
        told = []
        while not told or planner._computed[0] < len(prompt):
            told += runner.run(planner.plan([(0, chunk)])).prompt_logprobs
        ids = np.concatenate([np.frombuffer(one.ids, "<i4").reshape(-1, 4) for one in told])
        values = np.concatenate([np.frombuffer(one.values, "<f4").reshape(-1, 4) for one in told])
        assert ids[:, 0].tolist() == prompt[1:-3] and told[0].position == 1
        expected = exact[: len(ids)]
        np.testing.assert_allclose(values, expected.gather(-1, torch.from_numpy(ids).long()), atol=1e-4)
        assert ids[:, 1].tolist() == expected.argmax(-1).tolist()


class ShortOfMemory:
    """A model that does not fit."""

    def forward(self, *inputs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("2 GiB wanted\nand more lines")


def test_a_row_may_read_pages_that_another_row_of_the_same_step_fills(folder: Path) -> None:
    """Each layer writes the K/V of all rows before any row attends. The reader comes first in the plan, even."""
    prompt = list(range(100, 140))
    (expected,) = generate(build(folder, kv_bytes=PAGE_BYTES * 8).run, Planner(16, 8), [prompt], 1)
    admissions = tuple(Admission(SlotId(slot), pack_tokens(prompt), GREEDY) for slot in range(3))
    pages = ((0, 1, 2), (0, 1, 3), (0, 4, 5))  # two full pages shared, one, and the tails private
    grants = tuple(PageGrant(SlotId(slot), pages[slot]) for slot in range(3))
    plan = BatchPlan(StepId(1), admissions, grants, (2, 1, 0), (16, 32, 0), (24, 8, 40), (1, 1, 1))
    assert build(folder, kv_bytes=PAGE_BYTES * 8).run(plan).tokens == (expected[0],) * 3


def test_a_row_may_jump_over_pages_that_others_have_filled_since_its_last_one(folder: Path) -> None:
    prompt = list(range(100, 150))
    (expected,) = generate(build(folder, kv_bytes=PAGE_BYTES * 8).run, Planner(16, 8), [prompt], 1)
    runner = build(folder, kv_bytes=PAGE_BYTES * 8)
    admissions = tuple(Admission(SlotId(slot), pack_tokens(prompt), GREEDY) for slot in range(2))
    first = (PageGrant(SlotId(0), (0, 1, 2, 3)), PageGrant(SlotId(1), (4,)))
    runner.run(BatchPlan(StepId(1), admissions, first, (0, 1), (0, 0), (50, 16), (1, 0)))
    then = (PageGrant(SlotId(1), (1, 2, 5)),)
    assert runner.run(BatchPlan(StepId(2), (), then, (1,), (48,), (2,), (1,))).tokens == (expected[0],)
