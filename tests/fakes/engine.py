"""All actors of an engine in one loop, over a fake device: for the simulation tests.

The text actor, the supervisor, the scheduler actor and the worker actor are the real ones. Fake are the device (next
token = hash of all tokens before it, read through the page table), the way to the holders, and time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from minisgl_backend.actors.executors.build import make_scheduler
from minisgl_backend.actors.executors.inline import InlineExecutor
from minisgl_backend.actors.host import load_text_side
from minisgl_backend.actors.internal import FromHolder, HolderGone, HolderId, ToText
from minisgl_backend.actors.mailbox import LocalMailbox
from minisgl_backend.actors.supervisor import Supervisor
from minisgl_backend.actors.text import TextActor
from minisgl_backend.actors.worker import Outcome, in_place
from minisgl_backend.config import EngineConfig, resolve_config
from minisgl_backend.messages.client import (
    PROTOCOL,
    TERMINAL,
    Answered,
    Cancel,
    Chunk,
    EngineState,
    Failed,
    Finished,
    Health,
    Hello,
    Inspect,
    Output,
    Outputs,
    Request,
    Stats,
    ToHolder,
    Welcome,
)
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.messages.plan import BatchPlan
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.worker.fake import FakeRunner
from minisgl_backend.worker.runner import StepRunner

Hook = Callable[[BatchPlan], Awaitable[None]]


class FakeRank:
    """A rank on the fake device. `hook` runs before each step: it may wait (a delay) or raise (a death)."""

    def __init__(self, runner: StepRunner, hook: Hook | None) -> None:
        self.num_pages = runner.num_pages
        self.closed = False
        self._compute = in_place(runner.launch)
        self._hook = hook

    async def compute(self, plan: BatchPlan) -> Outcome:
        if self._hook is not None:
            await self._hook(plan)
        return await self._compute(plan)

    def close(self) -> None:
        self.closed = True


class Holder:
    """A holder of a lease in a test: keeps all it is sent and lets the test wait for it."""

    def __init__(self, engine: FakeEngine, name: bytes) -> None:
        self.id = HolderId(name)
        self.healths: list[Health] = []
        self.outputs: dict[RequestId, list[Output]] = {}
        self._engine = engine
        self._stats: asyncio.Queue[Stats] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._ids = count(1)

    def request(self, text: str | bytes, *, stream: bool = True, **parameters: Any) -> RequestId:
        id = RequestId(next(self._ids))
        self.outputs[id] = []
        raw = text.encode() if isinstance(text, str) else text
        self.send(Request(id, raw, json.dumps(parameters).encode(), stream, True))
        return id

    def ask(self, operation: str, **fields: Any) -> RequestId:
        """A request that names an operation."""
        id = RequestId(next(self._ids))
        self.outputs[id] = []
        self.send(Request(id, fields.pop("text_input", None), b"", False, None, operation=operation.encode(), **fields))
        return id

    def cancel(self, id: RequestId) -> None:
        self.send(Cancel(id))

    def send(self, message: Hello | Request | Cancel | Inspect) -> None:
        self._engine.inbox.put(FromHolder(self.id, message))

    def leave(self) -> None:
        self._engine.inbox.put(HolderGone(self.id))

    async def stats(self) -> Stats:
        self.send(Inspect())
        return await self._stats.get()

    async def idle(self) -> Stats:
        """Waits until the engine holds nothing: every slot and page back."""
        while True:
            stats = await self.stats()
            if not (stats.open_requests or stats.waiting or stats.running) and stats.free_pages == stats.total_pages:
                return stats

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def answer(self, id: RequestId) -> Finished | Failed:
        """The terminal answer of a generation, or of an operation that fails."""
        await self.until(lambda: self.ended(id))
        last = self.outputs[id][-1]
        assert isinstance(last, Finished | Failed)
        return last

    async def result(self, id: RequestId) -> Any:
        """Of an operation that must succeed; it has one output."""
        await self.until(lambda: self.ended(id))
        (only,) = self.outputs[id]
        assert isinstance(only, Answered), only
        return json.loads(only.result)

    async def text(self, id: RequestId) -> str:
        """The joined answer of a request that must end well."""
        last = await self.answer(id)
        assert isinstance(last, Finished), last
        return "".join(output.text for output in self.outputs[id] if isinstance(output, Chunk | Finished))

    def ended(self, id: RequestId) -> bool:
        return bool(self.outputs[id]) and isinstance(self.outputs[id][-1], TERMINAL)

    async def state(self, state: EngineState) -> Health:
        await self.until(lambda: any(health.state is state for health in self.healths))
        return next(health for health in self.healths if health.state is state)

    def take(self, message: ToHolder) -> None:
        if isinstance(message, Outputs):
            for output in message.items:
                assert not self.ended(output.id), f"{output} after the terminal answer"
                self.outputs[output.id].append(output)
        elif isinstance(message, Stats):
            self._stats.put_nowait(message)
        else:
            self.healths.append(message.health if isinstance(message, Welcome) else message)
        self._changed.set()


class FakeEngine:
    """The front (way back to the holders) and the handles of one simulated engine."""

    def __init__(self, config: EngineConfig, num_pages: int) -> None:
        self.config = config
        self._num_pages = num_pages
        self.inbox: LocalMailbox[ToText] = LocalMailbox(1 << 16)
        self.ranks: list[FakeRank] = []
        self.schedulers: list[Scheduler] = []  # of each group, the last one of the present
        self.gave_up = False
        self.text: TextActor | None = None
        self.backoffs: list[float] = []
        self._holders: dict[HolderId, Holder] = {}

    def holder(self, name: bytes = b"holder") -> Holder:
        holder = Holder(self, name)
        self._holders[holder.id] = holder
        holder.send(Hello(PROTOCOL, 0, lease=True))
        return holder

    def runner(self) -> FakeRunner:
        return FakeRunner(self.config, num_pages=self._num_pages, vocabulary=range(20, 300))

    def deliver(self, holder: HolderId, message: ToHolder) -> None:
        self._holders[holder].take(message)

    def give_up(self) -> None:
        self.gave_up = True

    async def wait(self, seconds: float) -> None:
        """The supervisor's patience, without the patience."""
        self.backoffs.append(seconds)
        await asyncio.sleep(0)


