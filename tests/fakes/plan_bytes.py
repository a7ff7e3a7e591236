"""`python tests/fakes/plan_bytes.py`: prints the digest of every plan and answer of one fixed run, at both depths.

Where it stands in the flow: tests/unit/scheduler/test_directed_order.py runs it in processes with different
PYTHONHASHSEED; ranks of one engine differ in it, and must agree on every row.
"""

from __future__ import annotations

import hashlib
import random

from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.messages.codec import encode
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.scheduler.limits import Limits


def digest(depth: int) -> str:
    """Of a run with shared prefixes, salts, priorities and aborts in a pool that is too small for all."""
    draw = random.Random(7)
    engine = SchedulerBench(Limits(6, 40, 4, 40, 120), depth=depth)
    heads = [[draw.randrange(23) for _ in range(24)] for _ in range(3)]
    seen = hashlib.sha256()
    for number in range(160):
        if number < 90 and number % 2:
            prompt = draw.choice(heads)[: draw.randrange(4, 24)] + [number % 23] * draw.randrange(1, 9)
            engine.add(prompt, draw.randrange(1, 40), stop_token_ids=(draw.randrange(23),))
        if draw.randrange(12) == 0 and engine.lives:
            engine.abort(SequenceId(draw.randrange(len(engine.lives)) + 1))
        plan = engine.plan()
        if plan is not None:
            seen.update(encode(plan))
        elif engine.scheduler.in_flight:
            seen.update(encode(engine.apply()))
    engine.finish()
    return seen.hexdigest()


if __name__ == "__main__":
    print(digest(0), digest(1))
