"""The view of the engine: what the scheduler holds and how fast it goes, as one JSON object for people who look on.

    text actor ── Look ──► scheduler ── View ──► text actor ──► EngineView.snapshot ──► everybody who asked

Where it stands in the flow: the text actor's part of the operation `engine`. A snapshot serves all who ask within
`KEPT_S`, so what the scheduler spends on it does not grow with them. docs/triton.md describes the object.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from minisgl_backend.actors.open_request import OpenRequest
from minisgl_backend.actors.rates import Rates
from minisgl_backend.actors.stats import NO_GAUGES
from minisgl_backend.messages.client import EngineState
from minisgl_backend.messages.engine import Look, RunningRow, TreeNode, View, WaitingRow
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.tokens import unpack_tokens
from minisgl_backend.text.tokenizer import Tokenizer

KEPT_S = 0.25
MOST_ROWS = 256
MOST_NODES = 512
EDGE_TOKENS = 16
EDGE_CHARS = 64

NO_VIEW = View(NO_GAUGES, 0, 0, 0, (), (), (), 0)
"""Of an engine that is not up."""


class EngineView:
    """Who waits for a snapshot, and the last one. Mutable, owned by the text actor."""

    def __init__(self, rates: Rates, page_size: int, *, shows_prompts: bool) -> None:
        """shows_prompts: the begins of texts in the cache are told."""
        self.look = Look(MOST_ROWS, MOST_NODES, EDGE_TOKENS if shows_prompts else 0)
        self._rates = rates
        self._page_size = page_size
        self._shows_prompts = shows_prompts
        self._waiting: dict[SequenceId, None] = {}  # in the order in which they came
        self._asked = False  # the scheduler, which has not answered
        self._last = b""
        self._made_s = -KEPT_S  # monotonic

    def recent(self, now_s: float) -> bytes | None:
        """The last snapshot, when it is young enough for one more."""
        return self._last if now_s < self._made_s + KEPT_S else None

    def wait(self, id: SequenceId) -> bool:
        """The request waits for the next snapshot. True: the scheduler is to be asked for a View, and was not yet."""
        self._waiting[id] = None
        asked, self._asked = self._asked, True
        return not asked

    def leave(self, id: SequenceId) -> None:
        """The request has ended, whether it waited or not: nothing of it is kept, however long the scheduler takes."""
        self._waiting.pop(id, None)

    def take_waiting(self) -> list[SequenceId]:
        """All who wait, and wait no more: the scheduler has answered."""
        waiting = list(self._waiting)
        self._waiting.clear()
        self._asked = False
        return waiting

    def forget(self) -> None:
        """The engine is another one from now on."""
        self._made_s = -KEPT_S
        self._waiting.clear()
        self._asked = False

    def snapshot(
        self,
        view: View,
        state: EngineState,
        open_requests: Mapping[SequenceId, OpenRequest],
        tokenizer: Tokenizer | None,
        now_s: float,
    ) -> bytes:
        """JSON, kept as the last one. Rows of requests that were answered meanwhile are left out."""
        gauges = view.gauges
        running = [_running(row, open_requests[row.id], now_s) for row in view.running if row.id in open_requests]
        waiting = [_waiting(row, open_requests[row.id], now_s) for row in view.waiting if row.id in open_requests]
        told = {
            "state": state.value,
            "time_s": round(time.time(), 3),
            "steps": gauges.steps,
            "running": running,
            "waiting": waiting,
            "tokens_per_s": round(self._rates.tokens_per_s(now_s), 1),
            "ttft_ms": self._rates.ttft_ms(),
            "itl_ms": self._rates.itl_ms(),
            "pages": _pages(view),
            "page_size": self._page_size,
            "slots": {"total": gauges.total_slots, "free": gauges.free_slots},
            "cache": {
                "hit_tokens": view.hit_tokens,
                "prompt_tokens": view.prompt_tokens,
                "evicted_pages": gauges.evicted_pages,
            },
            "retractions": gauges.retractions,
            "tree": [self._node(node, tokenizer) for node in view.nodes],
            "left_out": {
                "running": max(0, gauges.running - len(view.running)),
                "waiting": max(0, gauges.waiting - len(view.waiting)),
                "tree": view.total_nodes - len(view.nodes),
            },
            "shows_prompts": self._shows_prompts,
        }
        self._last, self._made_s = msgspec.json.encode(told), now_s
        return self._last

    def _node(self, node: TreeNode, tokenizer: Tokenizer | None) -> dict[str, Any]:
        return {
            "id": node.number,
            "parent": node.parent or None,
            "tokens": node.tokens,
            "locks": node.locks,
            "last_used_s": round(node.unused_s, 2),
            "text": _text(node.edge, tokenizer) if self._shows_prompts and tokenizer is not None else None,
        }


def _running(row: RunningRow, request: OpenRequest, now_s: float) -> dict[str, Any]:
    return {
        "id": str(row.id),
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "output_tokens": row.output_tokens,
        "max_tokens": row.max_tokens,
        "age_s": round(now_s - request.arrived_s, 3),
        "pages": row.pages,
        "phase": "prefill" if row.extending else "decode",
    }


def _waiting(row: WaitingRow, request: OpenRequest, now_s: float) -> dict[str, Any]:
    return {
        "id": str(row.id),
        "prompt_tokens": row.prompt_tokens,
        "age_s": round(now_s - request.arrived_s, 3),
        "priority": row.priority,
    }


def _pages(view: View) -> dict[str, int]:
    """By owner; all but the total add up to it."""
    gauges = view.gauges
    others = gauges.free_pages + gauges.cached_pages + view.quarantined_pages
    return {
        "total": gauges.total_pages,
        "free": gauges.free_pages,
        "tree_locked": gauges.cached_pages - gauges.evictable_pages,
        "tree_unlocked": gauges.evictable_pages,
        "private": gauges.total_pages - others,
        "quarantine": view.quarantined_pages,
    }


def _text(edge: bytes, tokenizer: Tokenizer) -> str:
    """How the edge begins; special tokens by their names."""
    table = tokenizer.all_bytes
    data = b"".join([table[token] for token in unpack_tokens(edge)])
    return data.decode("utf-8", "replace")[:EDGE_CHARS]
