"""Which decode rows go through one batched product together. Pure.

Rows of a group are padded to its longest; too few groups waste memory traffic on padding, too many waste calls.
"""

from __future__ import annotations

from collections.abc import Sequence

_SMALL_WASTE_TOKENS = 64
"""Padding a row by less than this is cheaper than another group, however short the row."""


def group_by_length(context_tokens: Sequence[int], page_size: int, limit_tokens: int) -> list[list[int]]:
    """Indices of the rows, grouped: in a group no row is shorter than half the longest (or nearly as long).

    limit_tokens bounds rows · longest of a group, unless one row alone exceeds it. Order is by length, then index.
    """
    order = sorted(range(len(context_tokens)), key=lambda i: -context_tokens[i])
    groups: list[list[int]] = []
    longest = 0
    for index in order:
        padded = -(-context_tokens[index] // page_size) * page_size
        waste = longest - padded
        fits = bool(groups) and (len(groups[-1]) + 1) * longest <= limit_tokens
        if fits and (waste <= _SMALL_WASTE_TOKENS or 2 * padded >= longest):
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = padded
    return groups
