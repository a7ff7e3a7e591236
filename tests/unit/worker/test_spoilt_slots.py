"""After a step that failed no plan runs on what is not there, until its sequences are admitted anew."""

from __future__ import annotations

from minisgl_backend.messages.ids import SlotId, StepId
from minisgl_backend.messages.plan import Admission, BatchPlan, StepResult
from minisgl_backend.messages.sampling import GREEDY
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.worker.spoilt import SpoiltSlots


def plan(step: int, *slots: int, admits: tuple[int, ...] = ()) -> BatchPlan:
    admissions = tuple(Admission(SlotId(slot), pack_tokens([1]), GREEDY) for slot in admits)
    ones = (1,) * len(slots)
    return BatchPlan(StepId(step), admissions, (), slots, ones, ones, ones)


def test_a_sound_worker_runs_everything() -> None:
    assert SpoiltSlots(4).void(plan(1, 0, 1, 2, 3)) is None


def test_after_a_failure_a_plan_is_void_until_all_its_slots_were_admitted_since() -> None:
    slots = SpoiltSlots(4)
    assert slots.failed(plan(1, 0, 1), "no memory") == StepResult(StepId(1), (), "no memory")
    assert slots.void(plan(2, 0, 1, 2, admits=(2,))) == StepResult(StepId(2), (), "a step before it failed")
    assert slots.void(plan(3, 2)) is not None, "what a void plan admitted was not begun either"
    assert slots.void(plan(4, 0, 2, admits=(0, 2))) is None
    assert slots.void(plan(5, 0, 2)) is None
    assert slots.void(plan(6, 0, 1)) is not None
