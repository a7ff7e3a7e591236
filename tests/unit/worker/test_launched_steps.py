"""Steps that are launched before the one before them is done, on a device that does nothing until it is waited for.

What the host knows changes when a step is launched, what is on the device when the device comes to it: tokens must be
those of a runner that does one thing after another. The device is the one of fakes/delayed_streams.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from fakes.delayed_streams import DelayedStreams
from fakes.emulated_graph import EmulatedRecorder
from fakes.forward import load
from fakes.planned_attention import PlannedAttention
from fakes.plans import Planner, generate
from fakes.random_model import write_random_llama
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.device.streams import HostStreams, Streams
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool
from minisgl_backend.messages.plan import Admission, BatchPlan, StepResult
from minisgl_backend.messages.sampling import GREEDY, Sampling, TokenRules
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.models.model import Model
from minisgl_backend.sampling.grammar import GrammarSlots
from minisgl_backend.sampling.masks import Rows, TokenMasks
from minisgl_backend.worker.decode_graphs import DecodeGraphs
from minisgl_backend.worker.pending import PendingStep
from minisgl_backend.worker.runner import Pending
from minisgl_backend.worker.torch_runner import TorchRunner, attention_variants

VOCAB, CONTEXT, PAGE, PAGES, SLOTS = 320, 64, 4, 80, 4
PROMPTS = [[5, 6, 7], list(range(40, 63)), [9], list(range(100, 117))]
RULES = TokenRules(
    presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.2, bias_ids=pack_tokens([3]), biases=(4.0,)
)
SAMPLINGS = (
    GREEDY,
    Sampling(1.0, 0, 1.0, 7, 0, logprobs=2, prompt_logprobs=1),
    Sampling(0.0, 0, 1.0, 7, 0, rules=RULES),
    Sampling(0.8, 9, 0.9, 3, 0, 0.01),
)
UNKNOWN = -7


class DelayedDevice(CpuDevice):
    """A CPU with the queues of a GPU."""

    def __init__(self, streams: Streams) -> None:
        super().__init__(1)
        self.streams = streams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_random_llama(tmp_path_factory.mktemp("random"), vocab_size=VOCAB))


Build = Callable[..., TorchRunner]


@pytest.fixture
def build(model: Model) -> Iterator[Build]:
    runners: list[TorchRunner] = []

    def made(streams: Streams, *, graphs: bool = False, grammars: GrammarSlots | None = None) -> TorchRunner:
        spec, device = model.spec, DelayedDevice(streams)
        shape = KvShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, torch.float32)
        pool = PagedKvPool(shape, PAGES, PAGE, device.torch_device)
        attention = (PlannedAttention if graphs else TorchAttention)(pool, attention_variants(spec))
        recorded = None
        if graphs:
            assert isinstance(attention, PlannedAttention)
            recorded = DecodeGraphs(
                model,
                attention,
                EmulatedRecorder(),
                sizes=(1, 2, 4),
                at_start=(1, 2, 4),
                table_pages=CONTEXT // PAGE,
                scratch_page=pool.scratch_page,
                device=device.torch_device,
            )
        runners.append(
            TorchRunner(
                model,
                device,
                pool,
                attention=attention,
                graphs=recorded,
                max_running=SLOTS,
                context_tokens=CONTEXT,
                token_budget=64,
                grammars=grammars or GrammarSlots(tuple, VOCAB),
            )
        )
        runners[-1].warm_up()
        return runners[-1]

    yield made
    for runner in runners:
        runner.close()


class Ahead:
    """Plans and launches each step before the result of the one before it is asked for."""

    def __init__(self, runner: TorchRunner, depth: int = 1) -> None:
        self.planner = Planner(PAGE, PAGES)
        self.results: list[StepResult] = []
        self._runner = runner
        self._depth = depth
        self._under_way: deque[tuple[Pending | StepResult, list[int]]] = deque()

    def step(self, rows: Sequence[tuple[int, int]]) -> None:
        """rows: see Planner.plan."""
        plan = self.planner.plan(rows)
        sampled = [slot for slot, sample in zip(plan.row_slots, plan.row_samples, strict=True) if sample]
        self._under_way.append((self._runner.launch(plan), sampled))
        for slot in sampled:
            self.planner.tokens[slot].append(UNKNOWN)
        while len(self._under_way) > self._depth:
            self.collect()

    def collect(self) -> None:
        """The oldest step."""
        launched, sampled = self._under_way.popleft()
        result = launched if isinstance(launched, StepResult) else launched.result()
        self.results.append(result)
        if result.failed:
            return
        for slot, token in zip(sampled, result.tokens, strict=True):
            known = self.planner.tokens[slot]
            known[known.index(UNKNOWN)] = token

    def generate(self, num_new: int, chunk_tokens: int) -> list[list[int]]:
        """As fakes.plans.generate."""
        for slot, prompt in enumerate(PROMPTS):
            self.planner.admit(slot, prompt, SAMPLINGS[slot])
        goals = [len(prompt) + num_new for prompt in PROMPTS]
        while running := [slot for slot, goal in enumerate(goals) if len(self.planner.tokens[slot]) < goal]:
            self.step([(slot, chunk_tokens) for slot in running])
        while self._under_way:
            self.collect()
        return [self.planner.tokens[slot][len(prompt) :] for slot, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("chunk_tokens", [5, 1 << 20])
@pytest.mark.parametrize("graphs", [False, True])
def test_tokens_are_those_of_steps_run_one_after_another(graphs: bool, chunk_tokens: int, build: Build) -> None:
    results: list[StepResult] = []
    plain = build(HostStreams())

    def run(plan: BatchPlan) -> StepResult:
        results.append(plain.run(plan))
        return results[-1]

    expected = generate(run, Planner(PAGE, PAGES), PROMPTS, 12, chunk_tokens=chunk_tokens, samplings=SAMPLINGS)
    for depth in (0, 1, 3):
        ahead = Ahead(build(DelayedStreams(), graphs=graphs), depth)
        assert ahead.generate(12, chunk_tokens) == expected
        assert [told.prompt_logprobs for told in ahead.results] == [told.prompt_logprobs for told in results] or graphs
        assert [[one.ids for one in told.logprobs] for told in ahead.results] == [
            [one.ids for one in told.logprobs] for told in results
        ]


def test_no_launch_waits_for_the_device(build: Build) -> None:
    streams = DelayedStreams()
    runner = build(streams, graphs=True)
    planner = Planner(PAGE, PAGES)
    before = dict(streams.waits)
    for slot in range(3):
        planner.admit(slot, PROMPTS[slot], msgspec.structs.replace(SAMPLINGS[slot], prompt_logprobs=-1))
    launched = []
    for _ in range(4):
        launched.append(runner.launch(planner.plan([(slot, 99) for slot in range(3)])))
        for slot in range(3):
            planner.tokens[slot].append(UNKNOWN)
    assert streams.waits == before and streams.pending, "four steps are on their way"
    for pending in launched:
        assert not isinstance(pending, StepResult)
        assert len(pending.result().tokens) == 3
        assert pending.result() == pending.result(), "asked again"
    assert not streams.pending


def test_a_step_that_samples_nothing_is_over_when_the_device_is(build: Build) -> None:
    streams = DelayedStreams()
    runner = build(streams)
    planner = Planner(PAGE, PAGES)
    planner.admit(0, list(range(30)))
    pending = runner.launch(planner.plan([(0, 8)]))
    assert isinstance(pending, PendingStep) and streams.pending > 1
    assert pending.tokens() == () and not streams.pending
    assert pending.result() == StepResult(1, ())  # type: ignore[arg-type]


class Counting(GrammarSlots):
    """Each token must be the one after the last that was told. `order`: what was asked of it."""

    def __init__(self) -> None:
        super().__init__(tuple, VOCAB)
        self.last: dict[int, int] = {}
        self.order: list[str] = []

    @property
    def idle(self) -> bool:
        return not self.last

    def admit(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            self.last.pop(admission.slot, None)
            if admission.sampling.temperature == 0.5:  # stands for a grammar
                self.last[admission.slot] = 10 * admission.slot

    def begin(self, slots: Rows) -> Future[TokenMasks] | None:
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self.last]
        if not rows:
            return None
        self.order.append("begin")
        bits = np.zeros((len(rows), VOCAB // 32), np.int32)
        for place, row in enumerate(rows):
            token = self.last[int(slots[row])] + 1
            bits[place, token // 32] = np.uint32(1 << token % 32).astype(np.int32)
        future: Future[TokenMasks] = Future()
        future.set_result(TokenMasks(np.array(rows), torch.from_numpy(bits)))
        return future

    def drew(self, slots: Rows, tokens: Sequence[int]) -> None:
        self.order.append("drew")
        for slot, token in zip(slots.tolist(), tokens, strict=True):
            if slot in self.last:
                self.last[slot] = token


def test_the_mask_of_a_step_knows_the_token_of_the_one_before_and_the_forward_is_launched_meanwhile(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, grammars = DelayedStreams(), Counting()
    runner = build(streams, grammars=grammars)
    launched = [0]
    behind: list[int] = []
    upload, begin_masks = runner._upload, runner._begin_masks

    def watched_upload(*given: Any) -> Any:
        tensors = upload(*given)
        launched[0] = streams.pending
        return tensors

    def watched_begin(*given: Any) -> Any:
        behind.append(streams.pending - launched[0])
        return begin_masks(*given)

    monkeypatch.setattr(runner, "_upload", watched_upload)
    monkeypatch.setattr(runner, "_begin_masks", watched_begin)
    ahead = Ahead(runner)
    ahead.planner.admit(0, [3, 4], Sampling(0.5, 0, 1.0, 1, 0))
    ahead.planner.admit(1, [5, 6])
    for _ in range(6):
        ahead.step([(0, 99), (1, 99)])
    ahead.collect()
    assert ahead.planner.tokens[0][2:] == [1, 2, 3, 4, 5, 6]
    assert grammars.order == ["begin", *["drew", "begin"] * 5]
    assert behind == [0, 1, 1, 1, 1, 1], "forwards that are on their way when the masks are begun"
    free = generate(build(HostStreams()).run, Planner(PAGE, PAGES), [[5, 6]], 6)
    assert ahead.planner.tokens[1][2:] == free[0], "its neighbour draws what it draws alone"


def test_a_new_life_of_a_slot_hears_nothing_of_what_the_old_one_drew(build: Build) -> None:
    grammars = Counting()
    ahead = Ahead(build(DelayedStreams(), grammars=grammars))
    form = Sampling(0.5, 0, 1.0, 1, 0)
    ahead.planner.admit(2, [3, 4], form)
    for _ in range(3):
        ahead.step([(2, 99)])
    ahead.collect()
    ahead.planner.admit(2, [8], form)
    for _ in range(3):
        ahead.step([(2, 99)])
    ahead.collect()
    assert ahead.planner.tokens[2][1:] == [21, 22, 23]


def test_a_step_that_runs_out_of_memory_behind_one_on_its_way_fails_alone_and_voids_who_comes_next(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = build(DelayedStreams())
    ahead = Ahead(runner, depth=3)
    ahead.planner.admit(0, [3, 4])
    ahead.step([(0, 99)])
    with monkeypatch.context() as patch:

        def full(columns: object) -> None:
            raise torch.OutOfMemoryError("no room")

        patch.setattr(runner, "_upload", lambda *given: full(given))
        ahead.step([(0, 99)])
    ahead.step([(0, 99)])
    for _ in range(3):
        ahead.collect()
    first, failed, void = ahead.results
    assert len(first.tokens) == 1 and failed.failed == "out of memory: no room"
    assert void.failed == "a step before it failed"
    known = [3, 4, first.tokens[0]]
    ahead.planner.admit(0, known)
    for _ in range(3):
        ahead.step([(0, 99)])
    for _ in range(3):
        ahead.collect()
    expected = generate(build(HostStreams()).run, Planner(PAGE, PAGES), [[3, 4]], 4)
    assert ahead.planner.tokens[0][2:] == expected[0]
