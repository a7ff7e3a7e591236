"""What is not finite in the pool reaches those who attend to it and nobody else: no other row, and in layers with a
window, a cap or sinks not even tokens of the same row that do not see it. Such a row may end well, and then its pages
are in the cache for everybody.
"""

from __future__ import annotations

import pytest
import torch

from fakes.attention_backends import BACKENDS, backend_of
from fakes.attention_case import AttentionCase
from minisgl_backend.attention.interface import AttentionVariant

PLAIN = AttentionVariant(0.3)
SPECIAL = [
    AttentionVariant(0.3, window=16),
    AttentionVariant(0.3, window=5),
    AttentionVariant(0.3, window=1000),
    AttentionVariant(0.3, softcap=2.0),
    AttentionVariant(0.3, sinks=True),
    AttentionVariant(0.3, window=16, softcap=2.0, sinks=True),
]
ROWS = [(50, 1), (0, 30), (40, 25), (61, 1), (20, 40)]
BAD = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("broken_row", range(len(ROWS)))
def test_other_rows_get_the_very_same_numbers(bad: str, broken_row: int, backend: str) -> None:
    sound, broken = (AttentionCase(ROWS, 16, variants=[PLAIN, *SPECIAL], backend=backend_of(backend)) for _ in range(2))
    broken.keys[broken_row][:, 7:10] = BAD[bad]
    broken.values[broken_row][:, 9:14] = BAD[bad]
    broken.fill()
    rows = torch.tensor([row for row, (_, length) in enumerate(ROWS) for _ in range(length)])
    for layer in range(len(sound.variants)):
        expected, given = sound.attend(layer), broken.attend(layer)
        assert torch.equal(given[rows != broken_row], expected[rows != broken_row])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("place", [2, 12, 29, 45])
def test_tokens_of_the_same_row_that_do_not_see_it_are_right(
    bad: str, page_size: int, place: int, backend: str
) -> None:
    case = AttentionCase(ROWS, page_size, variants=SPECIAL, backend=backend_of(backend))
    for row, (start, length) in enumerate(ROWS):
        if place < start + length:
            case.values[row][:, place, 1, 3] = BAD[bad]
            case.keys[row][:, place, 0, 2] = torch.nan
    case.fill()
    for layer in range(len(SPECIAL)):
        expected, given = case.expected(layer), case.attend(layer).double()
        sound = expected.isfinite().all(-1)
        assert sound.any() and not sound.all()
        assert not given[~sound].isfinite().all(-1).any(), "who sees it is not spared"
        torch.testing.assert_close(given[sound], expected[sound], atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("start", [0, 33])
@pytest.mark.parametrize("broken", ["keys", "values"])
def test_keys_alone_or_values_alone_break_a_chunk_where_they_are_seen_and_nowhere_else(
    broken: str, start: int, backend: str
) -> None:
    """At its first token and at its last; in one KV head, whose query heads alone need to show it."""
    for place in (start, start + 80):
        case = AttentionCase([(start, 81)], 16, variants=SPECIAL, backend=backend_of(backend))
        getattr(case, broken)[0][:, place, 1, 3] = torch.nan
        for layer, variant in enumerate(SPECIAL):
            finite = case.attend(layer).view(81, 6, 16)[:, 3:].isfinite().all(-1).all(-1).tolist()
            assert finite == [not 0 <= start + token - place < (variant.window or 1000) for token in range(81)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_with_fewer_pages_than_its_group_is_not_filled_up_with_its_own_broken_one(backend: str) -> None:
    """Row 1 sees 65 … 69, in the last page of the table; row 0 sees 61 … 65, in two."""
    variants = [AttentionVariant(0.3, window=5)]
    case = AttentionCase([(65, 1), (69, 1)], 16, variants=variants, backend=backend_of(backend))
    case.keys[1][:, 64] = case.values[1][:, 64] = torch.nan
    case.fill()
    torch.testing.assert_close(case.attend(0).double(), case.expected(0), atol=1e-5, rtol=0)
