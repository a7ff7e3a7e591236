"""The runner, fed with plans: a step after the other, and each launched before the tokens of the last one are known."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from load.bench.gpu_stand import PAGE_TOKENS, Stand
from minisgl_backend.messages.ids import SlotId, StepId
from minisgl_backend.messages.plan import NO_TOKEN, Admission, BatchPlan, PageGrant, StepResult
from minisgl_backend.messages.sampling import GREEDY, Sampling
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.worker.decode_graphs import DecodeGraphs
from minisgl_backend.worker.runner import Launched, StepRunner

_PROMPTS_AT_ONCE = 8
SAMPLED = Sampling(temperature=0.8, top_k=50, top_p=0.9, seed=3, sample_index=0)


class Plans:
    """Of slots 0 … rows - 1, all alike, with pages of their own for a whole context."""

    def __init__(self, rows: int, context_tokens: int, vocab: int, sampling: Sampling) -> None:
        self._rows, self._vocab, self._sampling = rows, vocab, sampling
        self._slot_pages = -(-context_tokens // PAGE_TOKENS)
        self._step = 0
        self._known = 0

    def prompts(self, tokens: int) -> list[BatchPlan]:
        """Some rows a step."""
        plans = []
        for first in range(0, self._rows, _PROMPTS_AT_ONCE):
            slots = range(first, min(first + _PROMPTS_AT_ONCE, self._rows))
            admissions = tuple(Admission(SlotId(slot), self._text(slot, tokens), self._sampling) for slot in slots)
            grants = tuple(PageGrant(SlotId(slot), self._pages(slot)) for slot in slots)
            plans.append(self._plan(slots, 0, tokens, admissions, grants))
        self._known = tokens
        return plans

    def decode(self, steps: int) -> list[BatchPlan]:
        """All rows, a token each."""
        plans = [self._plan(range(self._rows), self._known + step, 1) for step in range(steps)]
        self._known += steps
        return plans

    def _plan(
        self,
        slots: Sequence[int],
        start: int,
        length: int,
        admissions: tuple[Admission, ...] = (),
        grants: tuple[PageGrant, ...] = (),
    ) -> BatchPlan:
        self._step += 1
        every = len(slots)
        columns = (tuple(slots), (start,) * every, (length,) * every, (1,) * every)
        return BatchPlan(StepId(self._step), admissions, grants, *columns)

    def _pages(self, slot: int) -> tuple[int, ...]:
        return tuple(range(slot * self._slot_pages, (slot + 1) * self._slot_pages))

    def _text(self, slot: int, tokens: int) -> bytes:
        return pack_tokens([(slot * 7919 + at * 104729 + 11) % self._vocab for at in range(tokens)])


def one_after_another(runner: StepRunner, plans: Iterable[BatchPlan]) -> list[tuple[int, ...]]:
    """→ the tokens of each step."""
    return [runner.run(plan).tokens for plan in plans]


def one_ahead(runner: StepRunner, plans: Iterable[BatchPlan]) -> list[tuple[int, ...]]:
    """The same, each launched before the last one's tokens are asked for."""
    tokens, before = [], None
    for plan in plans:
        launched = runner.launch(plan)
        if before is not None:
            tokens.append(result_of(before).tokens)
        before = launched
    return tokens if before is None else [*tokens, result_of(before).tokens]


def result_of(launched: Launched) -> StepResult:
    """Waits for it."""
    return launched if isinstance(launched, StepResult) else launched.result()


def runner_case(
    stand: Stand, graphs: DecodeGraphs, rows: int, prompt: int, steps: int, sampling: Sampling = GREEDY
) -> dict[str, Any]:
    """Both ways over the same plans: the tokens must be the same. Milliseconds of a step, and the idle share."""
    found: dict[str, Any] = {}
    tokens: dict[str, list[tuple[int, ...]]] = {}
    for name, way in (("serial", one_after_another), ("ahead", one_ahead)):
        runner = stand.runner(graphs, max_running=rows, token_budget=_PROMPTS_AT_ONCE * prompt)
        plans = Plans(rows, prompt + 3 * steps + PAGE_TOKENS, stand.spec.vocab_size, sampling)
        tokens[name] = way(runner, plans.prompts(prompt)) + way(runner, plans.decode(steps))  # also a warm-up
        measured, profiled = plans.decode(steps), plans.decode(steps)
        stand.device.synchronize()
        began = time.perf_counter()
        tokens[name] += way(runner, measured)
        found[f"{name}_ms"] = round((time.perf_counter() - began) / steps * 1e3, 4)
        if stand.device.torch_device.type == "cuda":
            idle, more = idle_share(lambda way=way, runner=runner, plans=profiled: way(runner, plans))
            found[f"{name}_idle"] = idle
            tokens[name] += more
    assert tokens["serial"] == tokens["ahead"], "steps launched ahead give other tokens"
    assert all(token != NO_TOKEN for step in tokens["serial"] for token in step), "logits that are not finite"
    return {**found, "serial_of_ahead": round(found["serial_ms"] / found["ahead_ms"], 3)}


def idle_share(work: Any) -> tuple[float, list[tuple[int, ...]]]:
    """→ the part of the time, from the first kernel to the last, in which no kernel ran, and what work returned."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        tokens: list[tuple[int, ...]] = work()
        torch.cuda.synchronize()
    return idle_of(spans_of(profile)), tokens


def spans_of(profile: Any) -> list[tuple[float, float]]:
    """(begin, end) of everything that ran on the GPU, copies too."""
    events = [event for event in profile.events() if str(event.device_type).endswith("CUDA")]
    return [(event.time_range.start, event.time_range.end) for event in events]


def idle_of(spans: Sequence[tuple[float, float]]) -> float:
    """Of spans that may overlap: the share of the time from the first begin to the last end that none covers."""
    assert spans, "the profiler saw nothing on the GPU"
    ordered = sorted(spans)
    begin = reached = ordered[0][0]
    idle = 0.0
    for start, end in ordered:
        idle += max(start - reached, 0.0)
        reached = max(reached, end)
    return round(idle / max(reached - begin, 1e-9), 4)
