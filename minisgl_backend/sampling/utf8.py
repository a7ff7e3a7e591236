"""Which tokens keep a text valid UTF-8: a grammar library lets any continuation byte follow any leading byte.

Where it stands in the flow: `grammar.py` lays these masks over those of a grammar. A length or a set of characters in a
schema counts characters; three bytes that are none would be shown as three U+FFFD. Rows of the table are states: what
bytes a character that has begun still needs (Unicode 3.9, table 3-7).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WHOLE = 0
"""The state between two characters."""

_TAIL = (0x80, 0xBF)
_STATES: tuple[tuple[tuple[int, int], ...], ...] = (
    (),  # WHOLE
    (_TAIL,),
    (_TAIL, _TAIL),
    (_TAIL, _TAIL, _TAIL),
    ((0xA0, 0xBF), _TAIL),  # after E0: no overlong form
    ((0x80, 0x9F), _TAIL),  # after ED: no surrogate
    ((0x90, 0xBF), _TAIL, _TAIL),  # after F0
    ((0x80, 0x8F), _TAIL, _TAIL),  # after F4: not beyond U+10FFFF
)
_LEADS = (
    (0xC2, 0xDF, 1),
    (0xE0, 0xE0, 4),
    (0xED, 0xED, 5),
    (0xE1, 0xEF, 2),
    (0xF0, 0xF0, 6),
    (0xF4, 0xF4, 7),
    (0xF1, 0xF3, 3),
)
_AFTER_ONE = {1: WHOLE, 2: 1, 3: 2, 4: 1, 5: 1, 6: 2, 7: 2}

Bits = npt.NDArray[np.int32]


def after(state: int, data: bytes) -> int | None:
    """The state behind `data`; None: it can not follow."""
    for byte in data:
        if state == WHOLE:
            if byte < 0x80:
                continue
            state = next((then for low, high, then in _LEADS if low <= byte <= high), -1)
            if state < 0:
                return None
        else:
            low, high = _STATES[state][0]
            if not low <= byte <= high:
                return None
            state = _AFTER_ONE[state]
    return state


class Utf8Masks:
    """Of one vocabulary. Read-only after it is built."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        allowed = np.zeros((len(_STATES), len(token_bytes)), bool)
        for token, data in enumerate(token_bytes):
            if _is_whole(data):
                allowed[WHOLE, token] = True
            else:
                for state in range(len(_STATES)):
                    allowed[state, token] = after(state, data) is not None
        self._bits = pack_bits(allowed)

    def lay_over(self, state: int, bits: Bits) -> None:
        """bits [⌈vocab / 32⌉]: in place."""
        bits &= self._bits[state]

    def step(self, state: int, token: int) -> int:
        """The state behind a token that was allowed."""
        then = after(state, self._token_bytes[token])
        return WHOLE if then is None else then


def pack_bits(allowed: npt.NDArray[np.bool_]) -> Bits:
    """[rows, vocab] → [rows, ⌈vocab / 32⌉], token 32 · w + b at bit b of word w."""
    padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view("<i4").astype(np.int32)


def _is_whole(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
