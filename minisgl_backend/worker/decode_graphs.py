"""Decode steps that are recorded once and replayed: from token ids to logits with one call.

Where it stands in the flow: the runner asks for the logits of a step that has decode rows alone. Steps are recorded for
certain numbers of rows, the sizes; a step in between is run as one of the next size, whose other rows are the scratch
page's. All recordings read the first rows of the same tensors, which are written for each step. The contract is that of
CUDA graphs, which a CPU keeps as well (device/graph.py). Steps with chunks are run call by call on either.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl_backend.attention.interface import DecodeStep, RecordableAttention
from minisgl_backend.device.graph import Graph, NotRecordable, Recorder
from minisgl_backend.models.model import Model

_MIB = 1 << 20


def graph_sizes(max_running: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24 … and the most rows there can be.

    A row too many costs little: weights are read once, and it attends to one token. Each recording keeps its own logits
    and work memory, all together not five times as much as that of max_running.
    """
    sizes = {1, max_running}
    size = 2
    while size < max_running:
        sizes |= {size, min(size + size // 2, max_running)}
        size *= 2
    return tuple(sorted(sizes))


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What recordings read, all int64."""

    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    tables: Tensor  # [rows, pages of a whole context]

    def fill(self, tokens: Tensor, positions: Tensor, page_tables: Tensor, scratch_page: int) -> None:
        """Rows beyond those given compute some token or other at position 0 of the scratch page: they write nothing and
        read nothing that is of a sequence.
        """
        rows, pages = page_tables.shape
        for target, source in (
            (self.tokens[:rows], tokens),
            (self.positions[:rows], positions),
            (self.tables[:rows, :pages], page_tables),
        ):
            target.copy_(source)
        if rows < len(self.tokens):
            self.positions[rows:].fill_(0)
            self.tables[rows:, 0].fill_(scratch_page)

    def first(self, rows: int) -> _Inputs:
        """Of the first rows: views."""
        return _Inputs(self.tokens[:rows], self.positions[:rows], self.tables[:rows])


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recording of one size, and all that lives outside of it and is read by it: a graph keeps addresses alone."""

    inputs: _Inputs
    every_row: Tensor  # int64: 0, 1, 2 …; read by each replay, as the inputs are
    attention: DecodeStep
    graph: Graph
    logits: Tensor  # [rows, vocab], in the model's dtype


class DecodeGraphs:
    """The recordings of a runner. Not for two threads at once."""

    def __init__(
        self,
        model: Model,
        attention: RecordableAttention,
        record: Recorder,
        *,
        sizes: Sequence[int],
        at_start: Sequence[int],
        table_pages: int,
        scratch_page: int,
        device: torch.device,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """sizes: ascending, the last one the most rows of a step. at_start: those of them that `warm_up` records; the
        others are when they first come. table_pages: of a whole context.

        tell: gets a line for the operator: what was recorded and what it takes, or why nothing can be.
        """
        self._model = model
        self._attention = attention
        self._record = record
        self._sizes = tuple(sizes)
        self._at_start = tuple(sorted(set(at_start), reverse=True))
        self._scratch_page = scratch_page
        most = self._sizes[-1]
        tokens, positions = (torch.zeros(most, dtype=torch.int64, device=device) for _ in range(2))
        tables = torch.full((most, table_pages), scratch_page, dtype=torch.int64, device=device)
        self._inputs = _Inputs(tokens, positions, tables)
        self._tell = tell
        self._recordable = True
        self._steps: dict[int, _Recorded] = {}

    @property
    def recorded(self) -> tuple[int, ...]:
        """The sizes that were recorded so far, in their order."""
        return tuple(self._steps)

    def warm_up(self) -> None:
        """Records steps on the scratch page, the largest first, and tells. Before the first step."""
        for size in self._at_start:
            self._scratch_step(size)
        if self._recordable:
            later = [size for size in self._sizes if size not in self._steps]
            all_bytes = self._all_bytes()
            beyond = f", with those of other sizes, when they come, {all_bytes // _MIB} MiB" if later else ""
            sizes = ", ".join(map(str, self._steps))
            held = self._record.held_bytes // _MIB
            self._tell(f"decode steps of {sizes} rows are recorded: {held} MiB{beyond}")

    def expected_bytes(self) -> int:
        """What all recordings will hold: some are made to find out, and closed. 0: the model can not be recorded.

        Where all work in the memory of the largest, that is all of them. Elsewhere each has memory of its own, which
        grows with its rows, and the smallest tells.
        """
        tell, self._tell = self._tell, lambda line: None  # who records in earnest tells
        for size in sorted(self._sizes, reverse=True) if self._record.shares_memory else self._sizes[:1]:
            self._scratch_step(size)
        expected = self._all_bytes()
        self.close()
        self._tell = tell
        return expected if self._recordable else 0

    def logits(
        self, tokens: Tensor, positions: Tensor, page_tables: Tensor, starts: npt.NDArray[np.int64]
    ) -> Tensor | None:
        """One step of decode rows. Writes their K/V, like Model.forward.

        tokens, positions [rows], page_tables [rows, n] as in StepRows; starts [rows]: positions, on the host.
        → logits [rows, vocab], which the next step overwrites; None: the model can not be recorded, and the caller runs
        the step.
        """
        if not self._recordable:
            return None
        rows = len(tokens)
        size = self._sizes[bisect_left(self._sizes, rows)]
        step = self._steps.get(size)
        inputs = self._inputs.first(size) if step is None else step.inputs
        inputs.fill(tokens, positions, page_tables, self._scratch_page)
        all_starts = np.zeros(size, np.int64)
        all_starts[:rows] = starts
        if step is not None:
            step.attention.refresh(all_starts, inputs.tables)
            step.graph.replay()
            return step.logits[:rows]
        try:
            step = self._steps[size] = self._record_step(inputs, all_starts)
        except NotRecordable as error:
            self._recordable = False
            self._tell(f"decode steps run without a recording: {error}")
            return None
        return step.logits[:rows]

    def close(self) -> None:
        """Frees the recordings."""
        for step in self._steps.values():
            step.graph.close()
        self._steps.clear()

    def _scratch_step(self, size: int) -> None:
        """One of that many rows, all at the first place of the scratch page."""
        zeros = torch.zeros(size, dtype=torch.int64, device=self._inputs.tokens.device)
        self.logits(zeros, zeros, torch.full_like(zeros, self._scratch_page)[:, None], np.zeros(size, np.int64))

    def _all_bytes(self) -> int:
        """What recordings of all sizes hold, by those there are."""
        held, made = self._record.held_bytes, sum(self._steps)
        return held if self._record.shares_memory or not made else held * sum(self._sizes) // made

    def _record_step(self, inputs: _Inputs, starts: npt.NDArray[np.int64]) -> _Recorded:
        """Runs a step over the inputs while it is recorded."""
        every_row = torch.arange(len(starts), device=inputs.tokens.device)
        step = self._attention.decode_step(inputs.positions, inputs.tables)
        step.refresh(starts, inputs.tables)
        graph, logits = self._record(
            lambda: self._model.forward(inputs.tokens, inputs.positions, step.begin(), every_row)
        )
        return _Recorded(inputs, every_row, step, graph, logits)
