"""Who inspects the engine gets the scheduler's answer to the own question, or none of the scheduler's at all."""

from __future__ import annotations

import asyncio

from minisgl_backend.actors.internal import EngineUp, FromHolder, HolderId, ToText
from minisgl_backend.actors.mailbox import LocalMailbox
from minisgl_backend.actors.text import TextActor
from minisgl_backend.config import EngineConfig
from minisgl_backend.messages.client import Inspect, Stats, ToHolder
from minisgl_backend.messages.engine import Gauges, Probe, TextToScheduler

ASKED = Gauges(waiting=1, running=2, free_slots=3, total_slots=5, free_pages=7, total_pages=11, steps=13)


class RecordingFront:
    """Hands on what is delivered, in order."""

    def __init__(self) -> None:
        self.delivered: asyncio.Queue[tuple[HolderId, ToHolder]] = asyncio.Queue()

    def deliver(self, holder: HolderId, message: ToHolder) -> None:
        self.delivered.put_nowait((holder, message))

    def give_up(self) -> None:
        raise AssertionError("the engine is well")


async def test_an_inspector_whose_question_the_scheduler_did_not_take_gets_nobody_elses_answer() -> None:
    inbox: LocalMailbox[ToText] = LocalMailbox(10)
    to_scheduler: LocalMailbox[TextToScheduler] = LocalMailbox(1)
    front = RecordingFront()

    async def answer() -> tuple[HolderId, int]:
        holder, stats = await asyncio.wait_for(front.delivered.get(), 60.0)
        assert isinstance(stats, Stats)
        return holder, stats.total_slots

    actor = asyncio.create_task(TextActor(EngineConfig(model="unread"), inbox, front).run())
    try:
        inbox.put(EngineUp(to_scheduler, 100, ()))
        to_scheduler.put(Probe())  # it is full: of what, is of no consequence
        inbox.put(FromHolder(HolderId(b"unheard"), Inspect()))
        assert await answer() == (b"unheard", 0)
        await to_scheduler.receive()
        inbox.put(FromHolder(HolderId(b"heard"), Inspect()))
        assert await to_scheduler.receive() == Probe()
        inbox.put(ASKED)
        assert await answer() == (b"heard", ASKED.total_slots)
    finally:
        actor.cancel()
        await asyncio.wait([actor])
