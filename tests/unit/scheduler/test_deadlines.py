"""Deadlines: who is too late, in which order, and what it costs while nobody is."""

from __future__ import annotations

import random

import pytest

from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.scheduler.deadlines import Deadlines


def _ids(*numbers: int) -> list[SequenceId]:
    return [SequenceId(number) for number in numbers]


def test_who_is_late_comes_out_once_by_deadline_and_then_by_id() -> None:
    deadlines = Deadlines()
    for id, deadline_s in ((3, 2.0), (1, 5.0), (2, 2.0), (4, 9.0)):
        deadlines.add(SequenceId(id), deadline_s)
    assert deadlines.expired(1.9) == []
    assert deadlines.expired(5.0) == _ids(2, 3, 1)
    assert deadlines.expired(5.0) == []
    assert len(deadlines) == 1


def test_a_deadline_in_the_past_is_late_at_the_first_look() -> None:
    deadlines = Deadlines()
    deadlines.add(SequenceId(1), -1.0)
    assert deadlines.expired(0.0) == _ids(1)


def test_who_was_removed_is_never_late() -> None:
    deadlines = Deadlines()
    deadlines.add(SequenceId(1), 1.0)
    deadlines.add(SequenceId(2), 2.0)
    deadlines.remove(SequenceId(1))
    deadlines.remove(SequenceId(1))
    deadlines.remove(SequenceId(99))
    assert deadlines.expired(3.0) == _ids(2)


def test_an_id_that_comes_again_has_its_new_deadline_only() -> None:
    deadlines = Deadlines()
    for deadline_s in (1.0, 3.0, 3.0):
        deadlines.add(SequenceId(1), deadline_s)
        deadlines.remove(SequenceId(1))
    deadlines.add(SequenceId(1), 3.0)
    assert deadlines.expired(2.0) == []
    assert deadlines.expired(4.0) == _ids(1)
    assert len(deadlines) == 0


def test_a_time_that_is_none_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="no time"):
        Deadlines().add(SequenceId(1), float("nan"))


def test_the_heap_does_not_grow_with_those_that_ended_long_before_their_deadline() -> None:
    deadlines = Deadlines()
    deadlines.add(SequenceId(0), 500.0)
    for number in range(1, 20_000):
        deadlines.add(SequenceId(number), 1e6 + number)
        deadlines.remove(SequenceId(number))
        if number % 1000 == 0:
            deadlines.check()
    deadlines.check()
    assert deadlines.expired(1e9) == _ids(0)


def test_a_look_at_nobody_late_reads_one_entry() -> None:
    class Counted(list[tuple[float, SequenceId]]):
        reads = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            Counted.reads += 1
            return super().__getitem__(index)

    deadlines = Deadlines()
    for number in range(1000):
        deadlines.add(SequenceId(number), 10.0 + number)
    deadlines._heap._heap = Counted(deadlines._heap._heap)
    assert deadlines.expired(5.0) == []
    assert Counted.reads == 1


def test_random_lives_agree_with_a_plain_dict() -> None:
    chance = random.Random(4)
    deadlines, plain, now = Deadlines(), dict[SequenceId, float](), 0.0
    for number in range(3000):
        id = SequenceId(number)
        if chance.random() < 0.6:
            plain[id] = now + chance.randint(0, 40)
            deadlines.add(id, plain[id])
        if plain and chance.random() < 0.3:
            gone = chance.choice(list(plain))
            del plain[gone]
            deadlines.remove(gone)
        now += chance.random()
        late = sorted((at, id) for id, at in plain.items() if at <= now)
        assert deadlines.expired(now) == [id for _, id in late]
        for _, id in late:
            del plain[id]
        deadlines.check()
        assert len(deadlines) == len(plain)
