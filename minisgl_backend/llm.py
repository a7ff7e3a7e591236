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
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import msgspec
from tqdm import tqdm

from minisgl_backend.actors.host import TEXT_CAPACITY, engine
from minisgl_backend.actors.internal import FromHolder, HolderId, ToText
from minisgl_backend.actors.loop_thread import LoopThread
from minisgl_backend.actors.mailbox import LocalMailbox
from minisgl_backend.actors.rundir import runtime_root
from minisgl_backend.config import resolve_config
from minisgl_backend.errors import InvalidRequest, RequestError, StartError, Status, error_of
from minisgl_backend.messages.client import (
    PROTOCOL,
    Cancel,
    EngineState,
    Failed,
    Finished,
    FinishReason,
    Health,
    Hello,
    Inspect,
    Output,
    Outputs,
    Request,
    Started,
    Stats,
    ToHolder,
    Welcome,
)
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.messages.tokens import pack_tokens, unpack_tokens
from minisgl_backend.text.parameters import SamplingParams

_LONG_WORK = 16
"""From this many prompts on, `generate` shows a progress bar unless told otherwise."""

_ME = HolderId(b"llm")

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or a chat: a list of messages such as {"role": "user", "content": "Hi"}."""


class Piece(msgspec.Struct, frozen=True):
    """A part of a streamed answer. Joined, the texts are the answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None  # set on the last piece


class Completion(msgspec.Struct, frozen=True):
    """A whole answer."""

    prompt: Prompt  # as it was given
    text: str
    token_ids: tuple[int, ...]  # an end-of-sequence token that ended the answer is included
    finish_reason: FinishReason
    num_input_tokens: int
    num_output_tokens: int


class LLM:
    """An engine of one's own. Use as a context manager, or call `close`.

    `settings` are those of docs/configuration.md. Raises StartError when the engine can not start. Methods may be
    called from several threads. Errors of requests are raised as errors.RequestError.
    """

    def __init__(self, model: str | Path = "smollm2", **settings: Any) -> None:
        self._config = resolve_config({"model": str(model)}, settings)
        self._ids = count(1)
        self._boxes: dict[RequestId, queue.SimpleQueue[Output]] = {}
        self._room = threading.Semaphore(self._config.queue_limit + self._config.max_running)  # what the engine takes
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
        progress: bool | None = None,
    ) -> list[Completion]:
        """One answer per prompt, in the order of the prompts. A refused prompt raises; the others are then cancelled.

        prompts: one prompt, or a list of them. A list of ints is one prompt of token ids, a list of messages one chat.
        sampling_params: for all prompts, or one for each. progress: a bar; by default on long work only.
        """
        each = _list_of_prompts(prompts)
        params = _one_each(sampling_params, len(each))
        bar = tqdm(
            total=len(each), unit="prompt", disable=not (len(each) >= _LONG_WORK if progress is None else progress)
        )
        done: dict[int, Completion] = {}
        waiting = list(enumerate(zip(each, params, strict=True)))[::-1]
        answers: queue.SimpleQueue[Output] = queue.SimpleQueue()
        running: dict[RequestId, int] = {}
        try:
            while waiting or running:
                while waiting and self._room.acquire(blocking=not running):
                    index, (prompt, param) = waiting.pop()
                    running[self._submit(prompt, param, stream=False, box=answers)] = index
                output = answers.get()
                if isinstance(output, Started):
                    continue
                index = running.pop(output.id)
                done[index] = _completion(each[index], output)
                bar.update()
        finally:
            bar.close()
            for id in running:
                self._forget(id)
        return [done[index] for index in range(len(each))]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Piece]:
        """The answer piece by piece. Leaving the iterator early cancels the request."""
        box: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self._room.acquire()
        id = self._submit(prompt, sampling_params or SamplingParams(), stream=True, box=box)
        try:
            while True:
                output = box.get()
                if isinstance(output, Failed):
                    raise error_of(output.status, output.message)
                if isinstance(output, Started):
                    continue
                reason = output.reason if isinstance(output, Finished) else None
                yield Piece(output.text, tuple(unpack_tokens(output.tokens)), reason)
                if reason is not None:
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
        self, prompt: Prompt, params: SamplingParams, *, stream: bool, box: queue.SimpleQueue[Output]
    ) -> RequestId:
        """The caller has acquired `_room`; the terminal output gives it back."""
        try:
            id = RequestId(next(self._ids))
            request = _request(id, prompt, params, stream)
            self._boxes[id] = box
            self._post(request)
        except BaseException:
            self._boxes.pop(id, None)
            self._room.release()
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
        self._room.release()  # whoever waits for room is woken, finds us closed, and passes it on

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
                    self._room.release()
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


def _request(id: RequestId, prompt: Prompt, params: SamplingParams, stream: bool) -> Request:
    """What is no prompt of the three kinds, or can not be written as one, is refused by name, here or by text/."""
    text = ids = chat = None
    if isinstance(prompt, str):
        text = prompt.encode("utf-8", "surrogatepass")  # a lone surrogate is handed on, for text/ to refuse
    elif prompt and isinstance(prompt[0], Mapping):
        try:
            chat = json.dumps(prompt).encode()
        except (TypeError, ValueError, RecursionError):
            raise InvalidRequest("messages", "must be values that JSON can hold") from None
    else:
        try:
            ids = pack_tokens(cast(Sequence[int], prompt))
        except (TypeError, OverflowError):
            raise InvalidRequest("input_ids", "must be a list of integers from 0 to 2**31 - 1") from None
    return Request(id, text, params.to_json(), stream, exclude_input_in_output=True, input_ids=ids, messages=chat)


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, number: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * number
    if len(params) != number:
        raise ValueError(f"sampling_params: {len(params)} for {number} prompts")
    return list(params)


def _completion(prompt: Prompt, output: Output) -> Completion:
    if isinstance(output, Failed):
        raise error_of(output.status, output.message)
    assert isinstance(output, Finished), output
    ids = tuple(unpack_tokens(output.tokens))
    return Completion(prompt, output.text, ids, output.reason, output.num_input_tokens, output.num_output_tokens)
