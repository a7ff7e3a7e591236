"""Which outcomes of a compilation are kept and for how long, and what is done beside the text actor's loop."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest

from fakes.grammar_compiler import FakeNursery, ScriptedLane, grammar_compiler
from minisgl_backend.actors import grammars
from minisgl_backend.actors.grammars import (
    LOAD_S,
    MAX_WAIT_S,
    MAX_WAITING,
    RETRY_S,
    GrammarCompiler,
    Lane,
    Nursery,
    Outcome,
    Postponed,
)
from minisgl_backend.errors import EngineUnavailable, InvalidRequest
from minisgl_backend.text.structured.nursery import (
    NICE,
    Answer,
    Job,
    Loaded,
    Vocabulary,
    answer_of_end,
    read_frame,
    write_frame,
)
from minisgl_backend.text.structured.spec import GrammarSpec

SPEC = GrammarSpec("regex", "a", "guided_regex")
SOUND, WRONG, LARGE, KILLED = Answer(b"x"), Answer(fault="is wrong"), Answer(exceeded=True), Answer(killed=True)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def word(compiler: GrammarCompiler, spec: GrammarSpec = SPEC) -> str:
    """What the client hears; empty: its grammar."""
    try:
        grammar = await compiler.compile(spec, [2])
    except (InvalidRequest, EngineUnavailable) as error:
        return f"{type(error).__name__} {error}"
    assert grammar.compiled == SOUND.compiled
    return ""


@pytest.mark.parametrize(
    ("quick", "slow", "says"),
    [
        ([SOUND], [], ""),
        ([WRONG], [], "InvalidRequest guided_regex: is wrong"),
        ([LARGE], [SOUND], ""),
        ([LARGE], [LARGE], "InvalidRequest guided_regex: needs more than 2 s or 512 MiB to compile"),
    ],
)
async def test_what_follows_from_a_grammar_is_asked_once_for_ever(
    quick: list[Answer], slow: list[Answer], says: str
) -> None:
    lanes, clock = (ScriptedLane(quick), ScriptedLane(slow)), Clock()
    async with grammar_compiler([b"a"], lanes=lanes, clock=clock) as compiler:
        for clock.now_s in (0.0, 1.0, 1e6):
            assert await word(compiler) == says
    assert [len(lane.asked) for lane in lanes] == [len(quick), len(slow)]


@pytest.mark.parametrize(("quick", "slow"), [([KILLED, SOUND], []), ([LARGE, SOUND], [KILLED])])
async def test_a_compilation_that_was_killed_is_tried_again_though_not_at_once(
    quick: list[Answer], slow: list[Answer]
) -> None:
    lanes, clock = (ScriptedLane(quick), ScriptedLane(slow)), Clock()
    async with grammar_compiler([b"a"], lanes=lanes, clock=clock) as compiler:
        for clock.now_s in (0.0, 1.0, RETRY_S - 0.001):
            assert (await word(compiler)).startswith("EngineUnavailable guided_regex: compiling it was broken off")
            assert len(lanes[0].asked) == 1, "who asks again meanwhile takes nobody's turn"
        clock.now_s = RETRY_S
        assert await word(compiler) == ""


async def test_what_could_not_be_tried_is_not_kept_and_other_grammars_wait_for_nothing() -> None:
    quick = ScriptedLane([Postponed("too many wait"), SOUND, KILLED, SOUND])
    other, third = GrammarSpec("regex", "b", "guided_regex"), GrammarSpec("regex", "c", "guided_regex")
    async with grammar_compiler([b"a"], lanes=(quick, ScriptedLane()), clock=Clock()) as compiler:
        assert await word(compiler) == "EngineUnavailable guided_regex: too many wait"
        assert await word(compiler) == ""
        assert "broken off" in await word(compiler, other)
        assert await word(compiler, third) == ""
    assert quick.asked == ["a", "a", "b", "c"]


async def test_who_waits_too_long_and_who_comes_when_too_many_wait_are_told_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars, "MAX_WAIT_S", -1.0)  # every turn comes too late: no process is started
    lane = Lane("quick", [b"a"], 1.0)
    with closing(lane):
        outcomes = await asyncio.gather(*(lane.run(SPEC) for _ in range(MAX_WAITING + 1)))
    *late, last = [outcome.why for outcome in outcomes if isinstance(outcome, Postponed)]
    assert set(late) == {"its turn to be compiled did not come within 10 s; try again later"}
    assert (len(late), last) == (MAX_WAITING, "too many wait for theirs to be compiled; try again later")


async def outcomes_of(lane: Lane, jobs: int, nursery: FakeNursery) -> list[Outcome]:
    """Of jobs that all wait before the nursery may load."""
    with closing(lane):
        asked = [asyncio.create_task(lane.run(SPEC)) for _ in range(jobs)]
        await asyncio.sleep(0)
        nursery.may_load.set()
        return await asyncio.gather(*asked)


@pytest.mark.parametrize(("job_s", "in_time"), [(0.1, 4), (MAX_WAIT_S * 0.4, 3), (MAX_WAIT_S * 1.1, 1)])
async def test_the_wait_for_a_turn_begins_when_the_lane_has_loaded(job_s: float, in_time: int) -> None:
    clock = Clock()

    def load() -> None:
        clock.now_s += 4 * MAX_WAIT_S

    def ask(job: Job) -> Answer:
        clock.now_s += job_s
        return SOUND

    nursery = FakeNursery(load, ask)
    outcomes = await outcomes_of(Lane("quick", (), 1.0, nursery=lambda: nursery, clock=clock), 4, nursery)
    assert outcomes[:in_time] == [SOUND] * in_time
    late = [outcome.why for outcome in outcomes[in_time:] if isinstance(outcome, Postponed)]
    assert late == ["its turn to be compiled did not come within 10 s; try again later"] * (4 - in_time)


async def test_a_lane_that_can_not_load_is_ended_and_those_who_waited_meanwhile_do_not_load_it_in_turn() -> None:
    clock = Clock()

    def load() -> None:
        clock.now_s += LOAD_S
        raise OSError("its process has ended")

    def ask(job: Job) -> Answer:
        raise AssertionError("it has not loaded")

    nursery = FakeNursery(load, ask)
    lane = Lane("quick", (), 1.0, nursery=lambda: nursery, clock=clock)
    whys = [outcome.why for outcome in await outcomes_of(lane, 3, nursery) if isinstance(outcome, Postponed)]
    assert [why.split(";")[0] for why in whys] == [
        "it can not be compiled now",
        *["its turn to be compiled did not come within 10 s"] * 2,
    ]
    assert nursery.ended and clock.now_s == LOAD_S


def test_a_process_that_does_not_load_in_time_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "LOAD_S", 0.0)
    nursery = Nursery([b"a" * 1000] * 4000)
    try:
        with pytest.raises(OSError):
            nursery.load()
    finally:
        nursery.end()


def test_a_process_loads_at_the_priority_of_its_starter_and_compiles_behind_all_others() -> None:
    command = [sys.executable, "-P", "-m", "minisgl_backend.text.structured.nursery"]
    vocabulary = io.BytesIO()
    write_frame(vocabulary, Vocabulary([b"a" * 1000] * 4000))  # far more than a pipe holds
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/") as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(vocabulary.getvalue()[:-1])
        process.stdin.flush()  # the most of it was read: the process is beyond its start
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0)
        process.stdin.write(vocabulary.getvalue()[-1:])
        process.stdin.flush()
        assert read_frame(process.stdout) == msgspec.msgpack.encode(Loaded())
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == NICE
        process.stdin.close()


async def test_a_fault_of_ours_is_told_to_who_waits_and_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async with grammar_compiler([b"a"], lanes=(ScriptedLane(), ScriptedLane([SOUND]))) as compiler:
        for _ in range(2):  # the script is at its end
            assert await word(compiler) == "EngineUnavailable guided_regex: it can not be compiled now; try again later"
    assert "a grammar could not be compiled" in caplog.text


async def test_those_who_ask_together_share_one_job_that_outlives_the_first() -> None:
    class Waiting(ScriptedLane):
        async def run(self, spec: GrammarSpec) -> Answer | Postponed:
            await may_go.wait()
            return await super().run(spec)

    may_go, quick = asyncio.Event(), Waiting([SOUND])
    async with grammar_compiler([b"a"], lanes=(quick, ScriptedLane())) as compiler, asyncio.TaskGroup() as clients:
        first, second = (clients.create_task(word(compiler)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        may_go.set()
        assert await second == ""
    assert first.cancelled() and quick.asked == ["a"]


async def test_the_vocabulary_is_never_walked_on_the_loop() -> None:
    class Vocabulary(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            walked.append(threading.current_thread())
            return super().__iter__()

    walked: list[threading.Thread] = []
    vocabulary = Vocabulary([b"a", b"b", b""])
    async with asyncio.TaskGroup() as tasks:
        compiler = GrammarCompiler(vocabulary, b"digest", tasks)
        try:
            assert (await compiler.compile(SPEC, [2])).compiled
        finally:
            compiler.close()
    assert walked and threading.current_thread() not in walked


async def test_grammars_of_two_vocabularies_have_two_keys() -> None:
    keys = set()
    for vocabulary in ([b"a", b"bc"], [b"ab", b"c"], [b"a", b"bc"]):
        async with grammar_compiler(vocabulary, lanes=(ScriptedLane([SOUND]), ScriptedLane())) as compiler:
            keys.add((await compiler.compile(SPEC, [2])).key)
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("exit_code", "answer"),
    [
        (1, LARGE),
        (-signal.SIGPROF, LARGE),
        (-signal.SIGXCPU, LARGE),
        (-signal.SIGSEGV, LARGE),
        (-signal.SIGABRT, LARGE),
        (-signal.SIGKILL, KILLED),
        (-signal.SIGTERM, KILLED),
    ],
)
def test_a_child_that_was_killed_from_outside_says_nothing_of_its_grammar(exit_code: int, answer: Answer) -> None:
    assert answer_of_end(exit_code) == answer
