"""Stop strings: against a plain reference, for any strings and any cutting of the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.text.stops import StopFinder, StopStrings

letters = st.text(alphabet="abé", min_size=1, max_size=5)
stop_lists = st.lists(letters, min_size=1, max_size=4)
pieces = st.lists(st.tuples(st.text(alphabet="abé", max_size=5), st.booleans()), max_size=12)


def reference(stops: list[str], given: list[tuple[str, bool]], include: bool) -> list[tuple[str, bool]]:
    """After each piece (all that is shown so far, whether it ended), looking at the whole text each time."""
    text, told = "", []
    for piece, may_stop in given:
        for character in piece:
            text += character
            found = [stop for stop in stops if text.endswith(stop)]
            if found and may_stop:
                return [*told, (text if include else text[: -max(map(len, found))], True)]
        open_ends = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
        keep = 0 if include else max(open_ends)
        told.append((text[: len(text) - keep], False))
    return told


@given(stops=stop_lists, given=pieces, include=st.booleans())
def test_what_is_shown_and_when_is_what_the_reference_says(
    stops: list[str], given: list[tuple[str, bool]], include: bool
) -> None:
    finder, shown, told = StopFinder(StopStrings(stops), include), "", []
    for piece, may_stop in given:
        text, stopped = finder.push(piece, may_stop)
        shown += text
        told.append((shown, stopped))
        if stopped:
            assert finder.finish() == ""
            break
    assert told == reference(stops, given, include)
    if not (told and told[-1][1]):
        assert shown + finder.finish() == "".join(piece for piece, _ in given)


def test_the_first_to_be_complete_ends_and_the_longest_of_those_with_one_end() -> None:
    finder = StopFinder(StopStrings(["cd", "bcd", "abcdef"]), include=False)
    assert finder.push("xabcd") == ("xa", True)


def test_a_string_that_passed_early_is_shown_as_soon_as_it_can_not_grow() -> None:
    finder = StopFinder(StopStrings(["ab"]), include=False)
    assert finder.push("ab", may_stop=False) == ("ab", False)
    assert finder.push("a") == ("", False)
    assert finder.push("b") == ("", True)


def test_the_cost_of_a_character_does_not_grow_with_the_text() -> None:
    """Counted: what is kept between pushes is bounded by the strings, and a step is taken per character."""
    strings = StopStrings(["\n\nUser:", "aaaab"])
    steps = 0
    step = strings.step

    class Counted(StopStrings):
        __slots__ = ()

        def step(self, state: int, character: str) -> int:
            nonlocal steps
            steps += 1
            return step(state, character)

    counted = Counted(["\n\nUser:", "aaaab"])
    finder = StopFinder(counted, include=False)
    steps = 0
    for _ in range(10_000):
        finder.push("aaa ")
        assert len(finder._held) < 7
    assert steps == 40_000
