"""Grammars for the text actor: compiled in processes of their own, kept by content.

    text actor ── compile ──► cached? under way? ──► quick lane ── took too long ──► slow lane ──► Grammar, or a refusal

Where it stands in the flow: the text actor asks for the grammar of a request beside its loop. A lane is one process
(`text/structured/nursery.py`) that takes one job at a time. The quick lane gives each 0.3 s and the slow one 2 s, so
nobody waits long behind grammars that mean ill: those meet again in the slow lane. What is known, a refusal too, waits
for nobody. Both lanes take so many and let nobody wait for longer than some seconds from when their process has loaded:
on a busy machine a first grammar is late, not refused.

Kept is what follows from the grammar and the limits. A child that was killed, for its wall time or from outside, says
nothing about its grammar: that is tried again, but not at once, or one grammar sent again and again would hold a lane.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import msgspec

from minisgl_backend.errors import EngineUnavailable, InvalidRequest, UnsupportedFeature
from minisgl_backend.messages.sampling import Grammar
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.text.structured.nursery import (
    MEMORY_BYTES,
    Answer,
    Job,
    Loaded,
    Vocabulary,
    read_frame,
    write_frame,
)
from minisgl_backend.text.structured.spec import GrammarSpec

QUICK_CPU_S, SLOW_CPU_S = 0.3, 2.0
MAX_WAITING = 64  # jobs of a lane
MAX_WAIT_S = 10.0  # for a job's turn in a lane that has loaded
LOAD_S = 60.0  # for a process to load: a second of work, on a machine that may have no time
MAX_CACHE_BYTES = 64 << 20
RETRY_S = 30.0  # after a child was killed: until its grammar is tried again

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Postponed:
    """Nothing is known of the grammar: a clause for who asks, who may ask again."""

    why: str


Outcome = Answer | Postponed

_TOO_MANY = Postponed("too many wait for theirs to be compiled; try again later")
_TOO_LATE = Postponed(f"its turn to be compiled did not come within {MAX_WAIT_S:g} s; try again later")
_NOT_NOW = Postponed("it can not be compiled now; try again later")
_KILLED = Postponed("compiling it was broken off, as on a machine that has no time; try again in half a minute")


@dataclass(frozen=True, slots=True)
class _Kept:
    outcome: Outcome
    until_s: float  # on the clock

    @property
    def size(self) -> int:
        """Bytes, about."""
        own = len(self.outcome.compiled) + len(self.outcome.fault) if isinstance(self.outcome, Answer) else 0
        return own + 256


class GrammarCompiler:
    """Owned by the text actor, called from its loop."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        digest: bytes,
        tasks: asyncio.TaskGroup,
        *,
        lanes: tuple[Lane, Lane] | None = None,
        library: str = "xgrammar",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """token_bytes: of every id what it adds to the text. digest: their hash. tasks: where compilations live, which
        nobody may wait for any more. lanes: the quick and the slow one. library: the package without which there is
        none.
        """
        self._digest = digest
        self._tasks = tasks
        self._installed = find_spec(library) is not None
        self._clock = clock
        self._quick, self._slow = lanes or (
            Lane("quick", token_bytes, QUICK_CPU_S),
            Lane("slow", token_bytes, SLOW_CPU_S),
        )
        self._cache: OrderedDict[bytes, _Kept] = OrderedDict()
        self._cache_bytes = 0
        self._under_way: dict[bytes, asyncio.Task[Outcome]] = {}

    async def compile(self, spec: GrammarSpec, end_ids: Sequence[int]) -> Grammar:
        """end_ids: what ends an answer; not empty.

        Raises InvalidRequest or UnsupportedFeature naming the field of `spec`; EngineUnavailable when too many wait,
        when its turn did not come in time, or when its compilation was broken off.
        """
        if not self._installed:
            raise UnsupportedFeature(spec.field, "this server has no grammar library: pip install xgrammar")
        key = self._key(spec)
        outcome = self._known(key) or await self._shared(key, spec)
        if isinstance(outcome, Postponed):
            raise EngineUnavailable(f"{spec.field}: {outcome.why}")
        if outcome.exceeded:
            raise InvalidRequest(spec.field, f"needs more than {SLOW_CPU_S:g} s or {MEMORY_BYTES >> 20} MiB to compile")
        if outcome.fault:
            raise InvalidRequest(spec.field, outcome.fault)
        return Grammar(key, outcome.compiled, pack_tokens(end_ids), spec.json)

    def close(self) -> None:
        self._quick.close()
        self._slow.close()

    async def _shared(self, key: bytes, spec: GrammarSpec) -> Outcome:
        """Those who ask for the same at a time share one job, which goes on when the first of them leaves."""
        task = self._under_way.get(key)
        if task is None:
            task = self._tasks.create_task(self._compile(key, spec))
            self._under_way[key] = task
        return await asyncio.shield(task)

    async def _compile(self, key: bytes, spec: GrammarSpec) -> Outcome:
        try:
            outcome = await self._quick.run(spec)
            if isinstance(outcome, Answer) and outcome.exceeded:
                outcome = await self._slow.run(spec)
        except Exception:  # raised here it would end the text actor
            _log.exception("a grammar could not be compiled")
            outcome = _NOT_NOW
        finally:
            del self._under_way[key]
        if isinstance(outcome, Postponed):
            return outcome
        if outcome.killed:
            self._keep(key, _Kept(_KILLED, self._clock() + RETRY_S))
            return _KILLED
        self._keep(key, _Kept(outcome, math.inf))
        return outcome

    def _known(self, key: bytes) -> Outcome | None:
        kept = self._cache.get(key)
        if kept is None:
            return None
        if self._clock() >= kept.until_s:
            self._drop(key)
            return None
        self._cache.move_to_end(key)
        return kept.outcome

    def _keep(self, key: bytes, kept: _Kept) -> None:
        self._cache[key] = kept
        self._cache_bytes += kept.size
        while self._cache_bytes > MAX_CACHE_BYTES:
            self._drop(next(iter(self._cache)))

    def _drop(self, key: bytes) -> None:
        self._cache_bytes -= self._cache.pop(key).size

    def _key(self, spec: GrammarSpec) -> bytes:
        content = f"{spec.kind}\0{spec.source}".encode()
        return hashlib.blake2b(content, digest_size=16, key=self._digest).digest()


