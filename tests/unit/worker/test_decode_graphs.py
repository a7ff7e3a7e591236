"""Recorded decode steps, with a recorder that keeps the work itself: faults of bookkeeping show on any machine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from minisgl_backend.attention.interface import StepAttention
from minisgl_backend.device.graph import Graph, NotRecordable
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.worker.decode_graphs import DecodeGraphs, graph_sizes

PAGES, SCRATCH = 4, 99


class AgainGraph:
    """Replays by doing the work again, which writes its result where the first one lies."""

    def __init__(self, work: Callable[[], Tensor], out: Tensor) -> None:
        self._work, self._out = work, out
        self.closed = False

    def replay(self) -> None:
        assert not self.closed, "a closed recording"
        self._out.copy_(self._work())

    def close(self) -> None:
        self.closed = True


class AgainRecorder:
    """See Recorder. `fails`: as if torch computed something in between. A row takes 10 bytes,"""

    def __init__(self, *, fails: bool = False, shares_memory: bool = False) -> None:
        self.graphs: list[AgainGraph] = []
        self.fails = fails
        self.shares_memory = shares_memory
        self.held_bytes = 0

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        out = work()
        if self.fails:
            raise NotRecordable("aten::mul is no native call")
        self.graphs.append(AgainGraph(work, out))
        self.held_bytes += 10 * len(out)
        return self.graphs[-1], out


class SummingStep:
    """See DecodeStep. Notes the positions that it is told of on the host."""

    def __init__(self, page_tables: Tensor, refreshed: list[list[int]]) -> None:
        self._page_tables = page_tables
        self._refreshed = refreshed

    def begin(self) -> StepAttention:
        return self._page_tables  # type: ignore[return-value]

    def refresh(self, starts: npt.NDArray[np.int64], page_tables: Tensor) -> None:
        assert page_tables.data_ptr() == self._page_tables.data_ptr() and page_tables.shape == self._page_tables.shape
        self._refreshed.append(starts.tolist())


class SummingModel:
    """Its "logits" are what it was given: token, position, and the row's whole page table. `seen`: rows of each run."""

    spec: ModelSpec

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.tables: list[Tensor] = []
        self.refreshed: list[list[int]] = []

    def decode_step(self, positions: Tensor, page_tables: Tensor) -> SummingStep:
        self.tables.append(page_tables)
        return SummingStep(page_tables, self.refreshed)

    def begin(self, rows: object) -> StepAttention:
        raise AssertionError("a recorded step begins by decode_step")

    def forward(self, tokens: Tensor, positions: Tensor, attention: StepAttention, sampled: Tensor) -> Tensor:
        assert isinstance(attention, Tensor)
        self.seen.append(len(tokens))
        return torch.cat((tokens[:, None], positions[:, None], attention), dim=1)[sampled].double()

    def hidden(self, tokens: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        raise AssertionError("a recorded step ends at the logits")

    def head(self, hidden: Tensor) -> Tensor:
        raise AssertionError("a recorded step ends at the logits")


def made(
    recorder: AgainRecorder, *, sizes: tuple[int, ...] = (1, 2, 4), at_start: tuple[int, ...] = (), lines: list[str]
) -> tuple[SummingModel, DecodeGraphs]:
    model = SummingModel()
    graphs = DecodeGraphs(
        model,
        model,
        recorder,
        sizes=sizes,
        at_start=at_start,
        table_pages=PAGES,
        scratch_page=SCRATCH,
        device=torch.device("cpu"),
        tell=lines.append,
    )
    return model, graphs


Step = tuple[Tensor, Tensor, Tensor, npt.NDArray[np.int64]]


def given(rows: int, pages: int, seed: int) -> Step:
    generator = torch.Generator().manual_seed(seed)
    tokens, positions = (torch.randint(1, 90, (rows,), generator=generator) for _ in range(2))
    tables = torch.randint(1, 90, (rows, pages), generator=generator)
    return tokens.int(), positions, tables, positions.numpy()


def expect(step: Step, logits: Tensor | None) -> None:
    tokens, positions, tables, _ = step
    assert logits is not None
    assert torch.equal(logits[:, 0], tokens.double()) and torch.equal(logits[:, 1], positions.double())
    assert torch.equal(logits[:, 2 : 2 + tables.shape[1]], tables.double())


def test_a_replayed_step_reads_every_input_anew() -> None:
    recorder = AgainRecorder()
    model, graphs = made(recorder, lines=[])
    for seed, (rows, pages) in enumerate([(2, 2), (2, 2), (2, 4), (2, 1), (4, 3), (2, 4), (1, 1)]):
        step = given(rows, pages, seed)
        expect(step, graphs.logits(*step))
        assert model.refreshed[-1][:rows] == step[1].tolist(), "what the host is told"
    assert len(model.refreshed) == 7, "before each step, recorded or replayed"
    assert graphs.recorded == (2, 4, 1) and len(recorder.graphs) == 3


def test_rows_beyond_those_of_the_step_touch_the_scratch_page_alone() -> None:
    model, graphs = made(AgainRecorder(), lines=[])
    expect(step := given(4, 4, 0), graphs.logits(*step))
    expect(step := given(3, 2, 1), graphs.logits(*step))
    assert model.tables[0][3, 0] == SCRATCH, "the row that the larger step had used before; it reads one page"
    assert model.seen[-1] == 4


def test_a_model_that_can_not_be_recorded_is_run_by_the_caller_and_told_once() -> None:
    lines: list[str] = []
    model, graphs = made(AgainRecorder(fails=True), lines=lines)
    assert graphs.logits(*given(2, 2, 0)) is None
    assert graphs.logits(*given(4, 2, 1)) is None
    assert lines == ["decode steps run without a recording: aten::mul is no native call"]
    assert model.seen == [2], "tried once"


def test_closing_frees_every_recording() -> None:
    recorder = AgainRecorder()
    _, graphs = made(recorder, lines=[])
    graphs.logits(*given(1, 1, 0))
    graphs.logits(*given(2, 1, 1))
    graphs.close()
    assert all(graph.closed for graph in recorder.graphs) and graphs.recorded == ()


def test_warm_up_records_the_largest_first_on_the_scratch_page_and_tells_what_it_takes() -> None:
    lines: list[str] = []
    model, graphs = made(AgainRecorder(), at_start=(1, 2, 4), lines=lines)
    graphs.warm_up()
    assert graphs.recorded == (4, 2, 1) == tuple(model.seen)
    assert model.refreshed == [[0] * 4, [0] * 2, [0]]
    assert all(set(table[:, 0].tolist()) == {SCRATCH} for table in model.tables)
    assert lines == ["decode steps of 4, 2, 1 rows are recorded: 0 MiB"]
    expect(step := given(3, 2, 0), graphs.logits(*step))


def test_who_records_some_sizes_at_the_start_tells_what_all_will_take() -> None:
    lines: list[str] = []
    recorder = AgainRecorder()
    _, graphs = made(recorder, at_start=(1, 4), lines=lines)
    recorder.held_bytes = 5 * (100 << 20) - 50  # of 5 rows
    graphs.warm_up()
    assert graphs.recorded == (4, 1)
    assert lines == [
        "decode steps of 4, 1 rows are recorded: 500 MiB, with those of other sizes, when they come, 700 MiB"
    ]


@pytest.mark.parametrize(("shares_memory", "tried", "expected_bytes"), [(False, [1], 70), (True, [4, 2, 1], 70)])
def test_what_recordings_will_hold_is_known_before_the_pool_is_made(
    shares_memory: bool, tried: list[int], expected_bytes: int
) -> None:
    recorder = AgainRecorder(shares_memory=shares_memory)
    model, graphs = made(recorder, lines=[])
    assert graphs.expected_bytes() == expected_bytes
    assert model.seen == tried and graphs.recorded == () and all(graph.closed for graph in recorder.graphs)


def test_a_model_that_can_not_be_recorded_takes_nothing_for_recordings() -> None:
    lines: list[str] = []
    _, graphs = made(AgainRecorder(fails=True), at_start=(1, 4), lines=lines)
    assert graphs.expected_bytes() == 0 and lines == []
    _, graphs = made(AgainRecorder(fails=True), at_start=(1, 4), lines=lines)
    graphs.warm_up()
    assert lines == ["decode steps run without a recording: aten::mul is no native call"]


@pytest.mark.parametrize("max_running", [1, 2, 15, 16, 17, 63, 64, 65, 200, 4096])
def test_sizes_ascend_reach_the_most_rows_and_keep_less_than_five_times_their_memory(max_running: int) -> None:
    sizes = graph_sizes(max_running)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == max_running
    for rows in range(1, max_running + 1):
        size = min(size for size in sizes if size >= rows)
        assert size - rows <= rows / 2
    assert sum(sizes) < 5 * max_running
