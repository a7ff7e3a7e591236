"""The kernels that change single logits against `sampling/rules.py` and `sampling/masks.py`; and a whole draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from minisgl_backend.kernels.gpu.penalties import change_rows
from minisgl_backend.messages.plan import NO_TOKEN
from minisgl_backend.messages.sampling import GREEDY, Sampling, TokenRules
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.sampling import triton_draw
from minisgl_backend.sampling.draw import change_logits, draw_tokens
from minisgl_backend.sampling.masks import Rows, TokenMasks
from minisgl_backend.sampling.parameters import SamplingColumns
from minisgl_backend.sampling.row_changes import row_changes
from minisgl_backend.sampling.rules import RuleBook, StepRules
from minisgl_backend.sampling.triton_draw import TritonDraw
from minisgl_backend.sampling.utf8 import pack_bits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's: overflows are meant, as on a GPU

CONTEXT = 40


def upload(arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]


def some(chance: np.random.Generator, vocab: int, most: int) -> list[int]:
    return np.sort(chance.choice(vocab, int(chance.integers(1, most)), replace=False)).tolist()


def random_rules(chance: np.random.Generator, vocab: int, said: Sequence[int]) -> TokenRules | None:
    """Each kind of rule every other time; bad words begin with what was said last, of the prompt too, or do not."""
    if chance.random() < 0.2:
        return None
    asked = chance.random(6) < 0.5
    large = float(chance.choice([1.0, 1.0, 1e307]))
    biased = some(chance, vocab, 8)
    words = [[*said[-back:], int(chance.integers(vocab))] for back in (1, 2, 3) if back <= len(said)]
    words += [some(chance, vocab, 4), [int(chance.integers(vocab))]]
    return TokenRules(
        presence_penalty=float(chance.uniform(-1, 1)) * large * asked[0],
        frequency_penalty=float(chance.uniform(-1, 1)) * large * asked[0],
        repetition_penalty=float(chance.choice([0.5, 1.3, 1e-300])) if asked[1] else 1.0,
        bias_ids=pack_tokens(biased) if asked[2] else b"",
        biases=tuple(float(value) for value in chance.uniform(-9, 9, len(biased)) * large) if asked[2] else (),
        allowed_ids=pack_tokens(some(chance, vocab, 6)) if asked[3] and chance.random() < 0.5 else b"",
        bad_words=tuple(pack_tokens(word) for word in words) if asked[4] else (),
        min_tokens=int(chance.integers(0, 12)) if asked[5] else 0,
        held_ids=pack_tokens([*some(chance, vocab, 6), vocab + 5]),
    )


class Step:
    """Random rows: tokens, rules, masks of some."""

    def __init__(self, seed: int, rows: int, vocab: int) -> None:
        chance = self.chance = np.random.default_rng(seed)
        tokens = chance.integers(0, min(vocab, 30), (rows, CONTEXT)).astype(np.int32)
        self.positions = chance.integers(1, CONTEXT, rows)
        starts = np.array([int(chance.integers(max(position - 5, 0), position + 1)) for position in self.positions])
        book = RuleBook(torch.from_numpy(tokens), starts, vocab)
        for row in range(rows):
            book.put(row, random_rules(chance, vocab, tokens[row, : self.positions[row]].tolist()))
        self.rules: StepRules | None = book.of(np.arange(rows), self.positions)
        masked = np.flatnonzero(chance.random(rows) < 0.3)
        bits = pack_bits(chance.random((len(masked), vocab)) < chance.choice([0.02, 0.5], (len(masked), 1)))
        self.masks = TokenMasks(masked, torch.from_numpy(bits)) if len(masked) else None
        self.logits = torch.from_numpy(chance.standard_normal((rows, vocab)).astype(np.float32)) * 3
        self.logits[::5, 3:] = -torch.inf  # little is left

    @property
    def rows(self) -> Rows:
        return np.arange(len(self.positions))


@pytest.mark.parametrize("vocab", [7, 33, 1031, 2100])
def test_rules_and_masks_change_what_the_reference_changes(vocab: int) -> None:
    for seed in range(4):
        step = Step(seed + vocab, 9, vocab)
        for rows in (step.rows, step.rows[2::3]):
            expected = change_logits(step.logits[rows], rows, step.rules, step.masks)
            got = step.logits[rows]
            change_rows(got, row_changes(step.rules, step.masks, rows, upload))
            assert torch.equal(got, expected), seed


def test_masks_alone_and_one_rule_alone_launch_what_they_need() -> None:
    logits = torch.arange(70.0)[None].repeat(2, 1)
    masks = TokenMasks(np.array([1]), torch.from_numpy(pack_bits(np.arange(64)[None] == 33)))
    change_rows(logits, row_changes(None, masks, np.arange(2), upload))
    assert torch.equal(logits[0], torch.arange(70.0))
    assert logits[1].isfinite().nonzero().flatten().tolist() == [33], "tokens beyond a mask may not be drawn"
    book = RuleBook(torch.zeros(2, 4, dtype=torch.int32), np.ones(2, np.int64), 70)
    book.put(0, TokenRules(bias_ids=pack_tokens([69]), biases=(2.5,)))
    rules = book.of(np.arange(2), np.full(2, 2))
    change_rows(logits, row_changes(rules, None, np.arange(2), upload))
    assert logits[0, 69] == 71.5 and logits[0, :69].equal(torch.arange(69.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_s_draw_is_the_reference_s_in_blocks_of_any_size(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain rows, rows that something changes and rows that are not finite, side by side."""
    step, kinds = Step(5, 14, 300), [GREEDY, Sampling(0.8, 0, 1.0, 3, 0), Sampling(0.9, 20, 0.9, 4, 1), GREEDY]
    parameters = SamplingColumns.greedy(14)
    for row in range(14):
        parameters.put(row, kinds[row % 4])
    logits = step.logits.to(dtype)
    logits[4, 7], logits[9, 250] = torch.nan, torch.inf
    expected = draw_tokens(logits, parameters, step.positions, step.rules, step.masks).tolist()
    assert expected[4] == expected[9] == NO_TOKEN and len(set(expected)) > 5
    before = logits.clone()
    for block in (64, 4):
        monkeypatch.setattr(triton_draw, "_BLOCK_ROWS", block)
        draw = TritonDraw(upload)(parameters, step.positions, step.rules, step.masks)
        assert draw(logits).tolist() == expected
    assert torch.equal(logits.view(torch.uint8), before.view(torch.uint8)), "logits are not written to"
