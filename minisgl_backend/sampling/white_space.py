"""Bounds the white space between the parts of a JSON text: models that may write spaces for ever sometimes do.

Where it stands in the flow: `grammar.py` lays the mask over that of a JSON grammar. xgrammar can bound it too, but each
bound multiplies the states of its automaton (an empty schema grows from 110 KB to 3 MB).

A state is a count of white space since the last other character outside a string, or one of two negative numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl_backend.sampling.utf8 import Bits, pack_bits

MAX_WHITE_SPACE = 20
"""Characters in a row after which no token that begins with one is drawn: a token may go beyond by its own length."""

BETWEEN = 0
"""The state at the beginning of a text."""

_STRING, _ESCAPE = -1, -2
_SPACES = b" \t\n\r"


class JsonSpace:
    """Of one vocabulary. Read-only after it is built."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        other = np.array([[not data or data[0] not in _SPACES for data in token_bytes]])
        self._bits = pack_bits(other)[0]

    def lay_over(self, state: int, bits: Bits) -> None:
        """bits [⌈vocab / 32⌉]: in place."""
        if state >= MAX_WHITE_SPACE:
            bits &= self._bits

    def step(self, state: int, token: int) -> int:
        """The state behind a token."""
        for byte in self._token_bytes[token]:
            if state == _ESCAPE:
                state = _STRING
            elif state == _STRING:
                state = BETWEEN if byte == 0x22 else _ESCAPE if byte == 0x5C else _STRING
            elif byte == 0x22:
                state = _STRING
            else:
                state = state + 1 if byte in _SPACES else BETWEEN
        return state
