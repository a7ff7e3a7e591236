"""The grammars of a rank that draws nothing: see grammar.py."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl_backend.messages.plan import Admission
from minisgl_backend.sampling.masks import Rows


class NoGrammars:
    """As GrammarSlots. Rank 0 draws, and its masks are all that is needed."""

    idle = True

    def warm(self) -> None:
        pass

    def admit(self, admissions: Sequence[Admission]) -> None:
        pass

    def begin(self, slots: Rows) -> None:
        """None: no row has a mask."""

    def drew(self, slots: Rows, tokens: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass
