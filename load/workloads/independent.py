"""Requests that share nothing: many at once, or long prompts that arrive while streams run.

Where it stands in the flow: beside `tenants.py`, in the same terms.
"""

from __future__ import annotations

import random

from load.workloads.tenants import Request, TokenRange, draw_tokens, scripted_answer


def generate(
    requests: int, prompt_tokens: int, max_new_tokens: int, answer_tokens: TokenRange, seed: int
) -> list[Request]:
    """`requests` prompts of `prompt_tokens`, whose answers end after `answer_tokens` (drawn uniformly)."""
    chance = random.Random(seed)
    return [
        _request(number, 0.0, prompt_tokens, chance.randint(*answer_tokens), max_new_tokens, chance)
        for number in range(requests)
    ]


def streams_and_prompts(
    streams: int, stream_tokens: int, prompts: int, prompt_tokens: int, every_s: float, seed: int
) -> list[Request]:
    """Streams of `stream_tokens` each, from the start; then a prompt (for one token) `every_s` seconds."""
    chance = random.Random(seed)
    running = [_request(number, 0.0, 32, stream_tokens, stream_tokens, chance) for number in range(streams)]
    arriving = [
        _request(streams + number, (number + 1) * every_s, prompt_tokens, 1, 1, chance) for number in range(prompts)
    ]
    return running + arriving


def _request(
    number: int, arrival_s: float, prompt_tokens: int, answer_tokens: int, max_new_tokens: int, chance: random.Random
) -> Request:
    return Request(
        number=number,
        tenant=0,
        after=None,
        arrival_s=arrival_s,
        prompt=draw_tokens((prompt_tokens, prompt_tokens), chance),
        answer=scripted_answer(answer_tokens, max_new_tokens, chance),
        max_new_tokens=max_new_tokens,
        priority=0,
    )
