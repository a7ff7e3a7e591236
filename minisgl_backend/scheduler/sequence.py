"""What the scheduler knows of one sequence, from its arrival to its end.

Where it stands in the flow: made by `Scheduler.add`, moved from phase to phase by `lives.py`, its pages shared by
`sharing.py` and let go by `release.py`. The counts of a sequence with a prompt of P tokens, of which at most N new
ones may follow:

    0 ───────────── computed ── known ──────────── stored_tokens ── total_tokens
                    │           │                  │                = P + N: it ends as `length` when known is this
                    │           │                  = P + N - 1: the last token's K/V is never needed
                    │           tokens confirmed: P, and one more with every result
                    tokens whose K/V is stored once every planned step has run: advances in plan()

A row brings `computed` nearer to `known`, and samples when it reaches it. With steps in flight `computed` may be at
or past `known`: the tokens between are in the worker, not yet here. So "N tokens are planned" is
`computed == stored_tokens`, whatever was confirmed. A retraction sets `computed` back to 0, and nothing else.

Its page table, while it has a slot:

    pages   ├── tree_pages: the tree's, locked up to `node` ──┼── its own ──┤
"""

from __future__ import annotations

from array import array
from enum import Enum

from minisgl_backend.cache.node import TOKEN_BYTES, RadixNode
from minisgl_backend.messages.engine import Sequence
from minisgl_backend.messages.ids import SequenceId, SlotId, StepId
from minisgl_backend.messages.sampling import NO_LOGPROBS, Sampling
from minisgl_backend.messages.tokens import count_tokens, pack_tokens


class Phase(Enum):
    """Where a sequence stands; the legal transitions are drawn in docs/scheduler.md."""

    WAITING = "waiting"  # holds nothing: not admitted yet, or retracted
    EXTENDING = "extending"  # holds a slot; part of what it knew at its admission is not planned yet
    DECODING = "decoding"  # holds a slot; all that it knew is planned
    ENDED = "ended"  # holds nothing, said its last word


NO_SLOT = SlotId(-1)
NEVER = 1 << 62
"""`enter_at` of a sequence that shares no further pages."""
ENTER_TOKENS = 4
"""Generated tokens enter the tree at least so many at a time, and whole pages: with pages of one token every row would
enter in every step otherwise, for a quarter of the step's cost. The rest enters when the sequence lets go."""


