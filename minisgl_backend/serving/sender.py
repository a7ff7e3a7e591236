"""A sender thread and the outbox of several: the engine's outputs → responses, the clients' cancels → the engine.

    link's thread ── Outputs ──► outbox ── by id ──► sender threads ── responses ──► Triton
    link ◄── cancel(id) ──────────────────────────── sender threads ◄── is_cancelled

A send is a blocking round trip to the server, so several threads send; each request belongs to one of them for life,
because two threads on one response sender crash the server. What piles up for a request while its thread is busy goes
out as one response; nothing waits for company.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from minisgl_backend.errors import Status
from minisgl_backend.messages.client import TERMINAL, Failed, Output
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.serving.polling import PollSchedule
from minisgl_backend.serving.reply import Reply
from minisgl_backend.serving.triton import Logger

THREADS = 4
POLL_PERIOD_S = 0.09
POLL_SLACK_S = 0.03
POLLS_PER_S = 500.0
"""Of the whole outbox. A question costs the stub and the server together some 0.1 to 0.2 ms of CPU time, most of it for
waking threads."""

UNLOADED = "the model is being unloaded"
"""What a client reads whose request came, or whose answer ended, after the model was asked to leave."""

Cancel = Callable[[RequestId], None]


class Fence(Protocol):
    """Told of every question for a cancel that went to the server and back: see calls.Retained."""

    def mark(self) -> int: ...

    def passed(self, mark: int) -> None: ...

    def is_due(self) -> bool:
        """Whether to ask before the next answer ends, though its turn has not come."""
        ...


class Outbox:
    """The sender threads of one bridge."""

    def __init__(self, log: Logger, threads: int = THREADS, fence: Fence | None = None) -> None:
        self._senders = tuple(Sender(index, threads, log, fence) for index in range(threads))

    def start(self, cancel: Cancel) -> None:
        """`cancel` is called from the sender threads, once per request whose client left."""
        for sender in self._senders:
            sender.start(cancel)

    def open(self, id: RequestId, reply: Reply) -> None:
        """Takes the reply over, before its request is submitted. From here on only its thread may touch it."""
        self._sender_of(id).open(id, reply)

    def post(self, outputs: Sequence[Output]) -> None:
        """Hands outputs to their threads, in order. Thread-safe, quick. Outputs of unknown ids are dropped: their
        replies have ended.
        """
        shares: list[list[Output]] = [[] for _ in self._senders]
        for output in outputs:
            shares[output.id % len(self._senders)].append(output)
        for sender, share in zip(self._senders, shares, strict=True):
            if share:
                sender.post(share)

    def fail_all(self, status: Status, message: str) -> list[RequestId]:
        """Ends every open reply with an error; returns their ids, which the engine may still be working on."""
        return [id for sender in self._senders for id in sender.fail_all(status, message)]

    def is_busy(self) -> bool:
        """Whether a reply is open."""
        return not self.wait_idle(0.0)

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until every reply has ended; False when that took too long."""
        deadline = time.monotonic() + timeout_s
        return all(sender.wait_idle(deadline) for sender in self._senders)

    def stop(self, timeout_s: float) -> bool:
        """Sends what is posted, fails the replies still open, ends the threads; False when one did not end."""
        for sender in self._senders:
            sender.stop()
        deadline = time.monotonic() + timeout_s
        return all(sender.join(deadline) for sender in self._senders)

    def _sender_of(self, id: RequestId) -> Sender:
        return self._senders[id % len(self._senders)]


