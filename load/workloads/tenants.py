"""A generated workload of many tenants: shared system prompts, trees of examples, conversations of several turns.

Where it stands in the flow: `load/bench/scheduler.py` and tests run it on a simulated device. Answers are part of the
workload, because a later turn's prompt holds the answers before it. The same seed gives the same workload.

    system prompt ──┬── examples ──┬── more examples ──┬── question
    (a tenant's)    │  (a task's)  │   (a variant's)   ├── question ── answer ── question
                    └── examples   └── more examples   └── …
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

STOP_TOKEN = 1
"""The last token of an answer that is shorter than `max_new_tokens`; at no other place of an answer."""

_FIRST_TOKEN, _VOCABULARY = 2, 30_000
TokenRange = tuple[int, int]


@dataclass(frozen=True)
class Request:
    """One prompt and the answer that the device will give to it."""

    number: int  # its place in the workload: 0, 1, …
    tenant: int
    after: int | None  # the number of the request that must have ended before: a conversation's last turn
    arrival_s: float  # from the start of the run, or from the end of `after`
    prompt: tuple[int, ...]
    answer: tuple[int, ...]  # at most max_new_tokens; its last is STOP_TOKEN when it is shorter
    max_new_tokens: int
    priority: int  # 0: somebody waits for it; 1: it may wait


@dataclass(frozen=True)
class Shape:
    """What is drawn, in tokens: each range uniformly, ends included."""

    tenants: int = 24
    tasks: int = 3  # of a tenant
    variants: int = 2  # of a task
    requests: int = 800
    arrivals_s: float = 2.0  # all first turns arrive within this time
    system: TokenRange = (200, 600)
    examples: TokenRange = (100, 400)
    more_examples: TokenRange = (50, 200)
    question: TokenRange = (10, 100)
    answer: TokenRange = (1, 64)
    max_new_tokens: int = 64
    turns: TokenRange = (1, 4)  # of a conversation
    think_s: tuple[float, float] = (0.5, 3.0)  # between an answer and the next question
    urgent_share: float = 0.25  # of the tenants


def generate(shape: Shape, seed: int) -> list[Request]:
    """All requests; first turns in the order of their arrival, a later turn after the one before it."""
    chance = random.Random(seed)
    prefixes = [_tenant_prefixes(shape, chance) for _ in range(shape.tenants)]
    popularity = [1.0 / rank for rank in range(1, shape.tenants + 1)]
    requests: list[Request] = []
    while len(requests) < shape.requests:
        tenant = chance.choices(range(shape.tenants), popularity)[0]
        urgent = tenant < shape.tenants * shape.urgent_share
        conversation = _conversation(shape, chance, tenant, chance.choice(prefixes[tenant]), 0 if urgent else 1)
        requests += conversation[: shape.requests - len(requests)]
    return _numbered(requests)


def distinct_tokens(requests: list[Request]) -> int:
    """Prompt tokens that a cache without bounds must compute: each prefix once, answers not again."""
    seen: set[int] = set()
    computed = 0
    for request in requests:
        before, prefix = len(seen), 0
        for token in request.prompt:
            prefix = hash((prefix, token))
            seen.add(prefix)
        computed += len(seen) - before
        for token in request.answer:
            prefix = hash((prefix, token))
            seen.add(prefix)
    return computed


def _tenant_prefixes(shape: Shape, chance: random.Random) -> list[tuple[int, ...]]:
    """What a tenant's questions are put behind: one prefix per variant of a task."""
    system = draw_tokens(shape.system, chance)
    prefixes = []
    for _ in range(shape.tasks):
        task = system + draw_tokens(shape.examples, chance)
        prefixes += [task + draw_tokens(shape.more_examples, chance) for _ in range(shape.variants)]
    return prefixes


def _conversation(
    shape: Shape, chance: random.Random, tenant: int, prefix: tuple[int, ...], priority: int
) -> list[Request]:
    """The turns of one conversation; `number` and `after` count within it."""
    turns: list[Request] = []
    arrival_s = chance.uniform(0.0, shape.arrivals_s)
    prompt = prefix
    for turn in range(chance.randint(*shape.turns)):
        prompt += draw_tokens(shape.question, chance)
        answer = scripted_answer(chance.randint(*shape.answer), shape.max_new_tokens, chance)
        after = turn - 1 if turn else None
        turns.append(Request(turn, tenant, after, arrival_s, prompt, answer, shape.max_new_tokens, priority))
        prompt += answer
        arrival_s = chance.uniform(*shape.think_s)
    return turns


def _numbered(requests: list[Request]) -> list[Request]:
    """Numbers over the whole workload; conversations by the arrival of their first turn."""
    starts = [index for index, request in enumerate(requests) if request.after is None]
    ends = [*starts[1:], len(requests)]
    conversations = sorted((requests[start].arrival_s, start, end) for start, end in zip(starts, ends, strict=True))
    numbered: list[Request] = []
    for _, start, end in conversations:
        first = len(numbered)
        for request in requests[start:end]:
            after = None if request.after is None else first + request.after
            numbered.append(replace(request, number=len(numbered), after=after))
    return numbered


def scripted_answer(length: int, max_new_tokens: int, chance: random.Random) -> tuple[int, ...]:
    """`length` tokens, the last of them STOP_TOKEN unless they are all that may come."""
    tokens = draw_tokens((length, length), chance)
    return tokens if length == max_new_tokens else (*tokens[:-1], STOP_TOKEN)


def draw_tokens(lengths: TokenRange, chance: random.Random) -> tuple[int, ...]:
    """As many tokens as `lengths` allows, none of them STOP_TOKEN."""
    return tuple(chance.choices(range(_FIRST_TOKEN, _VOCABULARY), k=chance.randint(*lengths)))
