"""A worker without a model, exact to the page: it computes what a transformer's K/V depend on, and nothing else.

Where it stands in the flow: takes the BatchPlans of a scheduler under test and gives StepResults, as
`actors/worker.py` does. Its model has two layers of "K/V" in a paged pool. Layer 0 of a token depends on token and
position; layer 1 on layer 0 of all tokens up to it; the next token on layer 1 of all tokens and the seed: all read
through the page table. So a wrong page, a page overwritten by somebody else, or a row computed twice or never changes
the tokens that come out. Within a step each layer writes all rows before any row reads, as the real one does.

What tokens can not show while steps run in order is asserted, when a plan is submitted:

- a slot, and a page that its sequence will write, is handed out only when no unapplied step names it;
- tables only grow, and a row starts where the last one ended. It may skip ahead only from one page boundary to another
  over pages that were granted with it: those are shared, somebody else computes them;
- nobody writes a page that somebody shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from minisgl_backend.messages.plan import NO_TOKEN, BatchPlan, Logprobs, StepResult
from minisgl_backend.messages.sampling import Sampling
from minisgl_backend.messages.tokens import pack_tokens, unpack_tokens

VOCABULARY = 23
FAILING_SEED = 1 << 62
"""A sequence whose seed has this bit fails sooner or later: now and then its row gives NO_TOKEN."""

_MASK = (1 << 61) - 1


def _fold(total: int, entry: int) -> int:
    return ((total ^ entry) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK


def _layer0(token: int, position: int) -> int:
    return _fold(token + 1, position)


def _next_token(total: int, sampling: Sampling, position: int) -> int:
    drawn = _fold(_fold(total, sampling.seed), position) >> 7
    if sampling.seed & FAILING_SEED and drawn % 5 == 0:
        return NO_TOKEN
    return drawn % VOCABULARY


def solo_run(
    prompt: Iterable[int], sampling: Sampling, max_new_tokens: int, stop_token_ids: Sequence[int]
) -> tuple[list[int], str]:
    """What must come out of a sequence, computed alone and without pages: its tokens and the reason of its end."""
    tokens = list(prompt)
    prompt_tokens = len(tokens)
    below = above = 0  # layer 0 and layer 1 of all tokens so far, folded
    for position, token in enumerate(tokens):
        below = _fold(below, _layer0(token, position))
        above = _fold(above, below)
    while True:
        token = _next_token(above, sampling, len(tokens))
        if token == NO_TOKEN:
            return tokens[prompt_tokens:], "failed"
        tokens.append(token)
        if token in stop_token_ids:
            return tokens[prompt_tokens:], "stop"
        if len(tokens) == prompt_tokens + max_new_tokens:
            return tokens[prompt_tokens:], "length"
        below = _fold(below, _layer0(token, len(tokens) - 1))
        above = _fold(above, below)


def logprobs_of(position: int, tokens: Sequence[int]) -> Logprobs:
    """What is told of tokens that follow each other, the first at `position`: their ids are right, the rest empty."""
    return Logprobs(position, pack_tokens([max(token, 0) for token in tokens]), b"", b"")


@dataclass
class _Slot:
    """What a worker keeps per slot."""

    tokens: list[int]
    sampling: Sampling
    output_start: int  # tokens before are the prompt that came at first
    given: int = 0  # tokens that came with the admission
    table: list[int] = field(default_factory=list)
    planned: int = 0  # tokens whose K/V the rows submitted up to now write or share
    known: int = 0  # tokens, those included that submitted rows will sample


@dataclass
class _Named:
    """What an unapplied step names."""

    slots: set[int]
    pages: set[int]


class FakeWorker:
    """Runs plans in the order in which they were submitted.

    With `early_uploads`, new prompts and page tables take effect when a plan is submitted, under the feet of the
    steps before it that have not run yet: legal as long as the scheduler keeps its word.
    """

    def __init__(
        self, *, page_size: int, num_pages: int, max_running: int, token_budget: int, early_uploads: bool = False
    ) -> None:
        self._page_size = page_size
        self._num_pages = num_pages
        self._max_running = max_running
        self._token_budget = token_budget
        self._early_uploads = early_uploads
        self._pools = [[0] * (num_pages * page_size) for _ in range(2)]  # one per layer
        self._slots: dict[int, _Slot] = {}  # as the next submitted plan will find them
        self._uploaded: dict[int, _Slot] = {}  # as the rows that run now see them
        self._queue: list[BatchPlan] = []
        self._broken: set[int] = set()  # slots whose state a failed step has spoilt, until they are admitted anew
        self._unapplied: dict[int, _Named] = {}
        self._shared: set[int] = set()  # pages that a slot has read without writing them, until handed out anew
        self._submitted = 0
        self.prefill_tokens = 0  # of what came with admissions, computed by all rows submitted: without what was shared

    def submit(self, plan: BatchPlan) -> None:
        """Checks a plan against everything the contract says, and queues it."""
        self._submitted += 1
        assert plan.step == self._submitted, f"step {plan.step} after step {self._submitted - 1}"
        for admission in plan.admissions:
            assert 0 <= admission.slot < self._max_running, f"slot {admission.slot} does not exist"
            for step, named in self._unapplied.items():
                assert admission.slot not in named.slots, f"slot {admission.slot} handed out, step {step} names it"
            tokens = list(unpack_tokens(admission.prompt))
            start = len(tokens) - admission.num_outputs
            self._slots[admission.slot] = _Slot(tokens, admission.sampling, start, len(tokens), known=len(tokens))
        starts = dict(zip(plan.row_slots, plan.row_starts, strict=True))
        shared: set[int] = set()
        for grant in plan.grants:
            shared |= self._check_grant(grant.slot, grant.pages, starts.get(grant.slot))
            self._slots[grant.slot].table.extend(grant.pages)
        self._check_rows(plan)
        self._shared |= shared  # from the next step on: in this one their owner may still write them
        self._unapplied[plan.step] = _Named(
            set(plan.row_slots), {page for slot in plan.row_slots for page in self._slots[slot].table}
        )
        self._queue.append(plan)
        if self._early_uploads:
            self._upload(plan)

    def run(self) -> StepResult:
        """Runs the oldest submitted plan."""
        plan = self._queue.pop(0)
        if not self._early_uploads:
            self._upload(plan)
        if self._broken & set(plan.row_slots):
            return StepResult(plan.step, (), "a step before it failed")
        rows = [
            (self._uploaded[slot], start, length)
            for slot, start, length in zip(plan.row_slots, plan.row_starts, plan.row_lengths, strict=True)
        ]
        for slot, start, length in rows:
            for position in range(start, start + length):
                self._write(0, slot, position, _layer0(slot.tokens[position], position))
        self._attend_and_write(rows)
        tokens, logprobs, prompts = [], [], []
        for (slot, start, length), samples in zip(rows, plan.row_samples, strict=True):
            end = start + length
            asked = slot.tokens[start + 1 : min(end + 1, slot.output_start)]
            if asked and slot.sampling.prompt_logprobs >= 0:
                prompts.append(logprobs_of(start + 1, asked))
            if samples:
                token = _next_token(self._folded(1, slot, end), slot.sampling, end)
                slot.tokens.append(max(token, 0))
                tokens.append(token)
                if slot.sampling.logprobs >= 0:
                    logprobs.append(logprobs_of(end, [token]))
        return StepResult(plan.step, tuple(tokens), "", tuple(logprobs), tuple(prompts))

    def fail(self) -> StepResult:
        """Fails the oldest submitted plan in the worst way: what it should have written is nonsense."""
        plan = self._queue.pop(0)
        if not self._early_uploads:
            self._upload(plan)
        for number, start, length in zip(plan.row_slots, plan.row_starts, plan.row_lengths, strict=True):
            for position in range(start, start + length):
                for layer in range(2):
                    self._write(layer, self._uploaded[number], position, _fold(plan.step, position))
        later = {admission.slot for queued in self._queue for admission in queued.admissions}
        self._broken |= set(self._uploaded) - later
        self._slots = {slot: self._slots[slot] for slot in sorted(later)}  # whoever else goes on must be admitted anew
        return StepResult(plan.step, (), "out of memory")

    def table(self, slot: int) -> list[int]:
        """The page table of a slot, with the grants of all submitted plans."""
        return self._slots[slot].table

    def applied(self, step: int) -> None:
        """The scheduler has applied the result of `step`."""
        del self._unapplied[step]

    def _check_grant(self, slot: int, pages: tuple[int, ...], start: int | None) -> set[int]:
        """Checks the pages that are granted to a slot whose row starts at `start`; those that it shares."""
        assert slot in self._slots, f"pages for slot {slot}, which was never admitted"
        assert pages, "a grant of no pages"
        assert start is not None, f"pages for slot {slot}, which has no row in the step"
        table = self._slots[slot].table
        shares = max(0, start // self._page_size - len(table))  # the row does not write them
        for page in pages:
            assert 0 <= page < self._num_pages, f"page {page} does not exist"
            assert page not in table, f"page {page} is in the table of slot {slot} already"
        for page in pages[shares:]:
            for step, named in self._unapplied.items():
                assert page not in named.pages, f"page {page} handed out, step {step} names it"
            self._shared.discard(page)
        assert len(set(pages)) == len(pages), f"slot {slot} gets a page twice: {pages}"
        return set(pages[:shares])

    def _check_rows(self, plan: BatchPlan) -> None:
        assert 1 <= len(plan.row_slots) <= self._max_running, f"{len(plan.row_slots)} rows"
        assert len(set(plan.row_slots)) == len(plan.row_slots), "a slot has two rows in one step"
        assert sum(plan.row_lengths) <= self._token_budget, f"{sum(plan.row_lengths)} tokens in a step"
        written: dict[int, int] = {}  # page → slot
        for number, start, length, samples in zip(
            plan.row_slots, plan.row_starts, plan.row_lengths, plan.row_samples, strict=True
        ):
            slot = self._slots[number]
            end = start + length
            assert start == slot.planned or self._may_skip(slot, start), (
                f"slot {number}: row starts at {start}, the last ended at {slot.planned}"
            )
            assert length >= 1 and end <= slot.known, f"slot {number}: row to {end}, {slot.known} tokens known"
            assert samples == (end == slot.known), f"slot {number}: samples {samples}, {end} of {slot.known} tokens"
            assert end <= len(slot.table) * self._page_size, f"slot {number}: no page for token {end - 1}"
            for page in slot.table[start // self._page_size : -(-end // self._page_size)]:
                assert page not in self._shared, f"slot {number} writes page {page}, which somebody shares"
                assert written.setdefault(page, number) == number, f"two slots write page {page} in one step"
            self.prefill_tokens += max(0, min(end, slot.given) - start)
            slot.planned = end
            slot.known += samples

    def _may_skip(self, slot: _Slot, start: int) -> bool:
        """Over whole pages that somebody else computes."""
        return start > slot.planned and start % self._page_size == 0 == slot.planned % self._page_size

    def _upload(self, plan: BatchPlan) -> None:
        for admission in plan.admissions:
            self._broken.discard(admission.slot)
            tokens = list(unpack_tokens(admission.prompt))
            start = len(tokens) - admission.num_outputs
            self._uploaded[admission.slot] = _Slot(tokens, admission.sampling, start)
        for grant in plan.grants:
            self._uploaded[grant.slot].table.extend(grant.pages)

    def _attend_and_write(self, rows: list[tuple[_Slot, int, int]]) -> None:
        for slot, start, length in rows:
            total = self._folded(0, slot, start)
            for position in range(start, start + length):
                total = _fold(total, self._read(0, slot, position))
                self._write(1, slot, position, total)

    def _folded(self, layer: int, slot: _Slot, end: int) -> int:
        total = 0
        for position in range(end):
            total = _fold(total, self._read(layer, slot, position))
        return total

    def _place(self, slot: _Slot, position: int) -> int:
        page, offset = divmod(position, self._page_size)
        return slot.table[page] * self._page_size + offset

    def _read(self, layer: int, slot: _Slot, position: int) -> int:
        return self._pools[layer][self._place(slot, position)]

    def _write(self, layer: int, slot: _Slot, position: int, entry: int) -> None:
        self._pools[layer][self._place(slot, position)] = entry
