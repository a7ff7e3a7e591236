"""The text actor: owns every open request from its arrival to its one terminal answer.

    holder ── Request, Cancel ──►  (this)  ── Sequence, Samples, Abort, Look ──►  scheduler
    holder ◄── Outputs, Health ──  (this)  ◄── Progress, Gauges, View ──────────  scheduler

Texts become tokens here and tokens become text (text/). A request ends for the first of these reasons: the scheduler
says so (end token, length), its holder cancels or is gone, the engine dies. The record is then closed and answered;
what the scheduler still says of its sequence is ignored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial

from minisgl_backend.actors.engine_view import NO_VIEW, EngineView
from minisgl_backend.actors.holders import Holders
from minisgl_backend.actors.internal import (
    EngineDown,
    EngineUp,
    FromHolder,
    Front,
    HolderGone,
    HolderId,
    Loaded,
    Overdue,
    StateChanged,
    Tokenised,
    ToText,
)
from minisgl_backend.actors.mailbox import LocalMailbox, Undeliverable
from minisgl_backend.actors.open_request import Memory, OpenRequest
from minisgl_backend.actors.preparation import Preparation, is_long, tokenise_now
from minisgl_backend.actors.rates import Rates
from minisgl_backend.actors.resumption import Resumption
from minisgl_backend.actors.stats import NO_GAUGES, stats_of
from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import EngineUnavailable, QueueFull, RequestError, Status
from minisgl_backend.messages.client import (
    Answered,
    Cancel,
    EngineState,
    Failed,
    Health,
    Hello,
    Inspect,
    Output,
    Outputs,
    Request,
    Stats,
)
from minisgl_backend.messages.engine import Abort, EndReason, Gauges, Probe, Progress, TextToScheduler, View
from minisgl_backend.messages.ids import RequestId, SequenceId
from minisgl_backend.text import operations
from minisgl_backend.text.limits import RequestLimits, limits_of
from minisgl_backend.text.parameters import SamplingParams
from minisgl_backend.text.parsing import parser_names
from minisgl_backend.text.record import Record
from minisgl_backend.text.request import Accepted, check_request
from minisgl_backend.text.tokenizer import Tokenizer

_MESSAGES_A_FLUSH = 32
"""A burst of requests must not keep the tokens of running streams back."""

Work = Callable[[], Awaitable[Accepted | bytes | RequestError]]
_log = logging.getLogger(__name__)


class TextActor:
    """One inbox, one loop; everything below is its state and nobody else's."""

    def __init__(self, config: EngineConfig, inbox: LocalMailbox[ToText], front: Front) -> None:
        self._config = config
        self._inbox = inbox
        self._front = front
        self._tokenizer: Tokenizer | None = None
        self._context_tokens = 0
        self._defaults = SamplingParams()
        self._limits: RequestLimits | None = None
        self._engine: EngineUp | None = None
        self._holders = Holders(front)
        self._open: dict[SequenceId, OpenRequest] = {}  # by each sequence
        self._by_request: dict[tuple[HolderId, RequestId], SequenceId] = {}
        self._touched: dict[SequenceId, None] = {}  # records with something to say, in order
        self._behind: dict[SequenceId, None] = {}  # records with something to write, the next one first
        self._outputs: dict[HolderId, list[Output]] = {}
        self._resumption = Resumption()  # of nobody, unless the setting resume_on_restart is on
        self._rates = Rates()
        self._view = EngineView(self._rates, config.page_size, shows_prompts=config.show_prompts_in_engine_view)
        self._next_sequence = 1
        self._starts = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._preparation: Preparation | None = None

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            with closing(Preparation(self._tasks)) as self._preparation:
                await self._live()

    async def _live(self) -> None:
        while True:
            if not self._behind:
                self._take(await self._inbox.receive())
            for _ in range(_MESSAGES_A_FLUSH - 1):
                message = self._inbox.receive_nowait()
                if message is None:
                    break
                self._take(message)
            self._write_some()
            self._flush()
            await asyncio.sleep(0)  # a full inbox never makes us wait: the loop must turn all the same

    def _take(self, message: ToText) -> None:
        if isinstance(message, Progress):
            self._on_progress(message)
        elif isinstance(message, FromHolder):
            self._on_holder(message.holder, message.message)
        elif isinstance(message, Tokenised):
            self._on_tokenised(message)
        elif isinstance(message, HolderGone):
            self._on_holder_gone(message.holder)
        elif isinstance(message, Loaded):
            self._tokenizer, self._context_tokens = message.tokenizer, message.context_tokens
            self._defaults = message.defaults
            self._ready_when_complete()
        elif isinstance(message, EngineUp):
            self._starts += 1
            self._engine = message
            self._ready_when_complete()
            self._resume()
        elif isinstance(message, EngineDown):
            self._on_engine_down()
        elif isinstance(message, Overdue):
            self._on_overdue(message)
        elif isinstance(message, StateChanged):
            self._on_state(message)
        elif isinstance(message, View):
            self._show(message)
        else:
            self._on_gauges(message)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_holder(self, holder: HolderId, message: Hello | Request | Cancel | Inspect) -> None:
        if isinstance(message, Request):
            self._on_request(holder, message)
        elif isinstance(message, Cancel):
            sequence = self._by_request.get((holder, message.id))
            if sequence is not None:
                self._end(sequence, Status.CANCELLED, "the request was cancelled")
        elif isinstance(message, Inspect):
            self._on_inspect(holder)
        else:
            self._holders.hello(holder, message)

    def _on_request(self, holder: HolderId, request: Request) -> None:
        if (holder, request.id) in self._by_request:
            _log.error("a holder used the request id %d twice", request.id)
            return
        sequence = SequenceId(self._next_sequence)
        self._next_sequence += 1
        self._open[sequence] = OpenRequest(holder, request.id, sequence, time.monotonic())
        self._by_request[holder, request.id] = sequence
        try:
            if request.operation is not None:
                self._on_operation(sequence, request)
                return
            limits, tokenizer = self._admit()
            checked = check_request(request, tokenizer, limits)
            if checked.params.n > 1:
                self._add_samples(self._open[sequence], checked.params.n)
                self._refuse_full(limits)
            if is_long(checked):
                assert self._preparation is not None
                self._work_beside(sequence, partial(self._preparation.prepare, checked, tokenizer, limits))
            else:
                self._start(sequence, tokenise_now(checked, tokenizer, limits))
        except RequestError as error:
            self._end(sequence, error.status, str(error))
        except Exception:
            self._fault(sequence)

    def _admit(self) -> tuple[RequestLimits, Tokenizer]:
        """Raises the reason for which nothing can be taken in now."""
        if self._holders.health.state is EngineState.FAILED:
            raise EngineUnavailable("the engine is down; the server's log says why")
        if self._engine is None or self._limits is None or self._tokenizer is None:
            raise EngineUnavailable("the engine is not ready; try again in a moment")
        self._refuse_full(self._limits)
        return self._limits, self._tokenizer

    def _refuse_full(self, limits: RequestLimits) -> None:
        """Raises QueueFull when more sequences are open than are taken at a time."""
        if len(self._open) > limits.sequences:
            raise QueueFull("the queue is full; try again later")

    def _add_samples(self, entry: OpenRequest, n: int) -> None:
        """The request's other sequences: they count against the queue's limit, too."""
        entry.num_samples = n
        self._next_sequence = entry.sequence + n
        for id in entry.sequences:
            self._open[id] = entry

    def _work_beside(self, id: SequenceId, work: Work) -> None:
        """Beside the loop; what comes of it is told to our inbox."""
        assert self._tasks is not None
        self._open[id].tokenising = self._tasks.create_task(self._tell_outcome(id, work))

    async def _tell_outcome(self, id: SequenceId, work: Work) -> None:
        await self._inbox.send(Tokenised(id, await work()))

    def _on_tokenised(self, message: Tokenised) -> None:
        if message.sequence not in self._open:  # cancelled meanwhile
            return
        if isinstance(message.outcome, RequestError):
            self._end(message.sequence, message.outcome.status, str(message.outcome))
            return
        if isinstance(message.outcome, bytes):
            self._answer(message.sequence, message.outcome)
            return
        try:
            self._start(message.sequence, message.outcome)
        except Exception:
            self._fault(message.sequence)

    def _start(self, id: SequenceId, accepted: Accepted) -> None:
        entry = self._open[id]
        assert self._tokenizer is not None
        entry.record = Record(entry.request, accepted, self._tokenizer, entry.arrived_s)
        if self._config.resume_on_restart:
            entry.memory = Memory.of(accepted)
        if self._tell_scheduler(accepted.sequences(entry.sequence, entry.arrived_s)):
            return
        if self._engine is None and entry.memory is not None:
            self._resumption.wait(entry)
            self._tell_deadline(entry, entry.memory)
        else:
            self._end(id, Status.UNAVAILABLE, "the engine stopped unexpectedly; try again in a moment")

    def _tell_scheduler(self, message: TextToScheduler) -> bool:
        """The mailbox is far larger than the queue limit: it refuses only when the scheduler is stuck or gone."""
        if self._engine is None:
            return False
        try:
            self._engine.to_scheduler.put(message)
        except Undeliverable as error:
            _log.error("the scheduler does not take messages: %s", error)
            return False
        return True

    def _on_progress(self, progress: Progress) -> None:
        now_s = time.monotonic()
        for started in progress.started:
            entry = self._open.get(started.id)
            if entry is not None and entry.record is not None:
                entry.record.on_started(started, now_s)
                self._rates.first_token(now_s - entry.arrived_s)
                self._touched[entry.sequence] = None
        self._on_logprobs(progress)
        self._rates.tokens(progress.sequence_ids, now_s)
        self._rates.ended(ended.id for ended in progress.ended)
        for id, token in zip(progress.sequence_ids, progress.tokens, strict=True):
            entry = self._open.get(id)
            if entry is None or entry.record is None:
                continue
            if entry.memory is not None:
                entry.memory.keep(token, id - entry.sequence)
                self._resumption.moved(entry)
            try:
                entry.record.on_token(token, id - entry.sequence)
            except Exception:
                self._fault(id)
                continue
            self._touched[entry.sequence] = None
        for ended in progress.ended:
            entry = self._open.get(ended.id)
            if entry is not None and entry.record is not None:
                entry.record.on_end(ended.reason, ended.id - entry.sequence)
                self._touched[entry.sequence] = None
        self._resume()

    def _on_logprobs(self, progress: Progress) -> None:
        """They are told before their tokens."""
        for told in progress.prompt_logprobs:
            entry = self._open.get(told.id)
            if entry is not None and entry.record is not None:
                entry.record.on_prompt_logprobs(told.logprobs)
                self._behind[entry.sequence] = None
        for told in progress.logprobs:
            entry = self._open.get(told.id)
            if entry is not None and entry.record is not None:
                entry.record.on_logprobs(told.logprobs, told.id - entry.sequence)

    def _write_some(self) -> None:
        """One record a turn, in turn: others' messages come between."""
        id = next(iter(self._behind), None)
        if id is None:
            return
        del self._behind[id]
        entry = self._open.get(id)
        if entry is None or entry.record is None:  # ended meanwhile
            return
        try:
            entry.record.write_some()
        except Exception:
            self._fault(id)
            return
        (self._behind if entry.record.is_behind else self._touched)[id] = None

    def _flush(self) -> None:
        """Sends what the records have to say: one message per holder."""
        for id in self._touched:
            entry = self._open.get(id)
            if entry is None or entry.record is None:
                continue
            try:
                outputs = entry.record.take_outputs()
            except Exception:
                self._fault(id)
                continue
            self._outputs.setdefault(entry.holder, []).extend(outputs)
            for index in entry.record.take_aborts():
                self._tell_scheduler(Abort(SequenceId(id + index)))
            if entry.record.closed:
                self._close(entry)
        self._touched.clear()
        for holder, items in self._outputs.items():
            if not items:
                continue
            self._front.deliver(holder, Outputs(tuple(items)))
        self._outputs.clear()

    def _fault(self, id: SequenceId) -> None:
        """A fault of ours in one request stays with that request."""
        _log.exception("request failed")
        self._end(id, Status.INTERNAL, "an internal error ended this request")

    def _end(self, id: SequenceId, status: Status, message: str) -> None:
        """The terminal answer of a request that did not finish by itself; its sequence is let go."""
        entry = self._open[id]
        self._outputs.setdefault(entry.holder, []).append(Failed(entry.request, status, message))
        self._close(entry)
        if entry.record is not None:
            for sequence in entry.sequences:
                self._tell_scheduler(Abort(sequence))

    def _close(self, entry: OpenRequest) -> None:
        if entry.tokenising is not None:
            entry.tokenising.cancel()  # what still waits for a thread never gets one
        for id in entry.sequences:
            self._open.pop(id, None)
            self._view.leave(id)
        del self._by_request[entry.holder, entry.request]
        self._resumption.moved(entry)
        self._resume()

    # ── operations ───────────────────────────────────────────────────────────────────────────────────────────────

    def _on_operation(self, id: SequenceId, request: Request) -> None:
        """Raises RequestError."""
        name = operations.operation_of(request)
        if name == operations.ENGINE:
            self._look(id)
            return
        limits, tokenizer = self._admit()
        operation = operations.read_operation(name, request, tokenizer, limits)
        if operations.takes_long(operation):
            assert self._preparation is not None
            self._work_beside(id, partial(self._preparation.work_out, operation, tokenizer, limits))
        else:
            self._answer(id, operations.result_of(operation, tokenizer, limits))

    def _look(self, id: SequenceId) -> None:
        """A full queue is no matter, nor an engine that is down: that is when people look."""
        snapshot = self._view.recent(time.monotonic())
        if snapshot is not None:
            self._answer(id, snapshot)
        elif self._view.wait(id) and not self._tell_scheduler(self._view.look):
            self._show(NO_VIEW)

    def _show(self, view: View) -> None:
        """To all who wait for it."""
        now_s = time.monotonic()
        snapshot = self._view.snapshot(view, self._holders.health.state, self._open, self._tokenizer, now_s)
        for id in self._view.take_waiting():
            self._answer(id, snapshot)

    def _answer(self, id: SequenceId, result: bytes) -> None:
        entry = self._open[id]
        self._outputs.setdefault(entry.holder, []).append(Answered(entry.request, result))
        self._close(entry)

    # ── holders and the engine's state ───────────────────────────────────────────────────────────────────────────

    def _on_holder_gone(self, holder: HolderId) -> None:
        self._holders.gone(holder)
        for id in [id for (owner, _), id in self._by_request.items() if owner == holder]:
            self._end(id, Status.CANCELLED, "the client is gone")
        self._outputs.pop(holder, None)

    def _ready_when_complete(self) -> None:
        if self._engine is None or self._tokenizer is None:
            return
        pool_tokens = self._engine.pool_tokens
        template = self._tokenizer.template_source
        parsers = parser_names(self._config.reasoning_parser, self._config.tool_parser, template)
        self._limits = limits_of(self._config, self._context_tokens, pool_tokens, parsers, self._defaults)
        start = f", {self._engine.start}" if self._engine.start else ""
        self._become(Health(EngineState.READY, f"ready: {pool_tokens} tokens of KV{start}"))

    def _on_engine_down(self) -> None:
        self._engine = None
        self._flush()  # what was whole before it died is no loss
        self._resumption.begin()
        for id in list(self._by_request.values()):
            self._survive(id)
        while self._holders.is_inspected:
            self._holders.answer(self._stats(NO_GAUGES))
        self._view.forget()
        self._rates.all_ended()
        if self._holders.health.state is not EngineState.FAILED:
            self._become(Health(EngineState.RESTARTING, "the engine died"))

    def _survive(self, id: SequenceId) -> None:
        """A request outlives its engine group, if it may."""
        entry = self._open[id]
        if entry.memory is None:
            if entry.tokenising is None or not self._config.resume_on_restart:
                self._end(id, Status.UNAVAILABLE, "the engine stopped unexpectedly; try again in a moment")
        elif self._resumption.keep(entry):
            self._tell_deadline(entry, entry.memory)
        else:
            self._end(id, Status.INTERNAL, "the engine stopped twice over this request; it is not tried again")

    def _tell_deadline(self, entry: OpenRequest, memory: Memory) -> None:
        """To ourselves, when it has passed: no scheduler looks at it now."""
        timeout_s = memory.accepted.timeout_s
        if timeout_s is not None:
            left_s = entry.arrived_s + timeout_s - time.monotonic()
            asyncio.get_running_loop().call_later(max(0.0, left_s), self._inbox.post, Overdue(entry.sequence))

    def _on_overdue(self, overdue: Overdue) -> None:
        entry = self._open.get(overdue.sequence)
        if entry is None or entry.record is None or not self._resumption.is_waiting(entry):
            return
        for index in entry.record.unended:
            entry.record.on_end(EndReason.DEADLINE, index)
        self._touched[entry.sequence] = None

    def _resume(self) -> None:
        """Hands over what is left of the request whose turn it is. What a group that is gone does not take, the next
        one gets: its EngineDown is on its way.
        """
        while self._engine is not None and (entry := self._resumption.next()) is not None:
            assert entry.record is not None and entry.memory is not None
            for index in entry.record.unended:
                self._tell_scheduler(entry.memory.rest(entry.sequence, index, entry.arrived_s))

    def _on_state(self, change: StateChanged) -> None:
        if self._holders.health.state is EngineState.FAILED:
            return
        if change.state is EngineState.FAILED:
            for id in list(self._by_request.values()):  # that were to go on
                self._end(id, Status.UNAVAILABLE, "the engine is down; the server's log says why")
        if change.state is EngineState.STARTING:
            self._become(Health(self._holders.health.state, change.detail))
        else:
            self._become(Health(change.state, change.detail, change.exit_code))

    def _become(self, health: Health) -> None:
        self._flush()
        self._holders.tell(health)

    def _on_inspect(self, holder: HolderId) -> None:
        if self._tell_scheduler(Probe()):
            self._holders.inspects(holder)
        else:  # nobody would answer it, and the next inspector's answer would be taken for this one's
            self._front.deliver(holder, self._stats(NO_GAUGES))

    def _on_gauges(self, gauges: Gauges) -> None:
        if self._holders.is_inspected:
            self._holders.answer(self._stats(gauges))

    def _stats(self, gauges: Gauges) -> Stats:
        pids = self._engine.pids if self._engine is not None else ()
        return stats_of(self._holders.health.state, gauges, len(self._by_request), max(0, self._starts - 1), pids)
