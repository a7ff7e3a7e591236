"""The proof is a proof: whatever is put out of order in the books, `check_integrity` says so (upstream-faults.md 9)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.cache.node import RadixNode
from minisgl_backend.messages.ids import SequenceId, SlotId, StepId
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.scheduler.sequence import Phase, SequenceState


def busy() -> SchedulerBench:
    """Somebody extends, two decode and share a prefix, somebody waits, something is cached and something in flight."""
    engine = SchedulerBench(Limits(3, 16, 4, 40, 256), depth=1)
    engine.add([7] * 9, 1)
    engine.finish()
    engine.add([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 30)
    engine.add([1, 2, 3, 4, 5, 6, 7, 8, 9, 11], 30)
    for _ in range(4):
        if engine.plan() is None:
            engine.apply()
    engine.add([5] * 60, 3)
    engine.add([6] * 6, 3, deadline_s=99.0)
    engine.plan()
    engine.scheduler.check_integrity()
    return engine


def running(scheduler: Scheduler) -> SequenceState:
    return next(state for state in scheduler._live.values() if state.phase is Phase.DECODING)


def locked(scheduler: Scheduler) -> RadixNode:
    node = running(scheduler).node
    assert node is not None
    return node


def unlocked(scheduler: Scheduler) -> RadixNode:
    return next(iter(scheduler._lives.tree._lru))


def lose_a_free_page(scheduler: Scheduler) -> None:
    scheduler._lives.pages._free.pop()


def free_a_page_twice(scheduler: Scheduler) -> None:
    scheduler._lives.pages._free.append(scheduler._lives.pages._free[0])


def free_a_page_in_use(scheduler: Scheduler) -> None:
    scheduler._lives.pages._free.append(running(scheduler).pages[-1])


def account_a_page_to_another(scheduler: Scheduler) -> None:
    scheduler._lives.pages._owner[scheduler._lives.pages._free[-1]] = 1


def cache_a_free_page(scheduler: Scheduler) -> None:
    unlocked(scheduler).pages[0] = scheduler._lives.pages._free[-1]


def lose_a_slot(scheduler: Scheduler) -> None:
    running(scheduler).slot = SlotId(2)


def forget_a_lock(scheduler: Scheduler) -> None:
    locked(scheduler).locks -= 1


def keep_a_lock(scheduler: Scheduler) -> None:
    locked(scheduler).locks += 1


def list_a_locked_node_for_eviction(scheduler: Scheduler) -> None:
    scheduler._lives.tree._lru[locked(scheduler)] = None


def hide_an_unlocked_node_from_eviction(scheduler: Scheduler) -> None:
    scheduler._lives.tree._lru.popitem()


def miscount_the_tree(scheduler: Scheduler) -> None:
    scheduler._lives.tree.total_pages += 1


def miscount_what_is_evictable(scheduler: Scheduler) -> None:
    scheduler._lives.tree.evictable_pages -= 1


def change_a_cached_token(scheduler: Scheduler) -> None:
    node = locked(scheduler)
    node.key[-1] ^= 1


def exchange_a_page_of_a_table(scheduler: Scheduler) -> None:
    state = running(scheduler)
    state.pages[0], state.pages[-1] = state.pages[-1], state.pages[0]


def share_a_page_that_is_not_in_the_tree(scheduler: Scheduler) -> None:
    running(scheduler).tree_pages += 1


def compute_beyond_the_pages(scheduler: Scheduler) -> None:
    running(scheduler).computed += 40


def list_the_dead(scheduler: Scheduler) -> None:
    state = running(scheduler)
    del scheduler._live[state.id]


def let_a_running_one_wait(scheduler: Scheduler) -> None:
    running(scheduler).phase = Phase.WAITING


def lose_somebody_who_waits(scheduler: Scheduler) -> None:
    first = scheduler._lives.waiting.first()
    assert first is not None
    scheduler._lives.waiting.remove(scheduler._live[first.id])


def lose_a_deadline(scheduler: Scheduler) -> None:
    scheduler._lives.deadlines.remove(
        next(state.id for state in scheduler._live.values() if state.deadline_s is not None)
    )


def promise_too_much(scheduler: Scheduler) -> None:
    scheduler._lives.reserve.worst_pages += 1


def expect_too_few_tokens(scheduler: Scheduler) -> None:
    scheduler._lives.reserve.new_tokens -= 1


def skip_a_step(scheduler: Scheduler) -> None:
    scheduler._steps = StepId(scheduler._steps + 1)


def lose_a_token(scheduler: Scheduler) -> None:
    running(scheduler).fresh.pop()


def swap_two_sequences(scheduler: Scheduler) -> None:
    ids = [id for id, state in scheduler._live.items() if state.phase is Phase.DECODING]
    one, other = scheduler._live[ids[0]], scheduler._live[ids[1]]
    scheduler._live[SequenceId(ids[0])], scheduler._live[SequenceId(ids[1])] = other, one


@pytest.mark.parametrize(
    "spoil",
    [
        lose_a_free_page, free_a_page_twice, free_a_page_in_use, account_a_page_to_another, cache_a_free_page,
        lose_a_slot, forget_a_lock, keep_a_lock, list_a_locked_node_for_eviction, hide_an_unlocked_node_from_eviction,
        miscount_the_tree, miscount_what_is_evictable, change_a_cached_token, exchange_a_page_of_a_table,
        share_a_page_that_is_not_in_the_tree, compute_beyond_the_pages, list_the_dead, let_a_running_one_wait,
        lose_somebody_who_waits, lose_a_deadline, promise_too_much, expect_too_few_tokens, skip_a_step, lose_a_token,
        swap_two_sequences,
    ],
)  # fmt: skip
def test_a_fault_in_the_books_is_found(spoil: Callable[[Scheduler], None]) -> None:
    engine = busy()
    spoil(engine.scheduler)
    with pytest.raises(AssertionError):
        engine.scheduler.check_integrity()


def test_a_look_at_the_books_changes_nothing() -> None:
    engine, other = busy(), busy()
    for _ in range(3):
        engine.scheduler.check_integrity()
    while engine.scheduler.has_work:
        plan = engine.plan()
        assert plan == other.plan()
        if plan is None:
            assert engine.apply() == other.apply()
