"""Decode steps that are recorded once and replayed: from token ids to logits with one call.

Where it stands in the flow: the runner asks for the logits of a step that has decode rows alone. Steps are recorded for
certain numbers of rows, the sizes, when each first comes; a step in between is run as one of the next size, whose
other rows are the scratch page's. All recordings read the first rows of the same tensors, which are written for each
step. The contract is that of CUDA graphs, so who records may as well be a GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl_backend.attention.interface import DecodeStep, RecordableAttention
from minisgl_backend.device.graph import NotRecordable
from minisgl_backend.models.model import Model


class Graph(Protocol):
    """A recorded step."""

    def replay(self) -> None:
        """Runs it again, over the same memory."""
        ...

    def close(self) -> None:
        """Lets go of what it holds. Idempotent."""
        ...


class Recorder(Protocol):
    """How a device records."""

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """Runs `work` and records it → the recording, and what work returned, which each replay fills anew.

        Raises NotRecordable, in the middle of the work, whose effects so far then stay.
        """
        ...


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
        """Rows beyond those given compute token 0 at position 0 of the scratch page, all alike."""
        rows, pages = page_tables.shape
        self.tokens[:rows] = tokens
        self.tokens[rows:] = 0
        self.positions[:rows] = positions
        self.positions[rows:] = 0
        self.tables[:rows, :pages] = page_tables
        self.tables[rows:, 0] = scratch_page

    def first(self, rows: int) -> _Inputs:
        """Of the first rows: views."""
        return _Inputs(self.tokens[:rows], self.positions[:rows], self.tables[:rows])


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recording of one size."""

    graph: Graph
    attention: DecodeStep
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
        table_pages: int,
        scratch_page: int,
        device: torch.device,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """sizes: ascending, the last one the most rows of a step. table_pages: of a whole context.

        tell: gets a line for the operator when it turns out that the model can not be recorded.
        """
        self._model = model
        self._attention = attention
        self._record = record
        self._sizes = tuple(sizes)
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

    def logits(
        self, tokens: Tensor, positions: Tensor, page_tables: Tensor, starts: npt.NDArray[np.int64]
    ) -> Tensor | None:
        """One step of decode rows. Writes their K/V, like Model.forward.

        tokens, positions [rows], page_tables [rows, n] as in StepRows; starts [rows]: positions, on the host.
        → logits [rows, vocab], which the next step of this size overwrites; None: the model can not be recorded, and
        the caller runs the step.
        """
        if not self._recordable:
            return None
        rows = len(tokens)
        size = self._sizes[bisect_left(self._sizes, rows)]
        inputs = self._inputs.first(size)
        inputs.fill(tokens, positions, page_tables, self._scratch_page)
        all_starts = np.zeros(size, np.int64)
        all_starts[:rows] = starts
        step = self._steps.get(size)
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

    def _record_step(self, inputs: _Inputs, starts: npt.NDArray[np.int64]) -> _Recorded:
        """Runs a step over the inputs while it is recorded."""
        every_row = torch.arange(len(starts), device=inputs.tokens.device)
        step = self._attention.decode_step(inputs.positions, inputs.tables)
        step.refresh(starts, inputs.tables)
        graph, logits = self._record(
            lambda: self._model.forward(inputs.tokens, inputs.positions, step.begin(), every_row)
        )
        return _Recorded(graph, step, logits)
