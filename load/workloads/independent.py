"""Requests that share nothing and are all there from the start: what room for running sequences is worth.

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
        Request(
            number=number,
            tenant=0,
            after=None,
            arrival_s=0.0,
            prompt=draw_tokens((prompt_tokens, prompt_tokens), chance),
            answer=scripted_answer(chance.randint(*answer_tokens), max_new_tokens, chance),
            max_new_tokens=max_new_tokens,
            priority=0,
        )
        for number in range(requests)
    ]