class Lane:
    """A nursery, started on the first job and again when it has ended, and a thread that talks with it."""

    def __init__(
        self,
        name: str,
        token_bytes: Sequence[bytes],
        cpu_s: float,
        *,
        nursery: Callable[[], Nursery] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """nursery: starts one; None: of the vocabulary."""
        self._cpu_s = cpu_s
        self._new_nursery = nursery or partial(Nursery, token_bytes)
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, f"minisgl-grammar-{name}")
        self._nursery: Nursery | None = None
        self._loaded_s = -math.inf  # on the clock, at last
        self._waiting = 0
        self._closed = False

    async def run(self, spec: GrammarSpec) -> Outcome:
        """Waits for its turn."""
        if self._waiting >= MAX_WAITING:
            return _TOO_MANY
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, spec, self._clock())
        finally:
            self._waiting -= 1

    def close(self) -> None:
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._nursery is not None:
            self._nursery.kill()
        self._thread.shutdown(wait=True)
        self._end()

    def _answer(self, spec: GrammarSpec, asked_s: float) -> Outcome:
        """In the thread. Who waits while the nursery loads waits for its turn only from then on."""
        if self._clock() > max(asked_s, self._loaded_s) + MAX_WAIT_S:
            return _TOO_LATE
        try:
            return self._loaded().ask(Job(spec, self._cpu_s))
        except (OSError, msgspec.DecodeError) as error:
            self._end()
            if not self._closed:
                _log.error("a grammar could not be compiled: %s", error)
            return _NOT_NOW

    def _loaded(self) -> Nursery:
        if self._nursery is None:
            self._nursery = self._new_nursery()  # from here on `close` may kill it
            self._nursery.load()
            self._loaded_s = self._clock()
        return self._nursery

    def _end(self) -> None:
        nursery, self._nursery = self._nursery, None
        if nursery is not None:
            nursery.end()


class Nursery:
    """A process of `text/structured/nursery.py`. Its methods wait, and raise OSError when it has ended."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """token_bytes: as GrammarCompiler's."""
        self._token_bytes = token_bytes
        command = [sys.executable, "-P", "-m", "minisgl_backend.text.structured.nursery"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, cwd="/")
        assert self._process.stdin is not None and self._process.stdout is not None
        self._jobs, self._answers = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self) -> None:
        """Once, before the first job. For LOAD_S at most."""
        limit = threading.Timer(LOAD_S, self.kill)
        limit.daemon = True
        limit.start()
        try:
            write_frame(self._jobs, Vocabulary(list(self._token_bytes)))
            msgspec.msgpack.decode(self._read(), type=Loaded)
        finally:
            limit.cancel()

    def ask(self, job: Job) -> Answer:
        write_frame(self._jobs, job)
        return msgspec.msgpack.decode(self._read(), type=Answer)

    def kill(self) -> None:
        """From any thread."""
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._jobs, self._answers):
            with contextlib.suppress(OSError):  # what was not yet written
                pipe.close()

    def _read(self) -> bytes:
        frame = read_frame(self._answers)
        if frame is None:
            raise OSError("its process has ended")
        return frame
