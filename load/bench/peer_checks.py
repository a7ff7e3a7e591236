"""Whether an engine computes our model, before anything of it is timed.

Two looks, both beside the first engine, which is ours: greedy answers to a few texts, and, along those answers, the
next four tokens after each of several beginnings. The first shows where they part; since one rounding turns all that
comes after, the second decides: rounding turns a few of those tokens, a wrong model or tokenizer nearly all of them.
The first of the four comes out of the prompt's own step, the others out of steps of one token each: both are looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from load.bench.peer_process import Engine, EngineBroke
from load.peers.line import Stream

CHECKS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "To make a cup of tea, first",
    "The three primary colors are",
)
CHECK_TOKENS = 32
_NEXT_TOKENS = 4  # after each beginning; the beginnings are as far apart, so every token of our answers is asked for


@dataclass(frozen=True)
class Agreement:
    """How near an engine's greedy tokens are to ours."""

    prefixes: tuple[int, ...]  # of each answer, tokens until the first that differs
    next_tokens: float  # 0 … 1: share of the next tokens that are ours, of those that follow only tokens of ours


def check_all(
    engines: dict[str, Engine], texts: Sequence[Sequence[int]], least: float, refused: dict[str, str]
) -> dict[str, Agreement]:
    """Each engine's agreement with the first. Who breaks, or agrees in fewer than `least` next tokens, leaves
    `engines` and goes to `refused` with the reason. Raises EngineBroke when the first one breaks.
    """
    agreed: dict[str, Agreement] = {}
    reference: Sequence[Stream] = ()
    for name, engine in list(engines.items()):
        try:
            answers = engine.generate(texts, CHECK_TOKENS).streams
            reference = reference or answers
            begun, expected = beginnings(texts, [stream.token_ids for stream in reference])
            nexts = [stream.token_ids for stream in engine.generate(begun, _NEXT_TOKENS).streams]
        except EngineBroke as error:
            refused[name] = str(error)
            del engines[name]
            if not reference:
                raise EngineBroke(f"nothing to hold the others beside: {error}") from None
            continue
        prefixes = [
            common_prefix(ours.token_ids, theirs.token_ids) for ours, theirs in zip(reference, answers, strict=True)
        ]
        share = next_tokens(expected, nexts)
        agreed[name] = Agreement(tuple(prefixes), round(share, 3))
        if share < least:
            refused[name] = f"only {share:.0%} of its next tokens are ours, its answers part from ours after {prefixes}"
            del engines[name]
    return agreed


def beginnings(
    texts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[list[int]]]:
    """Each text with the first 0, 4, 8, … tokens of its answer, and for each the four tokens that come next."""
    cuts = [
        (text, answer, cut)
        for text, answer in zip(texts, answers, strict=True)
        for cut in range(0, len(answer), _NEXT_TOKENS)
    ]
    return (
        [[*text, *answer[:cut]] for text, answer, cut in cuts],
        [list(answer[cut : cut + _NEXT_TOKENS]) for _, answer, cut in cuts],
    )


def next_tokens(expected: Sequence[Sequence[int]], nexts: Sequence[Sequence[int]]) -> float:
    """Share of tokens that are as expected; what comes after one that is not can not be compared."""
    same = compared = 0
    for ours, theirs in zip(expected, nexts, strict=True):
        prefix = common_prefix(ours, theirs)
        same += prefix
        compared += min(prefix + 1, len(ours))
    return same / compared


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens until the first that differs."""
    pairs = zip(ours, theirs, strict=False)
    return next((length for length, (mine, other) in enumerate(pairs) if mine != other), min(len(ours), len(theirs)))


def shown(agreed: Mapping[str, Agreement]) -> str:
    """For people."""
    return "\n".join(
        f"{name}: {one.next_tokens:.0%} of the next tokens are the same; answers part after {list(one.prefixes)} "
        f"of {CHECK_TOKENS}"
        for name, one in agreed.items()
    )
