"""Penalties, biases and masks against a plain reference; who is left alone; what happens when nothing is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minisgl_backend.messages.plan import NO_TOKEN
from minisgl_backend.messages.sampling import GREEDY, Sampling, TokenRules
from minisgl_backend.messages.tokens import pack_tokens, unpack_tokens
from minisgl_backend.sampling import sampler
from minisgl_backend.sampling.draw import draw_tokens
from minisgl_backend.sampling.masks import TokenMasks
from minisgl_backend.sampling.parameters import SamplingColumns
from minisgl_backend.sampling.rules import RuleBook, StepRules

VOCAB, CONTEXT = 12, 16
INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Row:
    """One sequence: what it has said after which prompt, and its rules."""

    prompt: Sequence[int]
    output: Sequence[int]
    rules: TokenRules | None

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


def step_rules(rows: Sequence[Row], vocab: int = VOCAB) -> StepRules | None:
    """Slot i is row i; behind what is known the worker's tokens are left over from somebody else."""
    tokens = torch.full((len(rows), CONTEXT), 3, dtype=torch.int32)
    for slot, row in enumerate(rows):
        tokens[slot, : row.position] = torch.tensor([*row.prompt, *row.output])
    book = RuleBook(tokens, np.array([len(row.prompt) for row in rows]), vocab)
    for slot, row in enumerate(rows):
        book.put(slot, row.rules)
    return book.of(np.arange(len(rows)), np.array([row.position for row in rows]))


def reference(logits: list[float], row: Row) -> list[float]:
    """What vLLM's documentation says, one token after the other."""
    rules, result = row.rules, list(logits)
    if rules is None:
        return result
    for token, bias in zip(unpack_tokens(rules.bias_ids), rules.biases, strict=True):
        result[token] += bias
    for token in range(len(result)):
        said = list(row.output).count(token)
        if said or token in row.prompt:
            value = result[token]
            result[token] = value / rules.repetition_penalty if value > 0 else value * rules.repetition_penalty
        result[token] -= rules.frequency_penalty * said + rules.presence_penalty * (said > 0)
    allowed = set(unpack_tokens(rules.allowed_ids)) or set(range(len(result)))
    result = [value if token in allowed else -INF for token, value in enumerate(result)]
    words = [list(unpack_tokens(word)) for word in rules.bad_words]
    bad = {word[-1] for word in words if list(row.output)[len(row.output) - len(word) + 1 :] == word[:-1]
           and len(word) <= len(row.output) + 1}  # fmt: skip
    held = set(unpack_tokens(rules.held_ids)) if len(row.output) < rules.min_tokens else set()
    for banned in (bad | held, bad, set()):
        left = [-INF if token in banned else value for token, value in enumerate(result)]
        if max(left) > -INF:
            return left
    return result


def changed(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    own = logits.clone()
    step = step_rules(rows, logits.shape[1])
    if step is not None:
        step.change(own)
        step.withhold(own)
    return own


TOKEN = st.integers(0, VOCAB - 1)
TOKENS = st.lists(TOKEN, max_size=6)
PENALTY = st.sampled_from([0.0, 0.0, 0.5, -1.5, 2.0])


@st.composite
def token_rules(draw: st.DrawFn) -> TokenRules:
    bias_ids = draw(st.lists(TOKEN, unique=True, max_size=4))
    words = draw(st.lists(st.lists(TOKEN, min_size=1, max_size=3), max_size=8))
    return TokenRules(
        presence_penalty=draw(PENALTY),
        frequency_penalty=draw(PENALTY),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.7, 100.0])),
        bias_ids=pack_tokens(bias_ids),
        biases=tuple(draw(st.floats(-100, 100, width=16)) for _ in bias_ids),
        allowed_ids=pack_tokens(sorted(draw(st.sets(TOKEN, max_size=8)))),
        bad_words=tuple(pack_tokens(word) for word in words),
        min_tokens=draw(st.integers(0, 6)),
        held_ids=pack_tokens(draw(st.lists(TOKEN, max_size=3))),
    )