class Sender:
    """One thread, and the replies it owns."""

    def __init__(self, index: int, of: int, log: Logger, fence: Fence | None = None) -> None:
        self._log = log
        self._fence = fence
        self._name = f"minisgl-sender-{index}"
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # guards all below; the replies themselves belong to the thread
        self._replies: dict[RequestId, Reply] = {}
        self._posted: dict[RequestId, list[Output]] = {}  # by first arrival
        self._polls = PollSchedule(POLL_PERIOD_S, POLL_SLACK_S, spacing_s=of / POLLS_PER_S)
        self._stopped = False

    def start(self, cancel: Cancel) -> None:
        self._thread = threading.Thread(target=self._run, args=(cancel,), name=self._name, daemon=True)
        self._thread.start()

    def open(self, id: RequestId, reply: Reply) -> None:
        with self._changed:
            self._replies[id] = reply
            self._polls.add(id, time.monotonic())
            self._changed.notify_all()

    def post(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            for output in outputs:
                if output.id in self._replies:
                    self._posted.setdefault(output.id, []).append(output)
            self._changed.notify_all()

    def fail_all(self, status: Status, message: str) -> list[RequestId]:
        with self._changed:
            ends = [id for id in self._replies if not self._is_ending(id)]
            for id in ends:
                self._posted.setdefault(id, []).append(Failed(id, status, message))
            self._changed.notify_all()
            return ends

    def wait_idle(self, deadline: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._replies, max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def join(self, deadline: float) -> bool:
        if self._thread is None:
            return True
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self, cancel: Cancel) -> None:
        while self._serve_one(cancel):
            pass
        for reply in self._take_rest():
            reply.fail(Status.UNAVAILABLE, UNLOADED)

    def _serve_one(self, cancel: Cancel) -> bool:
        """Waits for work and does it; False at the end. A function of its own, so that a waiting thread holds on to
        no reply: Triton does not unload a model while a response sender lives.
        """
        work = self._next()
        if work is None:
            return False
        id, reply, outputs = work
        try:
            if outputs:
                self._send(id, reply, outputs, cancel)
            else:
                self._ask(id, reply, cancel)
        except Exception as error:  # of the link or the stub: the thread must live, and the client get its answer
            self._give_up(id, reply, cancel, error)
        return True

    def _next(self) -> tuple[RequestId, Reply, list[Output]] | None:
        """The next request to serve, with its outputs, or with none when it is to be asked for a cancel. None: end.

        Outputs go first, unless a question has waited as long as it may.
        """
        with self._changed:
            while True:
                now, wake = time.monotonic(), self._polls.wake_at()
                if self._posted and (wake is None or now < wake):
                    id = next(iter(self._posted))
                    return id, self._replies[id], self._posted.pop(id)
                asked = self._polls.take(now)
                if asked is not None:
                    return asked, self._replies[asked], []
                if self._stopped:
                    return None
                self._changed.wait(None if wake is None else wake - now)

    def _send(self, id: RequestId, reply: Reply, outputs: list[Output], cancel: Cancel) -> None:
        if self._fence is not None and isinstance(outputs[-1], TERMINAL) and self._fence.is_due():
            self._ask(id, reply, cancel)
        reply.give(outputs)
        if reply.ended:
            self._forget(id)
            if not isinstance(outputs[-1], TERMINAL):  # the reply failed by itself, and the engine does not know
                cancel(id)

    def _ask(self, id: RequestId, reply: Reply, cancel: Cancel) -> None:
        mark = 0 if self._fence is None else self._fence.mark()
        cancelled = reply.is_cancelled()
        if self._fence is not None and not cancelled and not reply.ended:
            self._fence.passed(mark)
        if cancelled:
            with self._changed:
                self._polls.remove(id)
            cancel(id)  # the request ends as always, with the terminal output that this brings about

    def _give_up(self, id: RequestId, reply: Reply, cancel: Cancel, error: Exception) -> None:
        """Ends a request whose answer can not go on, here and in the engine, which would work for nobody."""
        self._log.log_error(f"minisgl: {self._name}: {error!r}")
        if not reply.ended:
            reply.fail(Status.INTERNAL, "the answer could not be sent")
        self._forget(id)
        try:
            cancel(id)
        except Exception as failed:
            self._log.log_error(f"minisgl: {self._name}: the engine was not told of the end: {failed!r}")

    def _is_ending(self, id: RequestId) -> bool:
        posted = self._posted.get(id)
        return posted is not None and isinstance(posted[-1], TERMINAL)

    def _forget(self, id: RequestId) -> None:
        with self._changed:
            self._replies.pop(id, None)
            self._posted.pop(id, None)
            self._polls.remove(id)
            self._changed.notify_all()

    def _take_rest(self) -> list[Reply]:
        with self._changed:
            rest = list(self._replies.values())
            self._replies.clear()
            self._posted.clear()
            self._changed.notify_all()
            return rest
