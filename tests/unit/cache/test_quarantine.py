"""Ids in quarantine come out with the step that named them last, neither earlier nor twice."""

from __future__ import annotations

from array import array

import pytest

from minisgl_backend.cache.quarantine import Quarantine
from minisgl_backend.messages.ids import StepId


def test_ids_come_out_when_the_step_they_are_tagged_with_is_applied() -> None:
    quarantine = Quarantine()
    quarantine.hold(array("i", [4, 5]), StepId(2))
    quarantine.hold(array("i", [6]), StepId(1))
    quarantine.hold(array("i", [7]), StepId(2))
    assert quarantine.applied(StepId(1)).tolist() == [6]
    assert len(quarantine) == 3
    assert quarantine.applied(StepId(2)).tolist() == [4, 5, 7]
    assert quarantine.ids() == []


def test_a_step_that_was_applied_holds_nothing_back() -> None:
    quarantine = Quarantine()
    assert quarantine.is_over(StepId(0))
    assert not quarantine.is_over(StepId(1))
    quarantine.applied(StepId(1))
    assert quarantine.is_over(StepId(1))
    with pytest.raises(AssertionError, match="need no quarantine"):
        quarantine.hold(array("i", [1]), StepId(1))


def test_what_is_held_is_a_copy_the_caller_may_change_his_own() -> None:
    quarantine = Quarantine()
    mine = array("i", [1, 2])
    quarantine.hold(mine, StepId(1))
    mine.append(3)
    first = quarantine.applied(StepId(1))
    assert first.tolist() == [1, 2]
    first.append(9)
    assert quarantine.applied(StepId(2)).tolist() == []


def test_steps_are_applied_one_by_one() -> None:
    with pytest.raises(AssertionError, match="step 2 applied after step 0"):
        Quarantine().applied(StepId(2))
