"""Grammars for the text actor: compiled in processes of their own, kept by content.

    text actor ── compile ──► cached? under way? ──► quick lane ── took too long ──► slow lane ──► Grammar, or a refusal

Where it stands in the flow: the text actor asks for the grammar of a request beside its loop. A lane is one process
(`text/structured/nursery.py`) that takes one job at a time. The quick lane gives each 0.3 s and the slow one 2 s, so
nobody waits long behind grammars that mean ill: those meet again in the slow lane. What is known, a refusal too, waits
for nobody. Both lanes take so many and let nobody wait for longer than some seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib.util import find_spec

import msgspec

from minisgl_backend.errors import EngineUnavailable, InvalidRequest, UnsupportedFeature
from minisgl_backend.messages.sampling import Grammar
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.text.structured.nursery import (
    MEMORY_BYTES,
    Answer,
    Job,
    Vocabulary,
    read_frame,
    write_frame,
)
from minisgl_backend.text.structured.spec import GrammarSpec

QUICK_CPU_S, SLOW_CPU_S = 0.3, 2.0
MAX_WAITING = 64  # jobs of a lane
MAX_WAIT_S = 10.0  # for a job's turn in a lane
MAX_CACHE_BYTES = 64 << 20

_log = logging.getLogger(__name__)


class GrammarCompiler:
    """Owned by the text actor, called from its loop."""

    def __init__(self, token_bytes: Sequence[bytes], library: str = "xgrammar") -> None:
        """token_bytes: of every id what it adds to the text. library: the package without which there is none."""
        self._token_bytes = token_bytes
        self._installed = find_spec(library) is not None
        self._quick = _Lane("quick", token_bytes, QUICK_CPU_S)
        self._slow = _Lane("slow", token_bytes, SLOW_CPU_S)
        self._cache: OrderedDict[bytes, Answer] = OrderedDict()
        self._cache_bytes = 0
        self._under_way: dict[bytes, asyncio.Future[Answer]] = {}

    async def compile(self, spec: GrammarSpec, end_ids: Sequence[int]) -> Grammar:
        """end_ids: what ends an answer; not empty.

        Raises InvalidRequest or UnsupportedFeature naming the field of `spec`; EngineUnavailable when too many wait.
        """
        if not self._installed:
            raise UnsupportedFeature(spec.field, "this server has no grammar library: pip install xgrammar")
        key = self._key(spec)
        answer = self._cached(key)
        if answer is None:
            answer = await self._shared(key, spec)
        if answer.exceeded:
            raise InvalidRequest(spec.field, f"needs more than {SLOW_CPU_S:g} s or {MEMORY_BYTES >> 20} MiB to compile")
        if answer.fault:
            raise InvalidRequest(spec.field, answer.fault)
        return Grammar(key, answer.compiled, pack_tokens(end_ids), spec.json)

    def close(self) -> None:
        self._quick.close()
        self._slow.close()

    async def _shared(self, key: bytes, spec: GrammarSpec) -> Answer:
        """Those who ask for the same at a time share one job, which goes on when the first of them leaves."""
        future = self._under_way.get(key)
        if future is None:
            future = asyncio.ensure_future(self._compile(key, spec))
            self._under_way[key] = future
            future.add_done_callback(lambda done: self._done(key, done))
        return await asyncio.shield(future)

    def _done(self, key: bytes, future: asyncio.Future[Answer]) -> None:
        del self._under_way[key]
        if not future.cancelled():
            future.exception()  # told to those who wait, if any still do

    async def _compile(self, key: bytes, spec: GrammarSpec) -> Answer:
        answer = await self._quick.run(spec)
        if answer.exceeded:
            answer = await self._slow.run(spec)
        self._keep(key, answer)
        return answer

    def _cached(self, key: bytes) -> Answer | None:
        answer = self._cache.get(key)
        if answer is not None:
            self._cache.move_to_end(key)
        return answer

    def _keep(self, key: bytes, answer: Answer) -> None:
        self._cache[key] = answer
        self._cache_bytes += _bytes_of(answer)
        while self._cache_bytes > MAX_CACHE_BYTES:
            _, gone = self._cache.popitem(last=False)
            self._cache_bytes -= _bytes_of(gone)

    def _key(self, spec: GrammarSpec) -> bytes:
        content = f"{spec.kind}\0{spec.source}".encode()
        return hashlib.blake2b(content, digest_size=16, key=self._vocabulary_digest).digest()

    @cached_property
    def _vocabulary_digest(self) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for data in self._token_bytes:
            digest.update(len(data).to_bytes(4, "little") + data)
        return digest.digest()


def _bytes_of(answer: Answer) -> int:
    return len(answer.compiled) + len(answer.fault) + 256


class _Lane:
    """One nursery, started on its first job and again when it has ended, and a thread that talks with it."""

    def __init__(self, name: str, token_bytes: Sequence[bytes], cpu_s: float) -> None:
        self._token_bytes = token_bytes
        self._cpu_s = cpu_s
        self._thread = ThreadPoolExecutor(1, f"minisgl-grammar-{name}")
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting = 0
        self._closed = False

    async def run(self, spec: GrammarSpec) -> Answer:
        """Raises EngineUnavailable."""
        if self._waiting >= MAX_WAITING:
            raise EngineUnavailable(f"{spec.field}: too many wait for theirs to be compiled; try again later")
        self._waiting += 1
        try:
            latest_s = time.monotonic() + MAX_WAIT_S
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, spec, latest_s)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.kill()
        self._thread.shutdown(wait=True)
        self._end()

    def _answer(self, spec: GrammarSpec, latest_s: float) -> Answer:
        if time.monotonic() > latest_s:
            raise EngineUnavailable(f"{spec.field}: too many wait for theirs to be compiled; try again later")
        try:
            return self._ask(spec)
        except (OSError, msgspec.DecodeError) as error:
            self._end()
            if not self._closed:
                _log.error("a grammar could not be compiled: %s", error)
            raise EngineUnavailable(f"{spec.field}: it can not be compiled now; try again later") from None

    def _ask(self, spec: GrammarSpec) -> Answer:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        write_frame(process.stdin, Job(spec, self._cpu_s))
        frame = read_frame(process.stdout)
        if frame is None:
            raise OSError("its process has ended")
        return msgspec.msgpack.decode(frame, type=Answer)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "minisgl_backend.text.structured.nursery"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, cwd="/")
        assert self._process.stdin is not None
        write_frame(self._process.stdin, Vocabulary(list(self._token_bytes)))
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not yet written
                pipe.close()
