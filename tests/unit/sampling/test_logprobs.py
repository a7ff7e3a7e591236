"""Logprobs and ranks against log_softmax in float64; ties; what a row is told does not depend on others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl_backend.messages.plan import NO_TOKEN, Logprobs
from minisgl_backend.messages.tokens import unpack_tokens
from minisgl_backend.sampling import sampler
from minisgl_backend.sampling.logprobs import rank_sampled, ranked_size, tell_sampled, who_asks


def describe(logits: Tensor, tokens: list[int], best: list[int]) -> tuple[Logprobs, ...]:
    positions = np.arange(len(tokens)) + 100
    asked, vocab = who_asks(np.array(best), logits.shape[1]), logits.shape[1]
    ranked = rank_sampled(logits, torch.tensor(tokens), asked, [torch.from_numpy(rows) for rows, _ in asked])
    assert ranked.shape == (ranked_size(asked, vocab),)
    return tell_sampled(ranked, asked, vocab, positions)


def values(told: Logprobs) -> list[float]:
    return np.frombuffer(told.values, "<f4").tolist()


LOGITS = torch.randn(6, 500, generator=torch.Generator().manual_seed(3)) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_token_its_rank_and_the_best_are_those_of_the_raw_distribution(dtype: torch.dtype) -> None:
    logits = LOGITS.to(dtype)
    tokens, best = [5, 0, 499, 17, 3, 250], [0, 5, -1, 5, 20, 500]
    told = describe(logits, tokens, best)
    assert [one.position for one in told] == [100, 101, 103, 104, 105], "of the rows that ask, in their order"
    for one, row in zip(told, [0, 1, 3, 4, 5], strict=True):
        exact = logits[row].double().log_softmax(-1)
        order = sorted(range(500), key=lambda token: (-exact[token].item(), token))
        ids = [tokens[row], *order[: best[row]]]
        assert list(unpack_tokens(one.ids)) == ids
        assert values(one) == pytest.approx(exact[ids].tolist(), abs=1e-5)
        assert list(unpack_tokens(one.ranks)) == [int((exact > exact[tokens[row]]).sum()) + 1]


def test_of_equals_the_lower_id_comes_first_whatever_the_company() -> None:
    flat = torch.zeros(3, 4000)
    flat[1, 7::2] = -0.0
    for number, told in enumerate(describe(flat, [9, 9, 9], [4, 4, 4])):
        assert list(unpack_tokens(told.ids)) == [9, 0, 1, 2, 3], number
        assert list(unpack_tokens(told.ranks)) == [1]
    together = describe(LOGITS, [1, 2, 3, 4, 5, 6], [3, 0, 3, 7, 3, 0])
    for row, best in enumerate([3, 0, 3, 7, 3, 0]):
        (alone,) = describe(LOGITS[row : row + 1], [row + 1], [best])
        assert (alone.ids, alone.values, alone.ranks) == (together[row].ids, together[row].values, together[row].ranks)


def test_more_than_the_vocabulary_is_the_vocabulary() -> None:
    (told,) = describe(torch.tensor([[1.0, 3.0, 2.0]]), [0], [20])
    assert list(unpack_tokens(told.ids)) == [0, 1, 2, 0]


def test_an_impossible_token_has_minus_infinity_and_a_broken_row_raises_nothing() -> None:
    logits = torch.tensor([[0.0, float("-inf")], [float("nan"), 1.0]])
    told = describe(logits, [1, NO_TOKEN], [2, 2])
    assert values(told[0]) == [float("-inf"), 0.0, float("-inf")] and len(told) == 2


def test_blocks_do_not_change_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = describe(LOGITS, [1] * 6, [2] * 6)
    monkeypatch.setattr(sampler, "_BLOCK_ELEMENTS", 1100)
    assert describe(LOGITS, [1] * 6, [2] * 6) == whole
