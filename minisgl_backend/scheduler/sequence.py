"""What the scheduler knows of one sequence, from its arrival to its end.

Where it stands in the flow: made by `Scheduler.add`, moved from phase to phase by `scheduler.py`, emptied by
`release.py`. The counts of a sequence with a prompt of P tokens, of which at most N new ones may follow:

    0 ───────────── computed ── known ──────────── stored_tokens ── total_tokens
                    │           │                  │                = P + N: it ends as `length` when known is this
                    │           │                  = P + N - 1: the last token's K/V is never needed
                    │           tokens confirmed: P, and one more with every result
                    tokens whose K/V is stored once every planned step has run: advances in plan()

A row brings `computed` nearer to `known`, and samples when it reaches it. With steps in flight `computed` may be at
or past `known`: the tokens between are in the worker, not yet here. So "N tokens are planned" is
`computed == stored_tokens`, whatever was confirmed.
"""

from __future__ import annotations

from array import array
from enum import Enum

from minisgl_backend.messages.engine import Sequence
from minisgl_backend.messages.ids import SequenceId, SlotId, StepId
from minisgl_backend.messages.sampling import Sampling
from minisgl_backend.messages.tokens import count_tokens


class Phase(Enum):
    """Where a sequence stands; the legal transitions are drawn in docs/scheduler.md."""

    WAITING = "waiting"  # holds nothing
    EXTENDING = "extending"  # holds a slot; part of its prompt is not planned yet
    DECODING = "decoding"  # holds a slot; its whole prompt is planned
    ENDED = "ended"  # holds nothing, said its last word


NO_SLOT = SlotId(-1)


class SequenceState:
    """Mutable, owned by the scheduler. Plain attributes: the decode path touches five of them per row."""

    __slots__ = (
        "arrival",
        "computed",
        "epoch",
        "id",
        "known",
        "last_step",
        "need_pages",
        "pages",
        "phase",
        "planned_s",
        "prompt",
        "prompt_tokens",
        "room_tokens",
        "sampling",
        "slot",
        "stop_token_ids",
        "stored_tokens",
        "total_tokens",
    )

    def __init__(self, sequence: Sequence, max_new_tokens: int, page_size: int, arrival: int) -> None:
        """`max_new_tokens` ≥ 1 is what the sequence asked for, clipped to what context and pool can hold."""
        prompt_tokens = count_tokens(sequence.prompt)
        self.id: SequenceId = sequence.id
        self.prompt: bytes = sequence.prompt  # packed int32
        self.sampling: Sampling = sequence.sampling
        self.stop_token_ids: tuple[int, ...] = sequence.stop_token_ids
        self.arrival = arrival  # 1, 2, 3 … in the order of add()
        self.epoch = 0  # raised at its end: a result planned in an earlier epoch is not for it
        self.phase = Phase.WAITING
        self.prompt_tokens = prompt_tokens
        self.planned_s = 0.0  # when its first row was planned
        self.known = prompt_tokens
        self.computed = 0
        self.total_tokens = prompt_tokens + max_new_tokens
        self.stored_tokens = self.total_tokens - 1
        self.need_pages = -(-self.stored_tokens // page_size)  # when everything that may come has come
        self.slot = NO_SLOT
        self.pages: array[int] = array("i")  # its page table: append-only while it has a slot
        self.room_tokens = 0  # `computed` may grow to this without another page
        self.last_step = StepId(0)  # the last step that names its slot and pages

    def append_pages(self, pages: array[int], page_size: int) -> None:
        self.pages.extend(pages)
        self.room_tokens = min(len(self.pages) * page_size, self.stored_tokens)

    def append_page(self, page: int, page_size: int) -> None:
        """For a sequence that has filled its pages, and needs one more."""
        self.pages.append(page)
        room = self.room_tokens + page_size
        self.room_tokens = room if room < self.stored_tokens else self.stored_tokens

    def check(self, page_size: int) -> None:
        """Proves that the counts fit together and to the phase."""
        name = f"sequence {self.id} ({self.phase.value})"
        held = len(self.pages)
        room = min(held * page_size, self.stored_tokens)
        assert self.room_tokens == room, f"{name}: room for {self.room_tokens} tokens in {held} pages of {page_size}"
        assert 0 <= self.computed <= room, f"{name}: {self.computed} tokens computed, room for {room}"
        assert held == -(-self.computed // page_size), f"{name}: {held} pages for {self.computed} computed tokens"
        assert held <= self.need_pages, f"{name}: {held} pages held, {self.need_pages} reserved"
        assert self.known < self.total_tokens, f"{name}: all of {self.total_tokens} tokens known, but not ended"
        if self.phase is Phase.WAITING:
            assert self.slot == NO_SLOT and not held and not self.computed, f"{name} holds a slot or pages"
        elif self.phase is Phase.EXTENDING:
            assert self.slot != NO_SLOT and 0 < self.computed < self.known, f"{name}: {self.computed} computed"
        else:
            assert self.phase is Phase.DECODING, f"{name} is still listed"
            assert self.slot != NO_SLOT and self.computed >= self.known - 1, f"{name}: {self.computed} computed"
