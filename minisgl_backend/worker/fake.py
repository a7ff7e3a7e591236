"""The fake device: a runner without a model and without torch, exact about pages.

It serves load tests of the path (tokens cost `fake_step_ms` a step and nothing else) and tests of the actors. What a
transformer's K/V at a position depends on is all tokens up to it; so every place of the pool holds a hash of those,
written and read through the page table as the real runner does, and the next token is a function of the last one. A
plan that breaks a promise (a page overwritten, never written, a row that leaves a gap) ends in an AssertionError.
"""

from __future__ import annotations

import math
import sys
import time
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from minisgl_backend.config import EngineConfig
from minisgl_backend.kvpool.sizing import bytes_per_page, pages_in
from minisgl_backend.messages.plan import BatchPlan, Logprobs, StepResult
from minisgl_backend.messages.sampling import Sampling
from minisgl_backend.messages.tokens import pack_tokens, unpack_tokens
from minisgl_backend.models.spec import ModelSpec

DEFAULT_VOCABULARY = range(20, 2000)
DEFAULT_PAGES = 4096

_MASK = (1 << 64) - 1
_UNWRITTEN = 0


@dataclass(slots=True)
class _Slot:
    """One life of a slot."""

    tokens: list[int]
    sampling: Sampling
    output_start: int  # tokens before are the prompt that came at first
    table: list[int] = field(default_factory=list)
    hashes: array[int] = field(default_factory=lambda: array("Q"))  # what places 0, 1, … must hold
    written: int | None = None  # places whose K/V are in the pool; None before the first row