ROWS = st.builds(Row, st.lists(TOKEN, min_size=1, max_size=6), TOKENS, st.none() | token_rules())


@given(rows=st.lists(ROWS, min_size=1, max_size=5), seed=st.integers(0, 1000), holes=st.booleans())
def test_every_rule_does_what_a_plain_reference_does(rows: list[Row], seed: int, holes: bool) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    if holes:
        logits[:, ::3] = -INF
    expected = [reference(one, row) for one, row in zip(logits.tolist(), rows, strict=True)]
    torch.testing.assert_close(changed(logits, rows), torch.tensor(expected, dtype=torch.float32), atol=1e-4, rtol=1e-6)


@given(rows=st.lists(ROWS, min_size=2, max_size=5), seed=st.integers(0, 1000))
def test_a_row_is_changed_alike_in_any_company(rows: list[Row], seed: int) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    together = changed(logits, rows)
    for number, row in enumerate(rows):
        assert torch.equal(changed(logits[number : number + 1], [row])[0], together[number])


def draw(
    logits: Tensor, rows: Sequence[Row], samplings: Sequence[Sampling] | None = None, masks: TokenMasks | None = None
) -> list[int]:
    columns = SamplingColumns.greedy(len(rows))
    for number, sampling in enumerate(samplings or []):
        columns.put(number, sampling)
    positions = np.array([row.position for row in rows])
    return draw_tokens(logits, columns, positions, step_rules(rows, logits.shape[1]), masks).tolist()


def only(**rules: object) -> Row:
    return Row([1, 2], [3, 4], TokenRules(**rules))  # type: ignore[arg-type]


