"""Stop strings: found wherever they end, at a cost per character that depends on nothing else.

Where it stands in the flow: `text/sample.py` passes the text of an answer through a StopFinder, token by token. The
strings are known as one automaton (Aho and Corasick 1975, "Efficient String Matching"), made once per request and
shared by its answers. Its state says at any time how many of the last characters may still become a stop string: just
those are held back.

The string that is complete first ends the answer; of those that are complete with the same character, the longest. So
the result depends on the text alone, and not on how tokens cut it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """The automaton of some strings, none empty. Immutable after it is made."""

    __slots__ = ("_fallback", "_next", "held", "matched")

    def __init__(self, strings: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self.matched = [0]  # by state: characters of the longest string that ends here; 0: none
        self.held = [0]  # by state: characters at the end that may still become a string
        depth = [0]
        for string in strings:
            self._add(string, depth)
        self._link(depth)

    def step(self, state: int, character: str) -> int:
        """The state after one more character. 0 is the first."""
        following = self._next
        while state and character not in following[state]:
            state = self._fallback[state]
        return following[state].get(character, 0)

    def _add(self, string: str, depth: list[int]) -> None:
        state = 0
        for character in string:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self.matched.append(0)
                self.held.append(0)
                depth.append(depth[state] + 1)
            state = self._next[state][character]
        self.matched[state] = len(string)

    def _link(self, depth: list[int]) -> None:
        """By depth: a state falls back to the longest proper end of its characters that is a state, too."""
        queue = deque([0])
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                queue.append(child)
                back = self.step(self._fallback[state], character) if state else 0
                self._fallback[child] = back
                self.matched[child] = self.matched[child] or self.matched[back]
                self.held[child] = depth[child] if self._next[child] else self.held[back]


class StopFinder:
    """The text of one answer on its way through: what may become a stop string waits, all else goes on at once."""

    __slots__ = ("_held", "_include", "_state", "_strings")

    def __init__(self, strings: StopStrings, include: bool) -> None:
        """include: the string that ends the answer is part of it; then nothing has to wait."""
        self._strings = strings
        self._include = include
        self._state = 0
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """(what may be shown now, whether a stop string is complete: then that is all, and no more may be pushed).

        may_stop: false lets strings that end in this text pass.
        """
        strings, state = self._strings, self._state
        whole = self._held + text
        for place, character in enumerate(text):
            state = strings.step(state, character)
            if may_stop and (length := strings.matched[state]):
                end = len(self._held) + place + 1
                self._held = ""
                return whole[: end if self._include else end - length], True
        self._state = state
        keep = len(whole) if self._include else len(whole) - strings.held[state]
        self._held = whole[keep:]
        return whole[:keep], False

    def finish(self) -> str:
        """What is still held, when the answer ends in another way."""
        held, self._held = self._held, ""
        return held
