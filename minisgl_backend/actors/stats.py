"""What the text actor answers to who inspects the engine: its own counts beside the scheduler's."""

from __future__ import annotations

from minisgl_backend.messages.client import EngineState, Stats
from minisgl_backend.messages.engine import Gauges

NO_GAUGES = Gauges(0, 0, 0, 0, 0, 0, 0)
"""Of an engine that is not up, or whose scheduler takes no question: it has no slots."""


def stats_of(
    state: EngineState, gauges: Gauges, open_requests: int, restarts: int, pids: tuple[tuple[str, int], ...]
) -> Stats:
    """open_requests, restarts, pids: see Stats."""
    return Stats(
        state=state,
        open_requests=open_requests,
        waiting=gauges.waiting,
        running=gauges.running,
        free_slots=gauges.free_slots,
        total_slots=gauges.total_slots,
        free_pages=gauges.free_pages + gauges.evictable_pages,
        total_pages=gauges.total_pages,
        steps=gauges.steps,
        restarts=restarts,
        pids=pids,
        cached_pages=gauges.cached_pages,
        matched_pages=gauges.matched_pages,
        evicted_pages=gauges.evicted_pages,
        retractions=gauges.retractions,
    )
