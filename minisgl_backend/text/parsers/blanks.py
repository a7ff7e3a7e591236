"""Blanks that may turn out to stand beside a tag: held back until something else follows.

Where it stands in the flow: models write line breaks around their tags; the parsers of this folder leave them out.
"""

from __future__ import annotations

_BLANKS = " \t\r\n"

MOST_BLANKS = 256
"""Before a tag at the beginning of an answer. An answer that begins with more has no such tag."""


class Trimmed:
    """A text in pieces without the blanks at its end, and, where asked, without those at its beginning."""

    __slots__ = ("_held", "_leading")

    def __init__(self, *, leading: bool) -> None:
        """leading: blanks at the beginning are kept."""
        self._leading = leading
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """More text → what is certain not to be blanks at the end."""
        if not self._leading:
            text = text.lstrip(_BLANKS)
            self._leading = bool(text)
        words = text.rstrip(_BLANKS)
        blanks = text[len(words) :]
        if not words:
            self._held += [blanks] if blanks else []
            return ""
        held = "".join(self._held)
        self._held[:] = [blanks] if blanks else []
        return held + words

    def rest(self) -> str:
        """The blanks held back, where they turn out to stand beside no tag."""
        held = "".join(self._held)
        self._held.clear()
        return held
