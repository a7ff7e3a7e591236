"""Decode steps that are recorded once and replayed: from token ids to logits with one call.

Where it stands in the flow: the runner asks for the logits of a step that has decode rows alone. Steps are recorded for
certain numbers of rows, the sizes, when each first comes; a step in between is run as one of the next size, whose
other rows are the scratch page's. What a recording reads, it reads from the tensors of its size, which are written for
each step. The contract is that of CUDA graphs, so who records may as well be a GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minisgl_backend.attention.interface import RecordableAttention
from minisgl_backend.kernels.native.recording import NotRecordable
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
    """Each number of rows up to 16, then every fourth up to 64, every sixteenth, and the most there can be.

    A row too many costs time on a CPU, a recording too many only some memory.
    """
    sizes = [*range(1, 17), *range(20, 65, 4), *range(80, max_running, 16)]
    return (*(size for size in sizes if size < max_running), max_running)


@dataclass(frozen=True, slots=True)
class _StaticStep:
    """What a recording of one size reads, all int64, and what it writes."""

    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    tables: Tensor  # [rows, pages of a whole context]
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
        table_pages: int,
        scratch_page: int,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """sizes: ascending, the last one the most rows of a step. table_pages: of a whole context.

        tell: gets a line for the operator when it turns out that the model can not be recorded.
        """
        self._model = model
        self._attention = attention
        self._record = record
        self._sizes = tuple(sizes)
        self._table_pages = table_pages
        self._scratch_page = scratch_page
        self._tell = tell
        self._recordable = True
        self._steps: dict[int, _StaticStep] = {}

    @property
    def recorded(self) -> tuple[int, ...]:
        """The sizes that were recorded so far, in their order."""
        return tuple(self._steps)

    def logits(self, tokens: Tensor, positions: Tensor, page_tables: Tensor) -> Tensor | None:
        """One step of decode rows. Writes their K/V, like Model.forward.

        tokens, positions [rows], page_tables [rows, n] as in StepRows → logits [rows, vocab], which the next step of
        this size overwrites; None: the model can not be recorded, and the caller runs the step.
        """
        if not self._recordable:
            return None
        rows = len(tokens)
        size = self._sizes[bisect_left(self._sizes, rows)]
        step = self._steps.get(size)
        if step is not None:
            self._fill(step.tokens, step.positions, step.tables, (tokens, positions, page_tables))
            step.graph.replay()
            return step.logits[:rows]
        try:
            step = self._steps[size] = self._first(size, tokens, positions, page_tables)
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

    def _first(self, size: int, *given: Tensor) -> _StaticStep:
        """Runs a step while it is recorded."""
        device = given[0].device
        tokens, positions = (torch.empty(size, dtype=torch.int64, device=device) for _ in range(2))
        tables = torch.full((size, self._table_pages), self._scratch_page, dtype=torch.int64, device=device)
        self._fill(tokens, positions, tables, given)
        every_row = torch.arange(size, device=device)
        begin = self._attention.decode_step(positions, tables)
        graph, logits = self._record(lambda: self._model.forward(tokens, positions, begin(), every_row))
        return _StaticStep(tokens, positions, tables, graph, logits)

    def _fill(self, tokens: Tensor, positions: Tensor, tables: Tensor, given: Sequence[Tensor]) -> None:
        """Rows beyond those given compute token 0 at position 0 of the scratch page, all alike."""
        given_tokens, given_positions, given_tables = given
        rows, pages = given_tables.shape
        tokens[:rows] = given_tokens
        tokens[rows:] = 0
        positions[:rows] = given_positions
        positions[rows:] = 0
        tables[:rows, :pages] = given_tables
        tables[rows:] = self._scratch_page
