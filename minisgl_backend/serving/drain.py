"""The limit on answers in flight once the model is to leave: an unload, or the server's stop.

    Triton ◄── asks once a second, while requests are open ── Watch ── fails what is left after the limit ──► outbox

Where it stands in the flow: a thread of the bridge. Triton itself refuses new requests from the moment the unload
begins, and calls `finalize` after the last answer, however long that takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum

from minisgl_backend.serving.presence import Presence, read_presence
from minisgl_backend.serving.triton import Logger

PERIOD_S = 1.0
"""Between two questions to Triton."""


class Step(Enum):
    """What a Drain wants done."""

    NOTHING = "nothing"
    BEGUN = "begun"  # the model is leaving; told once
    OVER = "over"  # the limit has passed: end what is left; told once


class Drain:
    """When the limit has passed. Pure: time is an argument.

    An answer that can not be read changes nothing; a model that is wanted again gets the whole limit next time.
    """

    def __init__(self, limit_s: float, period_s: float = PERIOD_S) -> None:
        self._limit_s = limit_s
        self._period_s = period_s
        self._began: float | None = None
        self._over = False

    def saw(self, presence: Presence, now: float) -> Step:
        """Takes in one answer of the server."""
        if presence is Presence.LOADED:
            self._began, self._over = None, False
        elif presence is Presence.LEAVING and self._began is None:
            self._began = now
            return Step.BEGUN
        elif self._began is not None and not self._over and now >= self._began + self._limit_s:
            self._over = True
            return Step.OVER
        return Step.NOTHING

    def due_in(self, now: float) -> float:
        """Seconds until the next question: the period, or less where the limit passes earlier."""
        if self._began is None or self._over:
            return self._period_s
        return min(self._period_s, max(0.0, self._began + self._limit_s - now))


class Watch:
    """The thread. `is_busy` says whether requests are open, `end_all` ends them."""

    def __init__(
        self,
        ask: Callable[[], str],
        limit_s: float,
        log: Logger,
        name: str,
        is_busy: Callable[[], bool],
        end_all: Callable[[], None],
        period_s: float = PERIOD_S,
    ) -> None:
        """name: of the model, for its log."""
        self._ask = ask
        self._limit_s = limit_s
        self._drain = Drain(limit_s, period_s)
        self._log = log
        self._name = name
        self._is_busy = is_busy
        self._end_all = end_all
        self._stopped = threading.Event()
        self._puzzled = False
        self._thread = threading.Thread(target=self._run, name="minisgl-drain", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """False when the thread did not end in time: Triton owes it an answer. It is a daemon, the process can end."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopped.wait(self._drain.due_in(time.monotonic())):
            if self._is_busy():
                self._look()

    def _look(self) -> None:
        step = self._drain.saw(self._presence(), time.monotonic())
        if step is Step.BEGUN:
            self._log.log_info(f"{self._name}: unloading: answers in flight have {self._limit_s:g} s")
        elif step is Step.OVER:
            self._log.log_warn(f"{self._name}: unloading: answers still open after {self._limit_s:g} s are ended")
            self._end_all()

    def _presence(self) -> Presence:
        try:
            answer = self._ask()
        except Exception as error:  # of the stub, for example while finalize begins
            answer = repr(error)
        presence = read_presence(answer)
        if presence is Presence.UNKNOWN and not self._puzzled and not self._stopped.is_set():
            self._puzzled = True
            self._log.log_warn(
                f"{self._name}: an unload will wait for every answer in flight; Triton said: {answer[:300]!a}"
            )
        return presence
