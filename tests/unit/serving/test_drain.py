"""The limit on answers in flight once Triton unloads the model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from fakes.engine_link import WAIT_S
from fakes.triton_stub import Log
from minisgl_backend.serving.drain import Drain, Step, Watch
from minisgl_backend.serving.presence import Presence, read_presence

LOADED, LEAVING, UNKNOWN = Presence.LOADED, Presence.LEAVING, Presence.UNKNOWN
WORDS = {
    LOADED: "Model x - Error when running inference: Model x is using the decoupled. The current BLS request call …",
    LEAVING: "Model x - Error: Failed for execute the inference request. Model 'x' is not ready.",
    UNKNOWN: "something new",
}


@pytest.mark.parametrize(
    ("words", "presence"),
    [
        (WORDS[LOADED], LOADED),
        ("Model x - Error when running inference: unexpected inference output 'is_loaded' for model 'x'", LOADED),
        (WORDS[LEAVING], LEAVING),
        ("Model x - Error when running inference: Server not ready", LEAVING),
        ("Request for unknown model: 'x' has no available versions", LEAVING),
        ("BLS is only supported during the 'execute' function.", UNKNOWN),
        ("", UNKNOWN),
    ],
)
def test_the_servers_words_are_read_and_what_is_new_is_unknown(words: str, presence: Presence) -> None:
    assert read_presence(words) is presence


def test_the_limit_runs_from_the_first_sign_of_leaving_and_passes_once() -> None:
    drain = Drain(20.0)
    seen = [(LOADED, 0.0), (LEAVING, 100.0), (LEAVING, 119.9), (LEAVING, 120.0), (LEAVING, 121.0)]
    assert [drain.saw(presence, now) for presence, now in seen] == [
        Step.NOTHING,
        Step.BEGUN,
        Step.NOTHING,
        Step.OVER,
        Step.NOTHING,
    ]


def test_an_answer_that_can_not_be_read_neither_begins_nor_ends_a_drain() -> None:
    drain = Drain(20.0)
    assert drain.saw(UNKNOWN, 0.0) is Step.NOTHING
    assert drain.saw(UNKNOWN, 1000.0) is Step.NOTHING
    assert drain.saw(LEAVING, 1000.0) is Step.BEGUN
    assert drain.saw(UNKNOWN, 1010.0) is Step.NOTHING
    assert drain.saw(UNKNOWN, 1020.0) is Step.OVER  # begun is begun: the limit is kept also without a word


def test_a_model_that_is_wanted_again_gets_the_whole_limit_the_next_time() -> None:
    drain = Drain(20.0)
    assert drain.saw(LEAVING, 0.0) is Step.BEGUN
    assert drain.saw(LOADED, 19.0) is Step.NOTHING
    assert drain.saw(LEAVING, 21.0) is Step.BEGUN
    assert drain.saw(LEAVING, 40.0) is Step.NOTHING
    assert drain.saw(LEAVING, 41.0) is Step.OVER


def test_the_last_question_comes_when_the_limit_passes_and_not_a_period_later() -> None:
    drain = Drain(1.5, period_s=1.0)
    assert drain.due_in(0.0) == 1.0
    drain.saw(LEAVING, 10.0)
    assert (drain.due_in(10.0), drain.due_in(11.0), drain.due_in(12.0)) == (1.0, 0.5, 0.0)
    drain.saw(LEAVING, 12.0)
    assert drain.due_in(12.0) == 1.0


class Server:
    """Answers the watch's questions with the words it is given."""

    def __init__(self, words: str) -> None:
        self.words = words
        self.asked = threading.Semaphore(0)

    def ask(self) -> str:
        self.asked.release()
        if self.words == "raise":
            raise RuntimeError("the stub does not know")
        return self.words

    def wait_asked(self, times: int) -> None:
        for _ in range(times):
            assert self.asked.acquire(timeout=WAIT_S), "waited in vain"


@contextmanager
def watching(
    server: Server, log: Log, end_all: Callable[[], None], busy: threading.Event, limit_s: float = 0.0
) -> Iterator[None]:
    watch = Watch(server.ask, limit_s, log, "minisgl", busy.is_set, end_all, period_s=0.01)
    watch.start()
    try:
        yield
    finally:
        assert watch.stop(WAIT_S)


@pytest.fixture
def busy() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def test_a_watch_ends_what_is_left_when_the_limit_has_passed(busy: threading.Event) -> None:
    log, ended, server = Log(), threading.Event(), Server(WORDS[LOADED])
    with watching(server, log, ended.set, busy):
        server.wait_asked(3)
        assert not ended.is_set()
        server.words = WORDS[LEAVING]
        assert ended.wait(WAIT_S)
    assert log.lines == [
        "info minisgl: unloading: answers in flight have 0 s",
        "warn minisgl: unloading: answers still open after 0 s are ended",
    ]


def test_a_watch_asks_nothing_while_no_request_is_open(busy: threading.Event) -> None:
    busy.clear()
    server = Server(WORDS[LOADED])
    with watching(server, Log(), lambda: None, busy):
        assert not server.asked.acquire(timeout=0.1)
        busy.set()
        server.wait_asked(1)


@pytest.mark.parametrize("words", [WORDS[UNKNOWN], "raise"])
def test_words_that_nobody_understands_are_logged_once_and_end_nothing(words: str, busy: threading.Event) -> None:
    log, ended, server = Log(), threading.Event(), Server(words)
    with watching(server, log, ended.set, busy):
        server.wait_asked(5)
    assert not ended.is_set()
    (line,) = log.lines
    assert line.startswith("warn minisgl: an unload will wait for every answer in flight; Triton said: ")


def test_stopping_a_watch_that_never_began_is_harmless() -> None:
    assert Watch(lambda: "", 1.0, Log(), "minisgl", lambda: False, lambda: None).stop(0.0)