class SequenceState:
    """Mutable, owned by the scheduler. Plain attributes: the decode path touches five of them per row."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "computed",
        "deadline_s",
        "enter_at",
        "epoch",
        "fresh",
        "id",
        "known",
        "known_at_admission",
        "last_step",
        "limit_pages",
        "namespace",
        "need_pages",
        "node",
        "pages",
        "phase",
        "planned_s",
        "priority",
        "prompt_tokens",
        "room_tokens",
        "sampling",
        "slot",
        "stop_token_ids",
        "stored_tokens",
        "tokens",
        "told_pages",
        "total_tokens",
        "tree_pages",
    )

    def __init__(self, sequence: Sequence, max_new_tokens: int, page_size: int, arrival: int) -> None:
        """`max_new_tokens` ≥ 1 is what the sequence asked for, clipped to what context and pool can hold."""
        known = count_tokens(sequence.prompt)
        self.id: SequenceId = sequence.id
        self.sampling: Sampling = sequence.sampling
        self.stop_token_ids: tuple[int, ...] = sequence.stop_token_ids
        self.priority = sequence.priority
        self.deadline_s = sequence.deadline_s
        self.namespace: bytes = sequence.cache_salt  # pages are shared within it only
        self.arrival = arrival  # 1, 2, 3 … in the order of add()
        self.epoch = 0  # raised at its end: a result planned in an earlier epoch is not for it
        self.phase = Phase.WAITING
        self.prompt_tokens = known - sequence.num_outputs
        self.cached_tokens = -1  # of the prompt, found at the first admission; -1 before it
        self.planned_s = 0.0  # when its first row was planned

        self.tokens: bytes = sequence.prompt  # packed int32: what was known when it was admitted last
        self.fresh: array[int] = array("i")  # what was confirmed since; known = both together
        self.known = known
        self.known_at_admission = known  # tokens in `tokens`
        self.computed = 0
        self.total_tokens = known + max_new_tokens
        self.stored_tokens = self.total_tokens - 1
        self.need_pages = -(-self.stored_tokens // page_size)  # when everything that may come has come
        self.limit_pages = 0  # so many it may find in the tree
        self._limit_pages(page_size)

        self.slot = NO_SLOT
        self.pages: array[int] = array("i")  # its page table: append-only while it has a slot
        self.told_pages = 0  # of them, those that the worker was told
        self.room_tokens = 0  # `computed` may grow to this without another page
        self.last_step = StepId(0)  # the last step that names its slot and pages
        self.node: RadixNode | None = None  # where its lock in the tree ends; None without a slot or without a tree
        self.tree_pages = 0  # the first of `pages`: the tree's
        self.enter_at = NEVER  # when `known` is this, pages of confirmed tokens are to enter the tree

    def refresh(self, page_size: int) -> None:
        """At a retraction, and at an admission, for a token that was in flight meanwhile: what was confirmed belongs to
        what is to be computed again.
        """
        if self.fresh:
            self.tokens += pack_tokens(self.fresh)
            self.fresh = array("i")
            self.known_at_admission = self.known
            self._limit_pages(page_size)

    @property
    def reads_cache(self) -> bool:
        """Whether it may use what others have computed: not when the logits of all of its prompt are asked for."""
        return self.sampling.prompt_logprobs == NO_LOGPROBS

    def _limit_pages(self, page_size: int) -> None:
        """Of `tokens` at least one is computed: its logits are due."""
        self.limit_pages = (self.known - 1) // page_size if self.reads_cache else 0

    def key(self, first_page: int, end_page: int, page_size: int) -> bytes:
        """The packed tokens of pages `first_page` … `end_page` - 1, all known."""
        begin, end, split = first_page * page_size, end_page * page_size, self.known_at_admission
        if begin >= split:
            return pack_tokens(self.fresh[begin - split : end - split])
        old = self.tokens[begin * TOKEN_BYTES : end * TOKEN_BYTES]
        return old if end <= split else old + pack_tokens(self.fresh[: end - split])

    def append_pages(self, pages: array[int], page_size: int) -> None:
        self.pages.extend(pages)
        self.room_tokens = min(len(self.pages) * page_size, self.stored_tokens)

    def append_page(self, page: int, page_size: int) -> None:
        """For a sequence that has filled its pages, and needs one more; the worker is told at once."""
        self.pages.append(page)
        self.told_pages += 1
        room = self.room_tokens + page_size
        self.room_tokens = room if room < self.stored_tokens else self.stored_tokens

    def enter_later(self, page_size: int) -> None:
        """Sets `enter_at` to the next time. The last known token's K/V is not stored yet."""
        self.enter_at = (self.tree_pages + max(1, ENTER_TOKENS // page_size)) * page_size + 1

    def let_go(self) -> None:
        """Slot, pages and lock are somebody else's now. What it knows it keeps."""
        self.slot = NO_SLOT
        self.pages = array("i")
        self.node = None
        self.computed = self.room_tokens = self.told_pages = self.tree_pages = 0
        self.enter_at = NEVER

    def check(self, page_size: int) -> None:
        """Proves that the counts fit together and to the phase."""
        name = f"sequence {self.id} ({self.phase.value})"
        held = len(self.pages)
        room = min(held * page_size, self.stored_tokens)
        assert self.room_tokens == room, f"{name}: room for {self.room_tokens} tokens in {held} pages of {page_size}"
        assert 0 <= self.computed <= room, f"{name}: {self.computed} tokens computed, room for {room}"
        assert held == -(-self.computed // page_size), f"{name}: {held} pages for {self.computed} computed tokens"
        assert held <= self.need_pages, f"{name}: {held} pages held, {self.need_pages} reserved"
        assert self.tree_pages <= held, f"{name}: {self.tree_pages} pages of the tree, {held} held"
        assert self.known < self.total_tokens, f"{name}: all of {self.total_tokens} tokens known, but not ended"
        kept = self.known_at_admission + len(self.fresh)
        assert self.known == kept, f"{name}: {self.known} tokens known, {kept} kept"
        assert len(self.tokens) == self.known_at_admission * TOKEN_BYTES, f"{name}: {len(self.tokens)} bytes of tokens"
        if self.phase is Phase.WAITING:
            assert self.slot == NO_SLOT and not held and not self.computed, f"{name} holds a slot or pages"
            assert self.node is None and self.enter_at == NEVER, f"{name} holds a lock"
        elif self.phase is Phase.EXTENDING:
            assert self.slot != NO_SLOT and 0 < self.computed < self.known, f"{name}: {self.computed} computed"
        else:
            assert self.phase is Phase.DECODING, f"{name} is still listed"
            assert self.slot != NO_SLOT and self.computed >= self.known - 1, f"{name}: {self.computed} computed"
            if self.enter_at != NEVER:
                due = (self.tree_pages + max(1, ENTER_TOKENS // page_size)) * page_size + 1
                assert self.known < self.enter_at == due, f"{name}: pages should enter at {self.enter_at}, not {due}"
