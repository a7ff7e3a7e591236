"""The engine without Triton: `LLM(model=…).generate(prompts)` for scripts, tests and benchmarks.

    caller's thread ── Request, Cancel ──►  text actor (in this object's own thread) ◄──► scheduler ◄──► workers
    caller's thread ◄── Outputs ──────────

The very same actors as behind Triton; only the door is missing. By default scheduler and worker run in processes of
their own; `executor="inline"` keeps everything in this one.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from tqdm import tqdm

from minisgl_backend.actors.host import TEXT_CAPACITY, engine
from minisgl_backend.actors.internal import FromHolder, HolderId, ToText
from minisgl_backend.actors.loop_thread import LoopThread
from minisgl_backend.actors.mailbox import LocalMailbox
from minisgl_backend.actors.rundir import runtime_root
from minisgl_backend.answers import Completion, Piece, Pieces, Prompt, completion
from minisgl_backend.config import resolve_config
from minisgl_backend.errors import InvalidRequest, RequestError, StartError, Status, error_of
from minisgl_backend.messages.client import (
    PROTOCOL,
    Cancel,
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
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.text.parameters import MAX_N, SamplingParams

_LONG_WORK = 16
"""From this many prompts on, `generate` shows a progress bar unless told otherwise."""

_ME = HolderId(b"llm")

Tools = Sequence[Mapping[str, Any]]
"""Functions as OpenAI's API writes them: {"type": "function", "function": {"name": …, "parameters": …}}."""


class Room:
    """Places for sequences. Who needs several gets them together, so that two who wait never hold what both need."""

    def __init__(self, places: int) -> None:
        self._most = places
        self._free = places
        self._changed = threading.Condition()
        self._closed = False

    def take(self, places: int, wait: bool) -> bool:
        """False: not now. More than there are is taken when all are free. At once after `close`."""
        places = min(places, self._most)
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._closed or self._free >= places)
            elif not self._closed and self._free < places:
                return False
            self._free -= places
            return True

    def give_back(self, places: int) -> None:
        with self._changed:
            self._free += min(places, self._most)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What the prompts of a call have in common beside their parameters."""

    stream: bool
    tools: bytes | None  # JSON
    parse_output: bool


class LLM:
    """An engine of one's own. Use as a context manager, or call `close`.

    `settings` are those of docs/configuration.md. Raises StartError when the engine can not start. Methods may be
    called from several threads. Errors of requests are raised as errors.RequestError.
    """

    def __init__(self, model: str | Path = "smollm2", **settings: Any) -> None:
        self._config = resolve_config({"model": str(model)}, settings)
        self._ids = count(1)
        self._boxes: dict[RequestId, queue.SimpleQueue[Output]] = {}
        self._room = Room(self._config.queue_limit + self._config.max_running)  # sequences that the engine takes
        self._taken: dict[RequestId, int] = {}  # of the room
        self._stats: queue.SimpleQueue[Stats | None] = queue.SimpleQueue()  # None: there will be no more
        self._ready: Future[None] = Future()
        self._inbox: LocalMailbox[ToText] | None = None
        self._thread = LoopThread("minisgl-llm", self._live, self._at_end)
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Tools | None = None,
        parse_output: bool = False,
        progress: bool | None = None,
    ) -> list[Completion]:
        """One answer per prompt, in the order of the prompts. A refused prompt raises; the others are then cancelled.

        prompts: one prompt, or a list of them. A list of ints is one prompt of token ids, a list of messages one chat.
        sampling_params: for all prompts, or one for each. tools: of chats, for their template. parse_output: of chats,
        their answers have `reasoning` and `tool_calls`, and `text` is the content alone (docs/chat.md). progress: a
        bar; by default on long work only.
        """
        asked = _Asked(stream=False, tools=_tools_json(tools), parse_output=parse_output)
        each = _list_of_prompts(prompts)
        params = _one_each(sampling_params, len(each))
        bar = tqdm(
            total=len(each), unit="prompt", disable=not (len(each) >= _LONG_WORK if progress is None else progress)
        )
        done: dict[int, Completion] = {}
        parts: dict[RequestId, list[Output]] = {}
        waiting = list(enumerate(zip(each, params, strict=True)))[::-1]
        answers: queue.SimpleQueue[Output] = queue.SimpleQueue()
        running: dict[RequestId, int] = {}
        try:
            while waiting or running:
                while waiting and self._room.take(_size(waiting[-1][1][1]), wait=not running):
                    index, (prompt, param) = waiting.pop()
                    running[self._submit(prompt, param, asked, answers)] = index
                output = answers.get()
                parts.setdefault(output.id, []).append(output)
                if not isinstance(output, Finished | Failed):
                    continue
                index = running.pop(output.id)
                done[index] = completion(each[index], parts.pop(output.id))
                bar.update()
        finally:
            bar.close()
            for id in running:
                self._forget(id)
        return [done[index] for index in range(len(each))]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Tools | None = None,
        parse_output: bool = False,
    ) -> Iterator[Piece]:
        """The answer piece by piece; arguments as of `generate`. Leaving the iterator early cancels the request."""
        asked = _Asked(stream=True, tools=_tools_json(tools), parse_output=parse_output)
        box: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self._room.take(_size(sampling_params), wait=True)
        id = self._submit(prompt, sampling_params, asked, box)
        pieces = Pieces()
        try:
            while True:
                output = box.get()
                if (piece := pieces.take(output)) is not None:
                    yield piece
                if isinstance(output, Finished):
                    return
        finally:
            self._forget(id)

    def stats(self) -> Stats:
        """What the engine holds at this moment."""
        self._post(Inspect())
        if (stats := self._stats.get()) is None:
            self._stats.put(None)
            raise _closed()
        return stats

    def close(self) -> None:
        """Ends the engine and its processes. Idempotent. Requests still open raise RequestCancelled."""
        self._thread.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ── towards the engine ───────────────────────────────────────────────────────────────────────────────────────

    def _submit(
        self, prompt: Prompt, params: SamplingParams | None, asked: _Asked, box: queue.SimpleQueue[Output]
    ) -> RequestId:
        """The caller has taken of `_room`; the terminal output gives it back."""
        id = RequestId(next(self._ids))
        self._taken[id] = _size(params)
        try:
            request = _request(id, prompt, params, asked)
            self._boxes[id] = box
            self._post(request)
        except BaseException:
            self._boxes.pop(id, None)
            self._room.give_back(self._taken.pop(id))
            raise
        return id

    def _forget(self, id: RequestId) -> None:
        if self._boxes.pop(id, None) is not None:
            self._thread.call(self._put, Cancel(id))

    def _post(self, message: Request | Inspect) -> None:
        if not self._thread.call(self._put, message):
            raise _closed()

    # ── in the engine's thread ───────────────────────────────────────────────────────────────────────────────────

    def _put(self, message: Request | Cancel | Inspect) -> None:
        if self._inbox is not None:  # our own bound is far below the mailbox's, so `post` passes no bound
            self._inbox.post(FromHolder(_ME, message))

    def _at_end(self, error: BaseException | None) -> None:
        if not self._ready.done():
            self._ready.set_exception(error or _closed())
        reason = str(_closed()) if error is None else f"the engine broke: {error!r}"
        for id, box in list(self._boxes.items()):
            box.put(Failed(id, Status.CANCELLED, reason))
        self._stats.put(None)
        self._room.close()  # whoever waits for room is woken, and finds us closed

    async def _live(self) -> None:
        with tempfile.TemporaryDirectory(prefix="llm-", dir=runtime_root()) as run_dir:
            inbox = self._inbox = LocalMailbox(TEXT_CAPACITY)
            async with engine(self._config, self, inbox, Path(run_dir)):
                inbox.put(FromHolder(_ME, Hello(PROTOCOL, os.getpid(), lease=True)))
                await asyncio.get_running_loop().create_future()  # until close()

    def deliver(self, holder: HolderId, message: ToHolder) -> None:
        """The text actor's way back to us (a Front)."""
        if isinstance(message, Outputs):
            for output in message.items:
                box = self._boxes.get(output.id)
                if isinstance(output, Finished | Failed):
                    self._boxes.pop(output.id, None)
                    self._room.give_back(self._taken.pop(output.id))
                if box is not None:
                    box.put(output)
        elif isinstance(message, Stats):
            self._stats.put(message)
        else:
            self._heed(message.health if isinstance(message, Welcome) else message)

    def give_up(self) -> None:
        """FAILED is final; our caller is told by deliver()."""

    def _heed(self, health: Health) -> None:
        if self._ready.done():
            return
        if health.state is EngineState.READY:
            self._ready.set_result(None)
        elif health.state is EngineState.FAILED:
            error = StartError(health.detail)
            error.exit_code = health.exit_code
            self._ready.set_exception(error)