@asynccontextmanager
async def fake_engine(
    model: Path,
    *,
    hook: Hook | None = None,
    build: Callable[[FakeEngine], StepRunner] | None = None,
    ready: bool = True,
    num_pages: int = 64,
    patience_s: float = 120,
    **settings: Any,
) -> AsyncIterator[FakeEngine]:
    """A simulated engine. hook: see FakeRank. build: makes the runner (may raise, to simulate a failing start).
    ready: begin the body when the engine is READY. patience_s: for the whole body.
    """
    config = resolve_config({"model": str(model), "device": "fake", "executor": "inline"}, settings)
    fake = FakeEngine(config, num_pages)

    def build_rank(say: Callable[[str], None]) -> FakeRank:
        fake.ranks.append(FakeRank((build or FakeEngine.runner)(fake), hook))
        return fake.ranks[-1]

    def make(pages: int) -> Scheduler:
        fake.schedulers.append(make_scheduler(config, pages, 1024))
        return fake.schedulers[-1]

    async def wait(seconds: float) -> None:
        await fake.wait(seconds)  # as it is then: a test may put another in its place

    executor = InlineExecutor(build_rank, make)
    supervisor = Supervisor(
        executor, fake.inbox, page_size=config.page_size, max_restarts=config.max_restarts, wait=wait
    )
    async with asyncio.timeout(patience_s):
        async with asyncio.TaskGroup() as tasks:
            await load_text_side(config, fake.inbox, model)
            fake.text = TextActor(config, fake.inbox, fake)
            running = [
                tasks.create_task(fake.text.run()),
                tasks.create_task(supervisor.run()),
            ]
            try:
                if ready:
                    await fake.holder(b"first").state(EngineState.READY)
                yield fake
            finally:
                for task in running:
                    task.cancel()
