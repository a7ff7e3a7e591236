"""Who may start: the clipping of what is asked, the waiting queue, and the pages promised to those who run.

Where it stands in the flow: `Scheduler.add` clips and queues; `Scheduler.plan` admits from the head while the reserve
allows it.
"""

from __future__ import annotations

from collections import OrderedDict

from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.sequence import Phase, SequenceState


def clip_new_tokens(prompt_tokens: int, max_new_tokens: int, limits: Limits) -> int:
    """New tokens that context and the empty pool allow, at most `max_new_tokens`; below 1 when there is no room.

    The last token's K/V is never stored, so the pool may be one token smaller than prompt + output.
    """
    return min(max_new_tokens, limits.context_tokens - prompt_tokens, limits.pool_tokens - prompt_tokens + 1)


class WaitingQueue:
    """First come, first served: the head waits until it fits, and nobody overtakes it."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        # Ordered, because a plain dict walks over all deleted entries to find its head.
        self._queue: OrderedDict[SequenceId, SequenceState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, state: SequenceState) -> None:
        self._queue[state.id] = state

    def head(self) -> SequenceState:
        return next(iter(self._queue.values()))

    def remove(self, state: SequenceState) -> None:
        del self._queue[state.id]

    def check(self, youngest_admitted: int) -> None:
        """Proves that the queue is in order of arrival, behind everybody admitted before."""
        last = youngest_admitted
        for state in self._queue.values():
            assert state.phase is Phase.WAITING, f"sequence {state.id} ({state.phase.value}) is in the waiting queue"
            assert state.arrival > last, f"sequence {state.id} was overtaken by a later one"
            last = state.arrival


class Reserve:
    """The worst case as a count: what running sequences may still take, if each gets all the tokens it asked for.

    A sequence is admitted only when its own worst case fits beside this promise, so a row never lacks a page. Pages
    themselves are taken one by one when their tokens are planned.
    """

    __slots__ = ("promised_pages",)

    def __init__(self) -> None:
        self.promised_pages = 0  # sum over running sequences of need_pages - pages held; never above the free pages

    def admits(self, state: SequenceState, free_pages: int) -> bool:
        return self.promised_pages + state.need_pages <= free_pages

    def promise(self, state: SequenceState) -> None:
        self.promised_pages += state.need_pages

    def granted(self, count: int) -> None:
        """`count` promised pages were taken from the free list."""
        self.promised_pages -= count

    def forgive(self, state: SequenceState) -> None:
        """A running sequence ends: the pages it did not take are nobody's any more."""
        self.promised_pages -= state.need_pages - len(state.pages)
