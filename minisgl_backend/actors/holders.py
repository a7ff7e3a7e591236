"""Who holds the engine, and what all of them are told of it: its state, and to who asks its stats.

Where it stands in the flow: owned by the text actor, which knows when the state changes; the front delivers.
"""

from __future__ import annotations

import os

from minisgl_backend.actors.internal import Front, HolderId
from minisgl_backend.messages.client import PROTOCOL, EngineState, Health, Hello, Stats, Welcome


class Holders:
    """Owns the health of the engine, as it was last told."""

    def __init__(self, front: Front) -> None:
        self.health = Health(EngineState.STARTING, "starting")
        self._front = front
        self._holders: dict[HolderId, None] = {}  # in order of arrival
        self._inspectors: list[HolderId] = []  # that wait for an answer, in order

    def hello(self, holder: HolderId, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            problem = f"the engine speaks protocol {PROTOCOL}, its client {hello.protocol}: two versions are installed"
            self._front.deliver(holder, Welcome(PROTOCOL, os.getpid(), Health(EngineState.FAILED, problem, 2)))
            return
        if hello.lease:
            self._holders[holder] = None
        self._front.deliver(holder, Welcome(PROTOCOL, os.getpid(), self.health))

    def gone(self, holder: HolderId) -> None:
        self._holders.pop(holder, None)

    def tell(self, health: Health) -> None:
        """A new state, or a line of progress."""
        self.health = health
        for holder in list(self._holders):
            self._front.deliver(holder, health)
        if health.state is EngineState.FAILED:
            self._front.give_up()

    def inspects(self, holder: HolderId) -> None:
        """Waits for the next stats that nobody before waits for."""
        self._inspectors.append(holder)

    @property
    def is_inspected(self) -> bool:
        return bool(self._inspectors)

    def answer(self, stats: Stats) -> None:
        """The first of those who wait."""
        self._front.deliver(self._inspectors.pop(0), stats)