def bits(*rows: set[int], words: int = 1) -> Tensor:
    table = np.zeros((len(rows), words), np.uint32)
    for number, tokens in enumerate(rows):
        for token in tokens:
            table[number, token // 32] |= np.uint32(1 << token % 32)
    return torch.from_numpy(table.view(np.int32))


SLOPE = torch.arange(VOCAB, dtype=torch.float32)[None]  # the best is the last


def test_ends_held_back_may_be_drawn_when_nothing_else_is_left() -> None:
    row = only(allowed_ids=pack_tokens([5]), min_tokens=9, held_ids=pack_tokens([5, 11]))
    assert draw(SLOPE, [row]) == [5]
    assert draw(SLOPE, [only(min_tokens=9, held_ids=pack_tokens([11]))]) == [10]
    assert draw(SLOPE, [only(min_tokens=2, held_ids=pack_tokens([11]))]) == [11], "so many are out"


def test_bad_words_yield_last() -> None:
    both = only(
        allowed_ids=pack_tokens([5, 6]),
        min_tokens=9,
        held_ids=pack_tokens([5]),
        bad_words=(pack_tokens([3, 4, 6]),),
    )
    assert draw(SLOPE, [both]) == [5], "an end before a bad word"
    neither = only(allowed_ids=pack_tokens([6]), bad_words=(pack_tokens([6]),), min_tokens=9, held_ids=pack_tokens([6]))
    assert draw(SLOPE, [neither]) == [6]


def test_a_grammar_outranks_min_tokens_and_bad_words_and_without_a_common_token_the_row_fails_alone() -> None:
    row = only(allowed_ids=pack_tokens([5, 6]), min_tokens=9, held_ids=pack_tokens([5]))
    one = np.array([0])
    assert draw(SLOPE, [row], masks=TokenMasks(one, bits({5, 9}))) == [5]
    assert draw(SLOPE, [row], masks=TokenMasks(one, bits({9}))) == [NO_TOKEN]
    rows = [row, Row([1], [], None)]
    assert draw(SLOPE.expand(2, -1), rows, masks=TokenMasks(one, bits({9}))) == [NO_TOKEN, 11]


def test_a_mask_covers_its_own_rows_only_and_every_word_of_bits_counts() -> None:
    logits = torch.arange(70, dtype=torch.float32).expand(4, -1)
    rows = [Row([1], [], None)] * 4
    masks = TokenMasks(np.array([1, 3]), bits({31, 32, 63}, {0, 69}, words=3))
    assert draw(logits, rows, masks=masks) == [69, 63, 69, 69]
    assert draw(logits, rows, masks=TokenMasks(np.array([2]), bits({40}, words=2))) == [69, 69, 40, 69]
    assert draw(logits, rows, masks=TokenMasks(np.array([2]), bits(set(), words=2))) == [69, 69, NO_TOKEN, 69]


def test_a_bad_word_counts_its_beginning_in_the_output_alone() -> None:
    word = (pack_tokens([4, 11]),)
    assert draw(SLOPE, [Row([1, 2], [4], TokenRules(bad_words=word))]) == [10]
    assert draw(SLOPE, [Row([1, 4], [], TokenRules(bad_words=word))]) == [11], "4 is of the prompt"
    assert draw(SLOPE, [Row([1, 4], [5], TokenRules(bad_words=word))]) == [11]


def test_a_row_whose_raw_logits_are_not_finite_fails_even_if_a_mask_would_hide_it() -> None:
    logits = SLOPE.expand(3, -1).clone()
    logits[0, 7] = NAN
    logits[1, 7] = INF
    row = only(allowed_ids=pack_tokens([5]), bias_ids=pack_tokens([7]), biases=(1.0,))
    assert draw(logits, [row] * 3) == [NO_TOKEN, NO_TOKEN, 5]


@pytest.mark.parametrize("large", [1e308, -1e308, 1e38])
def test_no_finite_rule_makes_a_row_fail(large: float) -> None:
    rules = TokenRules(large, large, abs(large), pack_tokens([4, 5]), (large, -large))
    small = TokenRules(repetition_penalty=1e-308, presence_penalty=-large, frequency_penalty=large)
    for rule in (rules, small):
        for how in (GREEDY, Sampling(0.7, 5, 0.9, 1, 0, min_p=0.1)):
            (token,) = draw(SLOPE - 4, [Row([4, 7, 11], [4, 4, 5], rule)], [how])
            assert 0 <= token < VOCAB


def test_end_tokens_beyond_the_vocabulary_are_no_matter() -> None:
    assert draw(SLOPE, [only(min_tokens=9, held_ids=pack_tokens([11, 400]))]) == [10]


def test_rows_without_rules_draw_what_they_draw_without_neighbours_that_have_some() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(8, 300, generator=generator).bfloat16()
    kinds = [GREEDY, Sampling(0.9, 0, 1.0, 5, 0), Sampling(1.1, 20, 0.9, 6, 1), Sampling(1.0, 0, 1.0, 7, 0, min_p=0.2)]
    samplings = kinds * 2
    plain = Row([1, 2], [3], None)
    alone = [draw(logits[number : number + 1], [plain], [samplings[number]])[0] for number in range(8)]
    busy = Row([1, 2], [3], TokenRules(1.0, 1.0, 2.0, pack_tokens([7]), (50.0,)))
    mixed = draw(logits, [plain if number % 3 else busy for number in range(8)], samplings)
    assert [mixed[number] for number in range(8) if number % 3] == [alone[number] for number in range(8) if number % 3]
    assert mixed[0] == mixed[3] == mixed[6] == 7


def test_blocks_of_rows_do_not_change_what_rules_and_masks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(8))
    rows = [Row([1, 2], [3, number], TokenRules(2.0, 1.0) if number % 2 else None) for number in range(9)]
    masks = TokenMasks(np.array([0, 1, 5, 8]), bits({1, 2}, {3, 4}, {5, 6}, {7, 8}))
    samplings = [Sampling(0.8, 0, 1.0, number, 0) for number in range(9)]
    whole = draw(logits, rows, samplings, masks)
    monkeypatch.setattr(sampler, "_BLOCK_ELEMENTS", 2 * VOCAB)
    assert draw(logits, rows, samplings, masks) == whole


def test_logits_are_not_written_to() -> None:
    logits = SLOPE.clone()
    draw(logits, [only(presence_penalty=2.0, allowed_ids=pack_tokens([1]))], masks=TokenMasks(np.array([0]), bits({1})))
    assert torch.equal(logits, SLOPE)
