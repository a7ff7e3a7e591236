"""How a text is split, in which order the summaries go out, and how slices make one summary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.messages.client import FinishReason
from minisgl_backend.serving.parts import PartOrder, Slices, split_parts

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


@given(st.text(), st.integers(min_value=4, max_value=40))
def test_parts_joined_are_the_text_and_none_is_too_large(text: str, part_bytes: int) -> None:
    parts = split_parts(text, part_bytes)
    assert "".join(parts) == text
    assert all(0 < len(part.encode()) <= part_bytes for part in parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ()),
        ("It all fits.", ("It all fits.",)),
        ("One two. Three.\n\nFour five. Six seven", ("One two. Three.\n\n", "Four five. Six seven")),
        ("One two three. Four five six seven", ("One two three. ", "Four five six seven")),
        ("He said: “Go on!” And on we went then", ("He said: “Go on!” ", "And on we went then")),
        ("one two three four five six seven", ("one two three four five ", "six seven")),
        ("abcdefghijklmnopqrstuvwxyz", ("abcdefghijklmnopqrstuvwx", "yz")),
        ("これは文です。次の文", ("これは文です。", "次の文")),
        ("aä" * 9, ("aä" * 8, "aä")),
    ],
)
def test_a_part_ends_behind_a_paragraph_else_a_sentence_else_a_word(text: str, parts: tuple[str, ...]) -> None:
    assert split_parts(text, 24) == parts


def test_a_border_in_the_first_half_is_not_taken_because_parts_would_become_tiny() -> None:
    assert split_parts("a\n\nbcdefghijklmnopqrstuvwxyz", 20) == ("a\n\nbcdefghijklmnopqr", "stuvwxyz")


def test_the_first_part_is_passed_on_as_it_comes_and_later_ones_wait_for_their_turn() -> None:
    order = PartOrder(3)
    assert order.take(2, " third", True) == ""
    assert order.take(0, " fi", False) == "fi"
    assert order.take(1, " sec", False) == ""
    assert order.take(0, "rst", True) == "rst\n\nsec"
    assert not order.done
    assert order.take(1, "ond", True) == "ond\n\nthird"
    assert order.done


def test_blanks_before_the_first_word_and_empty_summaries_leave_no_trace() -> None:
    order = PartOrder(3)
    assert order.take(0, "\n", False) == ""
    assert order.take(0, " ", True) == ""
    assert order.take(1, " word", True) == "word"
    assert order.take(2, "", True) == ""
    assert order.done


Piece = tuple[int, str, bool]


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[list[list[str]], list[Piece]]:
    """Summaries in pieces, and one order in which these may come."""
    pieces = draw(st.lists(st.lists(st.text("ab ", max_size=3), min_size=1, max_size=4), min_size=1, max_size=5))
    turns = draw(st.permutations([part for part, texts in enumerate(pieces) for _ in texts]))
    left = [list(texts) for texts in pieces]
    return pieces, [(part, left[part].pop(0), not left[part]) for part in turns]


@given(arrivals())
def test_whatever_comes_first_the_answer_is_the_same(case: tuple[list[list[str]], list[Piece]]) -> None:
    pieces, coming = case
    order = PartOrder(len(pieces))
    got = "".join(order.take(*piece) for piece in coming)
    summaries = ["".join(texts).lstrip() for texts in pieces]
    assert got == "\n\n".join(summary for summary in summaries if summary)
    assert order.done


def test_slices_continue_until_the_tokens_are_used_up() -> None:
    slices = Slices(max_tokens=10, slice_tokens=4)
    for asked, text in ((4, " a"), (4, " b"), (2, " c")):
        assert slices.reason is None and slices.max_tokens == asked
        assert slices.take(text, asked, LENGTH) == text
    assert (slices.text, slices.reason) == (" a b c", LENGTH)


def test_the_last_word_of_a_slice_may_be_half_a_word_so_the_next_slice_says_it_anew() -> None:
    slices = Slices(max_tokens=12, slice_tokens=4)
    assert slices.take(" The cat bark", 4, LENGTH) == " The cat"
    assert slices.take(" barked.\n\n", 4, LENGTH) == " barked."
    assert slices.text == " The cat barked."
    assert slices.take(" It ran a", 4, LENGTH) == " It ran a", "the end: nothing will complete it"


@pytest.mark.parametrize(("tokens", "reason"), [(4, STOP), (1, STOP), (3, LENGTH)])
def test_an_end_token_ends_a_summary_and_so_does_a_full_context(tokens: int, reason: FinishReason) -> None:
    slices = Slices(max_tokens=100, slice_tokens=4)
    slices.take(" a", tokens, reason)
    assert slices.reason is reason


def test_a_character_cut_by_the_end_of_a_slice_is_said_whole_by_the_next() -> None:
    slices = Slices(max_tokens=12, slice_tokens=4)
    assert slices.take("这是\ufffd", 4, LENGTH) == "这是"
    assert slices.take("文\ufffd", 2, STOP) == "文\ufffd", "the end: nothing will complete it"


@pytest.mark.parametrize("text", ["\ufffd\ufffd", "  \n", " word", "word", " \ufffd"])
def test_a_slice_always_adds_something_so_that_a_summary_goes_on(text: str) -> None:
    slices = Slices(max_tokens=100, slice_tokens=4)
    assert slices.take(text, 4, LENGTH)
    assert slices.reason is None
