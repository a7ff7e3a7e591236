"""Reported faults of other servers with CUDA graphs and padded batches (class CG), on recordings that keep what a CUDA
graph keeps and spoil the rest (fakes/emulated_graph.py). tests/gpu repeats what it can on a GPU.

CG-01 GeeeekExplorer/nano-vllm#106, vllm-project/vllm#8068; CG-02 vllm-project/vllm PR #7999, NVIDIA/TensorRT-LLM#10688,
sgl-project/mini-sglang PR #63; CG-03 vllm-project/vllm PR #39391, flashinfer-ai/flashinfer#2883, sgl-project/sglang PR
#30895; CG-04 sgl-project/sglang-jax#1487, sgl-project/mini-sglang#58; CG-06 sgl-project/mini-sglang commit 0e5f1e7.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from fakes.delayed_streams import DelayedStreams
from fakes.emulated_graph import EmulatedRecorder
from fakes.planned_attention import PlannedAttention
from fakes.plans import Planner, generate
from load.bench.gpu_models import CONFIGS, DeviceRandom, spec_of
from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.device.streams import HostStreams, Streams
from minisgl_backend.kernels.moe import ExpertActivation, ExpertWeights, Routing
from minisgl_backend.kernels.torch_kernels import TorchKernels
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool
from minisgl_backend.messages.plan import NO_TOKEN, BatchPlan, StepResult
from minisgl_backend.models.load import build_decoder
from minisgl_backend.models.model import Model
from minisgl_backend.sampling.grammar import GrammarSlots
from minisgl_backend.worker.decode_graphs import DecodeGraphs, graph_sizes
from minisgl_backend.worker.runner import Launched
from minisgl_backend.worker.torch_runner import TorchRunner, attention_variants

PAGE = 4
CPU = torch.device("cpu")


class DenseExperts(TorchKernels):
    """Every expert computes every token, as nothing that is recorded may ask who was chosen."""

    def mix_experts(self, x: Tensor, routing: Routing, experts: ExpertWeights, activation: ExpertActivation) -> Tensor:
        outs = torch.stack([experts.run(expert, x, activation) for expert in range(len(experts.down))], 1)
        chosen = torch.zeros(outs.shape[:2]).scatter_add_(1, routing.experts, routing.weights)
        return (outs * chosen[:, :, None]).sum(1)


class DelayedDevice(CpuDevice):
    """A CPU with the queues of a GPU."""

    def __init__(self, streams: Streams) -> None:
        super().__init__(1)
        self.streams = streams


@dataclass
class Rig:
    """A runner, and what it holds."""

    runner: TorchRunner
    pool: PagedKvPool
    graphs: DecodeGraphs | None
    recorder: EmulatedRecorder

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.recorder.graphs)


def rig(
    model: Model,
    sizes: Sequence[int],
    *,
    max_running: int,
    context: int = 64,
    streams: Streams | None = None,
) -> Rig:
    """sizes: that are recorded; none: nothing is."""
    spec, device, recorder = model.spec, DelayedDevice(streams or HostStreams()), EmulatedRecorder()
    table_pages = -(-context // PAGE)
    shape = KvShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, torch.float32)
    pool = PagedKvPool(shape, max_running * table_pages, PAGE, CPU)
    attention, graphs = PlannedAttention(pool, attention_variants(spec)), None
    if sizes:
        graphs = DecodeGraphs(
            model,
            attention,
            recorder,
            sizes=sizes,
            at_start=sizes,
            table_pages=table_pages,
            scratch_page=pool.scratch_page,
            device=CPU,
        )
    runner = TorchRunner(
        model,
        device,
        pool,
        attention=attention,
        graphs=graphs,
        max_running=max_running,
        context_tokens=context,
        token_budget=64,
        grammars=GrammarSlots(tuple, spec.vocab_size),
    )
    runner.warm_up()
    return Rig(runner, pool, graphs, recorder)


def model_of(name: str) -> Model:
    spec = spec_of(CONFIGS[name])
    return build_decoder(spec, DeviceRandom(spec, CPU, torch.float32), CPU, torch.float32, 256, kernels=DenseExperts())


@pytest.fixture(scope="module")
def dense() -> Model:
    return model_of("tiny")


@pytest.fixture(scope="module")
def sparse() -> Model:
    return model_of("tiny-moe")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 500, (length,), generator=generator).tolist() for length in lengths]


def answers(rig: Rig, lengths: Sequence[int], new: int) -> list[list[int]]:
    return generate(rig.runner.run, Planner(PAGE, rig.pool.num_pages), prompts_of(lengths), new)


def test_cg_01_a_row_that_grows_to_the_end_of_the_context_runs_recorded_beside_short_ones(dense: Model) -> None:
    """Page tables of recordings have room for a whole context; beyond it no plan goes (SC-01)."""
    context, lengths = 42, (34, 3, 1)
    plain, recorded = (rig(dense, sizes, max_running=3, context=context) for sizes in ((), (1, 2, 3)))
    expected = answers(plain, lengths, context - max(lengths))
    before = recorded.replays
    assert answers(recorded, lengths, context - max(lengths)) == expected
    assert recorded.replays - before == context - max(lengths) - 1, "every step but the prompts' was replayed"


@pytest.mark.parametrize("max_running", [6, 1])
@pytest.mark.parametrize("recorded", [True, False])
def test_cg_02_every_number_of_rows_up_to_the_limit_runs_whatever_was_recorded(
    dense: Model, recorded: bool, max_running: int
) -> None:
    """The sizes end with the limit itself, whatever it is; without recordings, and with room for one row."""
    sizes = graph_sizes(max_running)
    assert sizes[-1] == max_running
    for rows in range(1, max_running + 1):
        lengths = range(2, 2 + rows)
        one = rig(dense, sizes if recorded else (), max_running=max_running)
        before = one.replays
        assert answers(one, lengths, 5) == answers(rig(dense, (), max_running=max_running), lengths, 5)
        assert (one.replays - before == 4) == recorded


@pytest.mark.slow
def test_cg_03_rows_that_pad_a_batch_disturb_no_other_whatever_they_hold(sparse: Model) -> None:
    """Experts; five rows in a recording of eight, after eight have left theirs behind; broken numbers on the scratch
    page, where the others read and write. 200 steps.
    """
    lengths, new = (3, 9, 1, 5, 7), 200
    recorded = rig(sparse, (8,), max_running=8, context=224)
    answers(recorded, (4,) * 8, 3)
    for layer in range(sparse.spec.num_layers):
        for pages in recorded.pool.layer(layer):
            pages[recorded.pool.scratch_page] = torch.nan
    planner = Planner(PAGE, recorded.pool.num_pages, steps_before=3)  # of eight rows, with their prompts
    got = generate(recorded.runner.run, planner, prompts_of(lengths), new)
    assert got == answers(rig(sparse, (), max_running=8, context=224), lengths, new)
    assert not any(token == NO_TOKEN for row in got for token in row)


@pytest.mark.slow
def test_cg_04_a_place_for_a_token_on_its_way_is_not_taken_by_another_request(dense: Model) -> None:
    """500 requests of a few tokens over four slots, in batches that are never alike: several prompts before a decode
    step, slots that are given away while their last token is still on its way. Each step is launched before the one
    before it has been waited for, on a device that does nothing until then.
    """
    plans = uneven_plans(requests=500, slots=4, pages=64)
    runner = rig(dense, (), max_running=4).runner
    serial = [runner.run(plan).tokens for plan in plans]
    ahead = one_ahead(rig(dense, (1, 2, 3, 4), max_running=4, streams=DelayedStreams()).runner, plans)
    assert ahead == serial
    assert len({token for step in serial for token in step}) > 50


def uneven_plans(requests: int, slots: int, pages: int) -> list[BatchPlan]:
    """No plan depends on a token: a request ends after a number of them."""
    random, planner = np.random.default_rng(11), Planner(PAGE, pages)
    goals: dict[int, int] = {}
    plans = []
    while requests or goals:
        for slot in range(slots):
            if requests and slot not in goals and random.random() < 0.7:
                prompt = random.integers(3, 500, random.integers(1, 7)).tolist()
                planner.admit(slot, prompt)
                goals[slot] = len(prompt) + int(random.integers(1, 5))
                requests -= 1
        rows = [(slot, int(random.integers(1, 8))) for slot in goals if random.random() < 0.7]
        if not rows:
            continue
        plans.append(planner.plan(rows))
        sampled = sum(plans[-1].row_samples)
        planner.apply(StepResult(plans[-1].step, (0,) * sampled))
        goals = {slot: goal for slot, goal in goals.items() if len(planner.tokens[slot]) < goal}
    return plans


def one_ahead(runner: TorchRunner, plans: Sequence[BatchPlan]) -> list[tuple[int, ...]]:
    def tokens(launched: Launched) -> tuple[int, ...]:
        return (launched if isinstance(launched, StepResult) else launched.result()).tokens

    told, before = [], runner.launch(plans[0])
    for plan in plans[1:]:
        now = runner.launch(plan)
        told.append(tokens(before))
        before = now
    return [*told, tokens(before)]


def test_cg_06_a_row_that_pads_a_batch_reads_no_token_that_nobody_has_written(dense: Model) -> None:
    """All that the slots hold before their prompts come, and beyond them, is no token of any vocabulary: it has no
    embedding, so who reads one fails.
    """
    lengths = (2, 5, 3)
    recorded = rig(dense, (4,), max_running=4)
    with torch.inference_mode():
        recorded.runner._slots._tokens.fill_(2**31 - 1)
    before = recorded.replays
    got = answers(recorded, lengths, 6)
    assert recorded.replays - before == 5
    assert got == answers(rig(dense, (), max_running=4), lengths, 6)