class FakeRunner:
    """See StepRunner. Tokens are drawn from `vocabulary` without `reserved` (end-of-sequence ids, so that no sequence
    ends by itself); of the sampling parameters only logprobs are of consequence, see fake_logprobs.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        vocabulary: Iterable[int] = DEFAULT_VOCABULARY,
        reserved: Collection[int] = (),
        num_pages: int = DEFAULT_PAGES,
    ) -> None:
        self._choices = tuple(token for token in vocabulary if token not in reserved)
        self._num_pages = num_pages
        self._page_size = config.page_size
        self._max_running = config.max_running
        self._token_budget = config.token_budget
        self._step_s = config.fake_step_ms / 1000.0
        self._pool = array("Q", bytes(8 * num_pages * config.page_size))
        self._slots: dict[int, _Slot] = {}
        self._last_step = 0

    @property
    def num_pages(self) -> int:
        return self._num_pages

    def warm_up(self) -> None:
        """There is nothing to load."""
        assert self._last_step == 0, "warm-up after the first plan"

    def launch(self, plan: BatchPlan) -> StepResult:
        return self.run(plan)

    def run(self, plan: BatchPlan) -> StepResult:
        assert plan.step == self._last_step + 1, f"step {plan.step} after step {self._last_step}"
        self._last_step = plan.step
        self._take_changes(plan)
        rows = list(zip(plan.row_slots, plan.row_starts, plan.row_lengths, plan.row_samples, strict=True))
        self._check_rows(rows)
        for slot, start, length, _ in rows:
            self._write(self._slots[slot], slot, start, start + length)
        tokens = []
        logprobs = []
        prompts = []
        for slot, start, length, sample in rows:
            state, end = self._slots[slot], start + length
            last = self._read(state, slot, end)
            asked = state.tokens[start + 1 : min(end + 1, state.output_start)]
            if asked and state.sampling.prompt_logprobs >= 0:
                prompts.append(fake_logprobs(start + 1, asked, state.sampling.prompt_logprobs, self._choices))
            if sample:
                token = _token_of(last, self._choices)
                state.tokens.append(token)
                tokens.append(token)
                if state.sampling.logprobs >= 0:
                    logprobs.append(fake_logprobs(end, [token], state.sampling.logprobs, self._choices))
        if self._step_s:
            time.sleep(self._step_s)
        return StepResult(plan.step, tuple(tokens), "", tuple(logprobs), tuple(prompts))

    def close(self) -> None:
        self._slots.clear()

    def _take_changes(self, plan: BatchPlan) -> None:
        for admission in plan.admissions:
            assert 0 <= admission.slot < self._max_running, f"slot {admission.slot} of {self._max_running}"
            prompt = list(unpack_tokens(admission.prompt))
            self._slots[admission.slot] = _Slot(prompt, admission.sampling, len(prompt) - admission.num_outputs)
        for grant in plan.grants:
            table = self._slots[grant.slot].table
            assert all(0 <= page < self._num_pages for page in grant.pages), f"slot {grant.slot}: no such page"
            table.extend(grant.pages)
            assert len(set(table)) == len(table), f"slot {grant.slot}: a page is twice in its table"

    def _check_rows(self, rows: Sequence[tuple[int, int, int, int]]) -> None:
        assert len({row[0] for row in rows}) == len(rows), "a slot in two rows"
        assert sum(row[2] for row in rows) <= self._token_budget, "more tokens than the budget"
        for slot, start, length, sample in rows:
            state = self._slots[slot]
            end = start + length
            assert length >= 1, f"slot {slot}: a row without tokens"
            size, written = self._page_size, start if state.written is None else state.written
            onto_shared = start > written and not start % size and not written % size  # pages that others have filled
            assert start == written or onto_shared, f"slot {slot}: row starts at {start}, written are {written}"
            assert end <= len(state.tokens), f"slot {slot}: row computes a token that is not known"
            assert sample in (0, 1) and (not sample or end == len(state.tokens)), f"slot {slot}: samples too early"
            assert end <= len(state.table) * self._page_size, f"slot {slot}: row ends beyond its pages"

    def _write(self, state: _Slot, slot: int, start: int, end: int) -> None:
        hashes = state.hashes
        for position in range(len(hashes), end):
            hashes.append(_extend(hashes[position - 1] if position else _UNWRITTEN, state.tokens[position]))
        size = self._page_size
        for position in range(start, end):
            self._pool[state.table[position // size] * size + position % size] = hashes[position]
        state.written = end

    def _read(self, state: _Slot, slot: int, end: int) -> int:
        """Every place of the row through its page table; returns what the last one holds."""
        size, pool, hashes = self._page_size, self._pool, state.hashes
        for index in range(-(-end // size)):
            begin, count = index * size, min(size, end - index * size)
            at = state.table[index] * size
            if pool[at : at + count] != hashes[begin : begin + count]:
                held = pool[at : at + count]
                fault = "never written" if _UNWRITTEN in held else "written by somebody else"
                raise AssertionError(f"slot {slot}: page {state.table[index]} (place {index} of its table) is {fault}")
        return pool[state.table[(end - 1) // size] * size + (end - 1) % size]


def fake_continuation(
    prompt: Iterable[int],
    count: int,
    vocabulary: Iterable[int] = DEFAULT_VOCABULARY,
    reserved: Collection[int] = (),
) -> list[int]:
    """What a FakeRunner must answer to a prompt: `count` tokens, computed alone and without pages."""
    choices = tuple(token for token in vocabulary if token not in reserved)
    state = _UNWRITTEN
    for token in prompt:
        state = _extend(state, token)
    answer: list[int] = []
    for _ in range(count):
        answer.append(_token_of(state, choices))
        state = _extend(state, answer[-1])
    return answer


def fake_logprobs(position: int, tokens: Sequence[int], best: int, choices: Sequence[int]) -> Logprobs:
    """What a FakeRunner tells of `tokens`, the first at `position`: each had half of the probability, and whoever comes
    after it in the vocabulary a quarter, an eighth, …
    """
    ids: list[int] = []
    values: array[float] = array("f")
    for token in tokens:
        first = bisect_left(choices, token)
        likely = [token, *(choices[(first + place) % len(choices)] for place in range(1, min(best, len(choices))))][
            :best
        ]
        ids += [token, *likely]
        values.extend([-math.log(2), *(-math.log(2) * (place + 1) for place in range(len(likely)))])
    if sys.byteorder != "little":
        values.byteswap()
    return Logprobs(position, pack_tokens(ids), values.tobytes(), pack_tokens([1] * len(tokens)))


def build_fake_runner(config: EngineConfig, spec: ModelSpec) -> FakeRunner:
    """For device "fake": the model's vocabulary as far as it goes, its end tokens reserved. See build_runner."""
    vocabulary = range(
        min(DEFAULT_VOCABULARY.start, spec.vocab_size // 2), min(DEFAULT_VOCABULARY.stop, spec.vocab_size)
    )
    num_pages = DEFAULT_PAGES
    if config.kv_bytes:
        wide = config.dtype == "fp32" or (config.dtype == "auto" and spec.dtype == "float32")
        size = bytes_per_page(spec.num_layers, spec.num_kv_heads, spec.head_dim, 4 if wide else 2, config.page_size)
        num_pages = pages_in(config.kv_bytes, size, source=f"setting 'kv_bytes' = {config.kv_bytes:,}")
    return FakeRunner(config, vocabulary=vocabulary, reserved=spec.eos_token_ids, num_pages=num_pages)


def _extend(state: int, token: int) -> int:
    """Hash of tokens 0 … n from that of 0 … n - 1 and token n; never _UNWRITTEN. splitmix64's finaliser."""
    state = (state + 0x9E3779B97F4A7C15 * (token + 1)) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return (state ^ (state >> 31)) or 1


def _token_of(state: int, choices: Sequence[int]) -> int:
    return choices[state % len(choices)]
