"""A compiler of grammars for one test: with its processes, with lanes that answer by a script, or without a process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any

from minisgl_backend.actors.grammars import GrammarCompiler, Lane, Nursery, Outcome
from minisgl_backend.text.structured.nursery import Answer, Job
from minisgl_backend.text.structured.spec import GrammarSpec
from minisgl_backend.text.tokenizer import vocabulary_digest


@asynccontextmanager
async def grammar_compiler(token_bytes: Sequence[bytes], **settings: Any) -> AsyncIterator[GrammarCompiler]:
    """What is under way at the end is given up. settings: of GrammarCompiler."""
    async with asyncio.TaskGroup() as tasks:
        with closing(GrammarCompiler(token_bytes, vocabulary_digest(token_bytes), tasks, **settings)) as compiler:
            yield compiler


class ScriptedLane(Lane):
    """Answers in turn what it is given, and remembers what it was asked."""

    def __init__(self, outcomes: Iterable[Outcome] = ()) -> None:
        super().__init__("scripted", (), 0.0)
        self.asked: list[str] = []
        self._outcomes = iter(outcomes)

    async def run(self, spec: GrammarSpec) -> Outcome:
        self.asked.append(spec.source)
        return next(self._outcomes)


class FakeNursery(Nursery):
    """No process. Loads when it may, and everything takes as long as the test says."""

    def __init__(self, load: Callable[[], None], ask: Callable[[Job], Answer]) -> None:
        self.may_load = threading.Event()
        self.ended = False
        self._load = load
        self._ask = ask

    def load(self) -> None:
        self.may_load.wait()
        self._load()

    def ask(self, job: Job) -> Answer:
        return self._ask(job)

    def kill(self) -> None:
        self.may_load.set()

    def end(self) -> None:
        self.ended = True