def _closed() -> RequestError:
    return error_of(Status.CANCELLED, "this LLM is closed")


def _list_of_prompts(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int | Mapping)):
        return [prompts]
    return list(prompts)


def _tools_json(tools: Tools | None) -> bytes | None:
    return None if tools is None else _json("tools", tools)


def _json(field: str, value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequest(field, "must be values that JSON can hold") from None


def _request(id: RequestId, prompt: Prompt, params: SamplingParams | None, asked: _Asked) -> Request:
    """What is no prompt of the three kinds, or can not be written as one, is refused by name, here or by text/."""
    text = ids = chat = None
    if isinstance(prompt, str):
        text = prompt.encode("utf-8", "surrogatepass")  # a lone surrogate is handed on, for text/ to refuse
    elif prompt and isinstance(prompt[0], Mapping):
        chat = _json("messages", prompt)
    else:
        try:
            ids = pack_tokens(cast(Sequence[int], prompt))
        except (TypeError, OverflowError):
            raise InvalidRequest("input_ids", "must be a list of integers from 0 to 2**31 - 1") from None
    return Request(
        id,
        text,
        b"" if params is None else params.to_json(),
        asked.stream,
        exclude_input_in_output=None if params is not None and params.echo else True,  # echo says it alone
        input_ids=ids,
        messages=chat,
        tools=asked.tools,
        parse_output=asked.parse_output,
    )


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, number: int) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * number
    if len(params) != number:
        raise ValueError(f"sampling_params: {len(params)} for {number} prompts")
    return list(params)


def _size(params: SamplingParams | None) -> int:
    """Sequences of a request. What n may not be is refused by text/."""
    n = 1 if params is None else params.n
    return n if isinstance(n, int) and 1 <= n <= MAX_N else 1
