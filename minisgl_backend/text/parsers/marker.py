"""A marker in a text that comes in pieces: found wherever it is cut, and nothing else is held back.

Where it stands in the flow: the parsers of this folder look for their tags with it.
"""

from __future__ import annotations


class Marker:
    """Looks for the first of some fixed strings. Holds back only what may be the beginning of one."""

    __slots__ = ("_held", "_markers")

    def __init__(self, *markers: str) -> None:
        """None of them empty, none the beginning of another."""
        self._markers = markers
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None, str]:
        """More text → (what stands before the marker for certain, the marker or None, what stands behind it)."""
        text = self._held + text
        self._held = ""
        found = [(place, marker) for marker in self._markers if (place := text.find(marker)) >= 0]
        if found:
            place, marker = min(found)
            return text[:place], marker, text[place + len(marker) :]
        keep = max(_beginning(text, marker) for marker in self._markers)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None, ""

    def finish(self) -> str:
        """What was held back, and is no marker."""
        held, self._held = self._held, ""
        return held


def _beginning(text: str, marker: str) -> int:
    """How many characters at the end of the text are a beginning of the marker."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
