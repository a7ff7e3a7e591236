"""Compiled grammars by their key, those last used: what a worker keeps beyond the matchers that run.

Where it stands in the flow: `grammar.py`, in its thread. A compiled grammar grows while it is used, since a token mask
is computed when a matcher first comes by; so what all of them take is asked again each time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

MAX_CACHED = 64
MAX_CACHED_BYTES = 64 << 20  # the process that checked them has bounded each to an eighth of that


class GrammarCache:
    """Bounded in number and in bytes; the one just used always stays."""

    def __init__(self, most: int = MAX_CACHED, most_bytes: int = MAX_CACHED_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._compiled: OrderedDict[bytes, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._compiled)

    def get(self, key: bytes) -> Any | None:
        """None: it is not there, or not any more."""
        compiled = self._compiled.get(key)
        if compiled is not None:
            self._compiled.move_to_end(key)
            self._shrink()
        return compiled

    def put(self, key: bytes, compiled: Any) -> None:
        """compiled: of the grammar library."""
        self._compiled[key] = compiled
        self._compiled.move_to_end(key)
        self._shrink()

    def _shrink(self) -> None:
        sizes = {key: int(compiled.memory_size_bytes()) for key, compiled in self._compiled.items()}
        taken = sum(sizes.values())
        while len(self._compiled) > 1 and (len(self._compiled) > self._most or taken > self._most_bytes):
            key, _ = self._compiled.popitem(last=False)
            taken -= sizes[key]
