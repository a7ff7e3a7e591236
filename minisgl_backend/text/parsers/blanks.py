"""Blanks that may turn out to stand beside a tag: held back until something else follows; and words around calls.

Where it stands in the flow: models write line breaks around their tags; the parsers of this folder leave them out.
"""

from __future__ import annotations

from minisgl_backend.text.parsers.events import Content, Event

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


class Said:
    """The content around calls, without the blanks beside them."""

    __slots__ = ("_words",)

    def __init__(self) -> None:
        self._words = Trimmed(leading=True)

    def add(self, text: str, events: list[Event]) -> None:
        """More content. Events are appended."""
        self._emit(self._words.push(text), events)

    def call(self) -> None:
        """A call stands here."""
        self._words = Trimmed(leading=False)

    def finish(self, events: list[Event]) -> None:
        """No call follows: blanks at the end are content."""
        self._emit(self._words.rest(), events)

    @staticmethod
    def _emit(text: str, events: list[Event]) -> None:
        if text:
            events.append(Content(text))
