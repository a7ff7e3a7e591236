"""What the scheduler holds at this moment, for whoever looks on: rows, pages, the prefix tree.

Where it stands in the flow: `Scheduler.view` calls it for a Look of the text actor, some times a second at most. It
changes nothing, and looks at no more rows and nodes than are asked for, whatever the scheduler holds.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import chain, islice

from minisgl_backend.cache.node import TOKEN_BYTES, RadixNode
from minisgl_backend.messages.engine import Gauges, Look, RunningRow, TreeNode, View, WaitingRow
from minisgl_backend.messages.ids import StepId
from minisgl_backend.scheduler.lives import Lives
from minisgl_backend.scheduler.sequence import Phase, SequenceState

_MARK_EVERY_S = 0.25
_MOST_MARKS = 1 << 14  # an hour of steps; what is older counts as so old


class StepTimes:
    """When steps were planned, to `_MARK_EVERY_S`. Mutable, owned by the scheduler."""

    __slots__ = ("_next_s", "_steps", "_times")

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._times: list[float] = []
        self._next_s = 0.0

    def planned(self, step: StepId, now: float) -> None:
        """To be called for every step, in order."""
        if now < self._next_s:
            return
        self._next_s = now + _MARK_EVERY_S
        self._steps.append(step)
        self._times.append(now)
        if len(self._steps) > _MOST_MARKS:
            del self._steps[: _MOST_MARKS // 2], self._times[: _MOST_MARKS // 2]

    def of(self, step: StepId) -> float:
        """Monotonic seconds. `step` was planned, so there is a mark."""
        return self._times[max(0, bisect_right(self._steps, step) - 1)]


def view_of(lives: Lives, gauges: Gauges, times: StepTimes, look: Look, now: float) -> View:
    """gauges: of this moment."""
    running = [*islice(chain(lives.extending.by_arrival(), lives.decoding.by_arrival()), look.rows)]
    nodes = lives.tree.shown((state.node for state in running if state.node is not None), look.nodes)
    return View(
        gauges=gauges,
        quarantined_pages=lives.pages.quarantined_pages,
        prompt_tokens=lives.prompt_tokens,
        hit_tokens=lives.hit_tokens,
        running=_running(running),
        waiting=_waiting(lives, look.rows),
        nodes=_nodes(nodes, times, look.edge_tokens, lives.page_size, now),
        total_nodes=lives.tree.num_nodes,
    )


def _running(states: list[SequenceState]) -> tuple[RunningRow, ...]:
    extending = Phase.EXTENDING
    return tuple(
        [
            RunningRow(
                state.id,
                (prompt := state.prompt_tokens),
                state.cached_tokens,
                state.known - prompt,
                state.total_tokens - prompt,
                len(state.pages),
                state.phase is extending,
            )
            for state in states
        ]
    )


def _waiting(lives: Lives, most: int) -> tuple[WaitingRow, ...]:
    """By arrival. Those who run are passed over."""
    waiting = Phase.WAITING
    count = min(most, len(lives.waiting))
    rows: list[WaitingRow] = []
    for state in lives.live.values() if count else ():
        if state.phase is waiting:
            rows.append(WaitingRow(state.id, state.prompt_tokens, state.priority))
            if len(rows) == count:
                break
    return tuple(rows)


def _nodes(
    nodes: list[RadixNode], times: StepTimes, edge_tokens: int, page_size: int, now: float
) -> tuple[TreeNode, ...]:
    edge_bytes = edge_tokens * TOKEN_BYTES
    return tuple(
        [
            TreeNode(
                node.number,
                node.parent.number if node.parent is not None else 0,
                len(node.pages) * page_size,
                (locks := node.locks),
                0.0 if locks else now - times.of(node.step),
                bytes(node.key[:edge_bytes]) if edge_bytes else b"",
            )
            for node in nodes
        ]
    )
