"""Sender threads: order, affinity, merging, cancels, and an end without leftovers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fakes.engine_link import WAIT_S, FakeLink, chunk, failed, finished
from fakes.triton_stub import FakeSender, FakeStub, TritonError
from minisgl_backend.errors import Status
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.serving.calls import Retained
from minisgl_backend.serving.outputs import Wanted
from minisgl_backend.serving.polling import PollSchedule
from minisgl_backend.serving.reply import Reply
from minisgl_backend.serving.sender import Outbox, Sender


class Desk:
    """An outbox at work."""

    def __init__(self, threads: int) -> None:
        self.stub = FakeStub()
        self.link = FakeLink()
        self.outbox = Outbox(self.stub.Logger, threads)
        self.outbox.start(self.link.cancel)

    def open(self, id: int, stream: bool = True) -> FakeSender:
        sender = FakeSender(self.stub)
        self.outbox.open(RequestId(id), Reply(self.stub, sender, stream, Wanted()))
        return sender


@contextmanager
def at_work(threads: int = 2) -> Iterator[Desk]:
    desk = Desk(threads)
    try:
        yield desk
    finally:
        assert desk.outbox.stop(WAIT_S)
    assert not desk.stub.violations


@pytest.fixture
def desk() -> Iterator[Desk]:
    with at_work() as desk:
        yield desk


def test_deltas_arrive_in_order(desk: Desk) -> None:
    senders = [desk.open(id) for id in range(6)]
    for piece in range(50):
        desk.outbox.post([chunk(id, f"{piece} ") for id in range(6)])
    desk.outbox.post([finished(id, "end") for id in range(6)])
    for sender in senders:
        assert sender.wait_final().text == "".join(f"{piece} " for piece in range(50)) + "end"
        assert sender.finals == 1


def test_what_piles_up_while_a_send_is_slow_goes_out_as_one_response(desk: Desk) -> None:
    sender = desk.open(0)
    sender.hold()
    desk.outbox.post([chunk(0, "a")])
    sender.wait_blocked()
    for text in "bcde":
        desk.outbox.post([chunk(0, text)])
    sender.release()
    sender.wait_answers(2)
    assert [answer.text for answer in sender.answers] == ["a", "bcde"]


def test_the_end_that_piles_up_carries_the_last_text_and_final(desk: Desk) -> None:
    sender = desk.open(0)
    sender.hold()
    desk.outbox.post([chunk(0, "a")])
    sender.wait_blocked()
    desk.outbox.post([chunk(0, "b"), finished(0, "c")])
    sender.release()
    sender.wait_final()
    assert [(answer.text, answer.reason, answer.final) for answer in sender.answers] == [
        ("a", "None", False),
        ("bc", "stop", True),
    ]


def test_what_does_not_pile_up_is_not_held_back(desk: Desk) -> None:
    sender = desk.open(0)
    for count, text in enumerate("abc", start=1):
        desk.outbox.post([chunk(0, text)])
        sender.wait_answers(count)
    assert [answer.text for answer in sender.answers] == ["a", "b", "c"]


def test_a_slow_client_does_not_delay_those_of_another_thread(desk: Desk) -> None:
    slow, quick = desk.open(0), desk.open(1)
    slow.hold()
    desk.outbox.post([chunk(0, "a")])
    slow.wait_blocked()
    desk.outbox.post([finished(1, "b")])
    assert quick.wait_final().text == "b"
    slow.release()


def test_a_waiting_request_without_output_is_asked_and_its_cancel_reaches_the_engine(desk: Desk) -> None:
    sender, other = desk.open(0), desk.open(2)
    sender.cancelled = True
    assert desk.link.wait_cancelled(1) == [0]
    desk.outbox.post([failed(0, Status.CANCELLED, "the client left")])
    assert [(a.code, a.final) for a in sender.wait_final().answers] == [(TritonError.CANCELLED, True)]
    assert other.finals == 0


@pytest.mark.parametrize(("slack_s", "outputs_first"), [(1e6, True), (0.0, False)])
def test_outputs_go_before_questions_unless_one_has_waited_as_long_as_it_may(
    slack_s: float, outputs_first: bool
) -> None:
    stub = FakeStub()
    sender = Sender(0, 1, stub.Logger)  # not started: the test is its thread
    sender._polls = PollSchedule(0.0, slack_s, 0.0)  # everybody's turn has come
    sender.open(RequestId(1), Reply(stub, FakeSender(stub), True, Wanted()))
    sender.post([chunk(1, "a")])
    served = [sender._next() for _ in range(2)]
    assert [bool(work and work[2]) for work in served] == [outputs_first, False]


def test_a_cancel_is_passed_on_once(desk: Desk) -> None:
    sender, other = desk.open(0), desk.open(2)
    sender.cancelled = True
    desk.link.wait_cancelled(1)
    polls = sender.polls
    other.wait_polls(other.polls + 2)
    assert sender.polls == polls
    assert desk.link.cancelled == [0]


def test_an_answer_that_fails_by_itself_frees_the_engine(desk: Desk) -> None:
    sender = desk.open(0)
    sender.refuse_next = 1
    desk.outbox.post([chunk(0, "a")])
    assert desk.link.wait_cancelled(1) == [0]
    desk.outbox.post([failed(0, Status.CANCELLED, "cancelled")])  # what the engine then says is not sent
    assert [(a.code, a.final) for a in sender.wait_final().answers] == [(TritonError.INTERNAL, True)]


def test_an_exception_on_the_way_to_the_engine_ends_that_request_alone(desk: Desk) -> None:
    def broken(id: int) -> None:
        raise OSError("no such socket")

    desk.link.on_cancel = broken
    sender, other = desk.open(0), desk.open(2)
    sender.cancelled = True
    assert sender.wait_final().answers[0].code == TritonError.INTERNAL
    desk.outbox.post([finished(2, "fine")])
    assert other.wait_final().text == "fine"


def test_a_question_that_fails_ends_the_request_in_the_engine_too(desk: Desk) -> None:
    def broken() -> None:
        raise RuntimeError("the stub is gone")

    sender = desk.open(0)
    sender.on_poll = broken
    assert sender.wait_final().answers[0].code == TritonError.INTERNAL
    assert desk.link.wait_cancelled(1) == [0]


def test_outputs_of_unknown_and_ended_requests_are_dropped(desk: Desk) -> None:
    sender = desk.open(0)
    desk.outbox.post([chunk(99, "nobody"), finished(0, "x")])
    sender.wait_final()
    desk.outbox.post([finished(0, "again"), chunk(0, "later")])
    assert desk.outbox.wait_idle(WAIT_S)
    assert len(sender.answers) == 1


def test_a_finished_requests_sender_is_let_go_at_once(desk: Desk) -> None:
    """Triton does not unload a model while a response sender lives: the idle thread must hold on to none."""
    sender = desk.open(0)
    gone = threading.Event()
    weakref.finalize(sender, gone.set)
    desk.outbox.post([chunk(0, "a")])
    desk.outbox.post([finished(0, "b")])
    sender.wait_final()
    del sender
    assert gone.wait(WAIT_S)


def test_stopping_sends_what_is_posted_and_fails_the_rest() -> None:
    with at_work(threads=1) as desk:
        slow, done, rest = desk.open(0), desk.open(1), desk.open(2)
        slow.hold()
        desk.outbox.post([finished(0, "slow")])
        slow.wait_blocked()
        desk.outbox.post([finished(1, "posted"), chunk(2, "begun")])
        assert not desk.outbox.wait_idle(0.0)
        slow.release()
        assert desk.outbox.stop(WAIT_S)
    assert (slow.text, done.text, rest.text) == ("slow", "posted", "begun")
    assert [(a.code, a.final) for a in rest.answers][-1] == (TritonError.UNAVAILABLE, True)
    assert slow.finals == done.finals == rest.finals == 1


class Passed:
    """A fence that notes what came back."""

    def __init__(self) -> None:
        self.marks = self.passes = 0
        self.came_back = threading.Event()

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def passed(self, mark: int) -> None:
        assert mark == self.marks, "the mark is taken before the question"
        self.passes += 1
        self.came_back.set()

    def is_due(self) -> bool:
        return False


def test_a_question_that_came_back_passes_the_fence_but_not_one_that_found_a_cancel() -> None:
    fence, stub, link = Passed(), FakeStub(), FakeLink()
    outbox = Outbox(stub.Logger, 1, fence)
    outbox.start(link.cancel)
    try:
        sender = FakeSender(stub)
        outbox.open(RequestId(1), Reply(stub, sender, True, Wanted()))
        assert fence.came_back.wait(WAIT_S)
        sender.cancelled = True
        link.wait_cancelled(1)
        assert fence.passes < fence.marks, "the question that found the cancel passed nothing"
        outbox.post([failed(1, Status.CANCELLED, "the client left")])
        sender.wait_final()
    finally:
        assert outbox.stop(WAIT_S)


@pytest.mark.parametrize("cancelled", [False, True])
def test_answers_that_end_before_their_turn_comes_let_go_of_what_is_retained_for_a_question(cancelled: bool) -> None:
    retained, stub, link = Retained(), FakeStub(), FakeLink()
    outbox = Outbox(stub.Logger, 1, retained)
    outbox.start(link.cancel)
    try:
        for id in range(300):
            sender = FakeSender(stub)
            outbox.open(RequestId(id), Reply(stub, sender, True, Wanted()))
            sender.cancelled = cancelled and id % 10 > 0
            retained.keep(object())
            outbox.post([finished(id, "x")])
            assert sender.wait_final().finals == 1
            assert len(retained) < 80
    finally:
        assert outbox.stop(WAIT_S)
    assert not stub.violations
