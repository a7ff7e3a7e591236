"""A planner for tests of the worker: writes the BatchPlans that a scheduler would, without deciding anything.

A test says which sequence runs how many tokens; slots, pages and step numbers follow. Pages are handed out in a
scattered order, so that a page table is never the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minisgl_backend.messages.ids import SlotId, StepId
from minisgl_backend.messages.plan import Admission, BatchPlan, PageGrant, StepResult
from minisgl_backend.messages.sampling import GREEDY, Sampling
from minisgl_backend.messages.tokens import pack_tokens


class Planner:
    """Knows of every slot what a scheduler would: tokens known, tokens computed, pages held."""

    def __init__(self, page_size: int, num_pages: int, *, steps_before: int = 0) -> None:
        """steps_before: that the runner has had; its pages are free again."""
        self._page_size = page_size
        self._free = [page for start in range(3) for page in range(start, num_pages, 3)][::-1]
        self._admissions: list[Admission] = []
        self._sampled: list[int] = []
        self._step = steps_before
        self._computed: dict[int, int] = {}
        self._pages: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}  # slot → prompt and outputs

    def admit(self, slot: int, prompt: Sequence[int], sampling: Sampling = GREEDY) -> None:
        """With the next plan. A slot admitted again gives its old pages back first."""
        self._free.extend(reversed(self._pages.get(slot, [])))
        self._admissions.append(Admission(SlotId(slot), pack_tokens(prompt), sampling))
        self.tokens[slot], self._computed[slot], self._pages[slot] = list(prompt), 0, []

    def plan(self, rows: Sequence[tuple[int, int]]) -> BatchPlan:
        """rows: (slot, most tokens to compute). A row that reaches the last known token samples."""
        self._step += 1
        grants, columns = [], []
        self._sampled = []
        for slot, limit in rows:
            start = self._computed[slot]
            length = min(limit, len(self.tokens[slot]) - start)
            end = start + length
            count = -(-end // self._page_size) - len(self._pages[slot])
            pages = [self._free.pop() for _ in range(count)]
            if pages:
                grants.append(PageGrant(SlotId(slot), tuple(pages)))
            self._pages[slot] += pages
            self._computed[slot] = end
            samples = int(end == len(self.tokens[slot]))
            if samples:
                self._sampled.append(slot)
            columns.append((slot, start, length, samples))
        slots, starts, lengths, sampled = zip(*columns, strict=True)
        admissions, self._admissions = tuple(self._admissions), []
        return BatchPlan(StepId(self._step), admissions, tuple(grants), slots, starts, lengths, sampled)

    def apply(self, result: StepResult) -> None:
        """Appends the sampled tokens."""
        assert result.step == self._step and len(result.tokens) == len(self._sampled)
        for slot, token in zip(self._sampled, result.tokens, strict=True):
            self.tokens[slot].append(token)


def generate(
    run: Callable[[BatchPlan], StepResult],
    planner: Planner,
    prompts: Sequence[Sequence[int]],
    num_new: int,
    *,
    chunk_tokens: int = 1 << 20,
    samplings: Sequence[Sampling] | None = None,
) -> list[list[int]]:
    """Runs all prompts together, slot i for prompt i, every step a row of each unfinished one → outputs in order."""
    for slot, prompt in enumerate(prompts):
        planner.admit(slot, prompt, samplings[slot] if samplings else GREEDY)
    goals = [len(prompt) + num_new for prompt in prompts]
    while running := [slot for slot, goal in enumerate(goals) if len(planner.tokens[slot]) < goal]:
        planner.apply(run(planner.plan([(slot, chunk_tokens) for slot in running])))
    return [planner.tokens[slot][len(prompt) :] for slot, prompt in enumerate(prompts)]
