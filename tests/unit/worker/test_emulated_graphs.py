"""Recorded decode steps of a whole model, over a recorder that keeps what a CUDA graph keeps and spoils the rest.

Three sequences and then some share a pool; each step is computed by recordings and call by call. What each of the
copies into a recording's inputs is for shows when it is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from fakes.emulated_graph import EmulatedRecorder
from fakes.forward import load
from fakes.planned_attention import PlannedAttention
from fakes.random_model import write_random_llama
from minisgl_backend.attention.interface import StepAttention, StepRows
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.device.graph import NotRecordable
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool
from minisgl_backend.models.model import Model
from minisgl_backend.worker import decode_graphs
from minisgl_backend.worker.decode_graphs import DecodeGraphs
from minisgl_backend.worker.torch_runner import attention_variants

PAGE, PAGES, TABLE = 4, 16, 5


@dataclass(frozen=True)
class Step:
    """Decode rows: what each computes, where, and its pages."""

    tokens: list[int]
    positions: list[int]
    tables: list[list[int]]


def script() -> list[Step]:
    """Four sequences a few steps long. Then the last one is gone and others get its pages: at the very places that it
    wrote last, in steps of as many rows as before but one, so that the row beyond is still there in the recording.
    """
    random = np.random.default_rng(3)

    def tokens(rows: int) -> list[int]:
        return [int(token) for token in random.integers(3, 320, rows)]

    tables = [[0], [1], [2], [8, 9]]
    steps = [Step(tokens(4), [at, at, at, at], [table[:1] for table in tables]) for at in range(4)]
    steps += [Step(tokens(4), [3, 3, 3, at], tables) for at in (4, 5)]
    tables = [[0, 9], [1, 8], [2]]
    steps += [Step(tokens(3), [at, at, 3], tables) for at in (4, 5, 6)]
    steps += [Step(tokens(2), [7, 2], [[1, 8], [2]]), Step(tokens(3), [7, 3, 2], [[0, 9], [2], [2]])]
    return steps


class Machine:
    """A model, and a pool for each of the ways in which it is run."""

    def __init__(self, model: Model, recorder: EmulatedRecorder) -> None:
        spec = model.spec
        shape = KvShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, torch.float32)
        self.pools = [PagedKvPool(shape, PAGES, PAGE, torch.device("cpu")) for _ in range(2)]
        self.model = model
        self.lines: list[str] = []
        variants = attention_variants(spec)
        self._eager = TorchAttention(self.pools[0], variants)
        self.graphs = DecodeGraphs(
            model,
            PlannedAttention(self.pools[1], variants),
            recorder,
            sizes=(1, 2, 4),
            at_start=(1, 2, 4),
            table_pages=TABLE,
            scratch_page=self.pools[1].scratch_page,
            device=torch.device("cpu"),
            tell=self.lines.append,
        )

    @torch.inference_mode()
    def both(self, step: Step) -> tuple[Tensor, Tensor | None]:
        """Logits of a step call by call, and by a recording."""
        tokens, positions = torch.tensor(step.tokens), torch.tensor(step.positions)
        width = max(len(table) for table in step.tables)
        scratch = self.pools[0].scratch_page
        tables = torch.tensor([table + [scratch] * (width - len(table)) for table in step.tables])
        starts = positions.numpy()
        rows = len(tokens)
        attention = self._eager.begin(StepRows(starts, np.ones(rows, np.int64), tables))
        eager = self.model.forward(tokens, positions, attention, torch.arange(rows))
        return eager, self.graphs.logits(tokens, positions, tables, starts)

    @torch.inference_mode()
    def same(self) -> bool:
        """Whether all steps of the script give the same tokens both ways."""
        for step in script():
            eager, replayed = self.both(step)
            if replayed is None or not torch.equal(eager.argmax(-1), replayed.argmax(-1)):
                return False
        return True


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_random_llama(tmp_path_factory.mktemp("random"), num_hidden_layers=2))


@pytest.fixture
def machine(model: Model) -> Iterator[Machine]:
    machine = Machine(model, EmulatedRecorder())
    yield machine
    machine.graphs.close()


@torch.inference_mode()
def test_replayed_steps_give_the_logits_of_steps_run_call_by_call(machine: Machine) -> None:
    machine.graphs.warm_up()
    assert machine.graphs.recorded == (4, 2, 1)
    for step in script():
        eager, replayed = machine.both(step)
        assert replayed is not None
        torch.testing.assert_close(replayed, eager, atol=1e-5, rtol=0)
    for layer in range(machine.model.spec.num_layers):
        for eager, recorded in zip(*(pool.layer(layer) for pool in machine.pools), strict=True):
            torch.testing.assert_close(recorded[:PAGES], eager[:PAGES], atol=1e-5, rtol=0)


@pytest.mark.parametrize("lazy", [False, True])
def test_it_does_not_matter_whether_a_size_was_recorded_before_it_comes(lazy: bool, machine: Machine) -> None:
    if not lazy:
        with torch.inference_mode():
            machine.graphs.warm_up()
    assert machine.same()


class _Dropping:
    """Stands for the tensors of _Inputs, and leaves out the n-th of all writes to them of a step."""

    def __init__(self, dropped: int) -> None:
        self.dropped = dropped
        self.seen: list[str] = []

    def fill(self, inputs: decode_graphs._Inputs, *given: object) -> None:
        self.seen = []

        def watch(name: str) -> Callable[..., Tensor]:
            original = getattr(Tensor, name)

            def write(target: Tensor, *arguments: object) -> Tensor:
                mine = target.untyped_storage().data_ptr() in places
                if mine:
                    self.seen.append(name)
                dropped = mine and len(self.seen) - 1 == self.dropped
                return target if dropped else original(target, *arguments)

            return write

        places = {tensor.untyped_storage().data_ptr() for tensor in (inputs.tokens, inputs.positions, inputs.tables)}
        with pytest.MonkeyPatch.context() as patch:
            for name in ("copy_", "fill_"):
                patch.setattr(Tensor, name, watch(name))
            _FILL(inputs, *given)  # type: ignore[arg-type]


_FILL = decode_graphs._Inputs.fill
WRITES = 5  # of a step with rows beyond those given


@pytest.mark.parametrize("dropped", range(WRITES))
def test_every_copy_into_a_recordings_inputs_matters(
    dropped: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.inference_mode():
        machine.graphs.warm_up()
    dropping = _Dropping(dropped)
    monkeypatch.setattr(decode_graphs._Inputs, "fill", lambda self, *given: dropping.fill(self, *given))
    assert not machine.same()
    monkeypatch.undo()


def test_as_many_copies_are_left_out_in_turn_as_there_are(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    dropping = _Dropping(-1)
    monkeypatch.setattr(decode_graphs._Inputs, "fill", lambda self, *given: dropping.fill(self, *given))
    most = 0
    for step in script():
        machine.both(step)
        most = max(most, len(dropping.seen))
    assert most == WRITES


def test_what_the_host_plans_matters_too(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        machine.graphs.warm_up()
    for step in machine.graphs._steps.values():
        monkeypatch.setattr(type(step.attention), "refresh", lambda self, starts, page_tables: None)
    assert not machine.same()


@torch.inference_mode()
def test_broken_numbers_on_the_scratch_page_reach_no_sequence(machine: Machine) -> None:
    """Rows beyond those of a step compute over it, and their logits are broken."""
    machine.graphs.warm_up()
    pool = machine.pools[1]
    for step in script():
        for layer in range(machine.model.spec.num_layers):
            for pages in pool.layer(layer):
                pages[pool.scratch_page] = torch.nan
        eager, replayed = machine.both(step)
        assert replayed is not None
        torch.testing.assert_close(replayed, eager, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "fault",
    [
        lambda x: x * float(x.sum()),
        lambda x: x * x.sum().item(),
        lambda x: x[x[:, 0] > 0],
        lambda x: x.sum(0).tolist() and x,
        lambda x: x + torch.tensor([1.0]),
        lambda x: x + torch.from_numpy(np.ones(1, np.float32)),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x[x[:, 0].nonzero()[:, 0]],
        lambda x: torch.tensor(x.numpy()),
    ],
)
def test_work_that_reads_or_brings_values_of_the_host_can_not_be_recorded(fault: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NotRecordable):
        EmulatedRecorder()(lambda: fault(torch.ones(3, 4) * 2))


@torch.inference_mode()
def test_what_lies_within_a_recording_is_not_there_for_anybody_else() -> None:
    leaked: list[Tensor] = []
    given = torch.arange(3.0)

    def work() -> Tensor:
        leaked.append(given * 2)
        return leaked[-1] + 1

    graph, out = EmulatedRecorder()(work)
    assert torch.equal(out, given * 2 + 1) and leaked[-1].isnan().all()
    given += 5
    graph.replay()
    assert torch.equal(out, given * 2 + 1) and leaked[-1].isnan().all()


@pytest.mark.parametrize("view", [False, True])
@torch.inference_mode()
def test_what_a_recording_reads_must_be_held_by_somebody(view: bool) -> None:
    given = [torch.arange(3.0)]
    graph, out = EmulatedRecorder()(lambda: (given[0].view(3, 1) if view else given[0]) + 1)
    graph.replay()
    assert out.sum() == 6
    given.clear()
    with pytest.raises(AssertionError, match="given back"):
        graph.replay()


class _Reading:
    """A model whose forward looks at a value of the device."""

    def __init__(self, model: Model) -> None:
        self.spec, self.hidden, self.head = model.spec, model.hidden, model.head
        self._model = model

    def forward(self, tokens: Tensor, positions: Tensor, attention: StepAttention, sampled: Tensor) -> Tensor:
        assert int(positions.max()) < TABLE * PAGE
        return self._model.forward(tokens, positions, attention, sampled)


def test_a_model_that_reads_values_in_a_step_is_run_call_by_call_and_told(model: Model) -> None:
    machine = Machine(_Reading(model), EmulatedRecorder())
    assert machine.both(script()[0])[1] is None
    assert machine.lines == [
        "decode steps run without a recording: __int__ reads a value on the host, or brings one from it"
    ]
