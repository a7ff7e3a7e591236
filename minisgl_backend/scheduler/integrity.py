"""The proof that the scheduler's books agree: every page and slot once, every count counted anew.

Where it stands in the flow: `Scheduler.check_integrity`, after every operation of a test. Raises AssertionError and
changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from minisgl_backend.cache.node import RadixNode
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.scheduler.lives import Lives
from minisgl_backend.scheduler.sequence import Phase, SequenceState


def check_scheduler(lives: Lives) -> None:
    """Everything that `lives` owns."""
    pages, tree = lives.pages, lives.tree
    extending, decoding = lives.extending.by_arrival(), lives.decoding.by_arrival()
    running = [*extending, *decoding]
    _check_lists(lives.live, extending, decoding)
    for state in lives.live.values():
        state.check(lives.page_size)
    lives.slots.check(state.slot for state in running)
    pages.check((state.pages[state.tree_pages :] for state in running), tree.pages())
    tree.check(state.node for state in running if state.node is not None)
    for state in running:
        _check_table(state, lives.page_size)
    lives.reserve.check(running, pages.free_pages + pages.quarantined_pages + tree.evictable_pages)
    _check_queue(lives)


def _check_queue(lives: Lives) -> None:
    lives.waiting.check()
    lives.deadlines.check()
    waiting = len(lives.live) - lives.running
    assert len(lives.waiting) == waiting, f"{len(lives.waiting)} in the queue, {waiting} are waiting"
    late = sum(state.deadline_s is not None for state in lives.live.values())
    assert len(lives.deadlines) == late, f"{len(lives.deadlines)} deadlines are kept, {late} are to be met"


def _check_lists(
    live: Mapping[SequenceId, SequenceState], extending: list[SequenceState], decoding: list[SequenceState]
) -> None:
    for id, state in live.items():
        assert id == state.id, f"sequence {state.id} is listed as {id}"
    for phase, listed in ((Phase.EXTENDING, extending), (Phase.DECODING, decoding)):
        arrivals = [state.arrival for state in listed]
        assert arrivals == sorted(arrivals), f"the {phase.value} are not in order of arrival: {arrivals}"
        for state in listed:
            assert live.get(state.id) is state, f"sequence {state.id} ended, but is still listed"
            assert state.phase is phase, f"sequence {state.id} ({state.phase.value}) is listed as {phase.value}"
    assert sum(state.phase is not Phase.WAITING for state in live.values()) == len(extending) + len(decoding)


def _check_table(state: SequenceState, page_size: int) -> None:
    """The first pages of a table are those of the way to its node in the tree, and so are their tokens."""
    assert state.node is not None or not state.tree_pages, f"sequence {state.id} shares pages without a lock"
    pages: array[int] = array("i")
    key = bytearray()
    node: RadixNode | None = state.node
    root = node
    while node is not None:
        pages = node.pages + pages
        key = node.key + key
        root, node = node, node.parent
    assert pages == state.pages[: state.tree_pages], f"sequence {state.id} reads pages that are not on its way"
    assert bytes(key) == state.key(0, state.tree_pages, page_size), f"sequence {state.id}: the way of other tokens"
    if root is not None and not isinstance(root.namespace, int):
        assert root.namespace == state.namespace, f"sequence {state.id} is in another's namespace"
