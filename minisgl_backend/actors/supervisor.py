"""The supervisor: keeps one engine group alive and tells the text actor of its state.

    STARTING ──ready──► READY ──a member dies──► RESTARTING ──ready──► READY
        └──── died before it was ever ready, or too many deaths in a row ────► FAILED   (terminal)

Back-off doubles from zero: at once, 0.5 s, 1 s, 2 s … 30 s. A finished sequence resets it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from minisgl_backend.actors.executors.group import Executor, GroupDied
from minisgl_backend.actors.internal import EngineDown, EngineUp, StateChanged, ToText
from minisgl_backend.actors.mailbox import LocalMailbox
from minisgl_backend.actors.start_times import StartTimes
from minisgl_backend.messages.client import EngineState
from minisgl_backend.messages.engine import EndReason, Progress, SchedulerToText

_LONGEST_BACKOFF_S = 30.0
_log = logging.getLogger(__name__)


class Supervisor:
    """Owns the running group. `pool_tokens` of a group = its pages × page_size."""

    def __init__(
        self,
        executor: Executor,
        to_text: LocalMailbox[ToText],
        *,
        page_size: int,
        max_restarts: int,
        began_s: float | None = None,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """began_s: when the first start began (monotonic), if that was earlier than now."""
        self._executor = executor
        self._to_text = to_text
        self._page_size = page_size
        self._max_restarts = max_restarts
        self._wait = wait
        self._deaths_in_a_row = 0
        self._was_ready = False
        self._times = StartTimes(time.monotonic() if began_s is None else began_s)

    async def run(self) -> None:
        """Until cancelled, or until the engine is FAILED."""
        generation = 0
        while True:
            generation += 1
            try:
                await self._one_group(generation)
            except Exception as error:
                # Python 3.11's TaskGroup drops a cancel that comes together with a death: it is ours to keep.
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise asyncio.CancelledError from error
                died = (
                    error if isinstance(error, GroupDied) else GroupDied("executor", f"{type(error).__name__}: {error}")
                )
                _log.error("engine group %d: %s", generation, died, exc_info=None if died is error else error)
                self._deaths_in_a_row += 1
                if not self._was_ready or self._deaths_in_a_row > self._max_restarts:
                    self._to_text.post(self._epitaph(died))
                    return
                self._to_text.post(StateChanged(EngineState.RESTARTING, str(died)))
                await self._wait(self._backoff_s())
                self._times = StartTimes(time.monotonic())

    async def _one_group(self, generation: int) -> None:
        async with self._executor.open(generation, self._deliver, self._say) as group:
            start = ", ".join((*group.placement, self._times.report()))
            _log.info("engine group %d is ready: %d pages, %s", generation, group.num_pages, start)
            self._was_ready = True
            pool_tokens = group.num_pages * self._page_size
            self._to_text.post(EngineUp(group.to_scheduler, pool_tokens, group.pids, start))
            try:
                await asyncio.get_running_loop().create_future()  # until a death or a cancel
            finally:  # first of all, before the rest of the group is stopped: clients wait
                self._to_text.post(EngineDown())

    async def _deliver(self, message: SchedulerToText) -> None:
        if isinstance(message, Progress) and any(
            ended.reason in (EndReason.STOP, EndReason.LENGTH) for ended in message.ended
        ):
            self._deaths_in_a_row = 0
        await self._to_text.send(message)

    def _say(self, line: str) -> None:
        _log.info("%s", line)
        self._times.note(line)
        self._to_text.post(StateChanged(EngineState.STARTING, line))

    def _backoff_s(self) -> float:
        if self._deaths_in_a_row <= 1:
            return 0.0
        return min(0.5 * 2.0 ** (self._deaths_in_a_row - 2), _LONGEST_BACKOFF_S)

    def _epitaph(self, died: GroupDied) -> StateChanged:
        if not self._was_ready:
            reason = died.message if died.fatal else f"could not start: {died}"
            return StateChanged(EngineState.FAILED, reason, died.exit_code)
        return StateChanged(EngineState.FAILED, f"died {self._deaths_in_a_row} times in a row, last: {died}", 1)
