"""A draw on a GPU as the host sees it: over meta tensors, which have no values, so whatever waited for one would fail.

What is drawn: tests/unit/kernels/interpreted/test_sampling.py and test_penalties.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from gpu.launches import META, collecting
from minisgl_backend.messages.sampling import GREEDY, Sampling, TokenRules
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.sampling.masks import TokenMasks
from minisgl_backend.sampling.parameters import SamplingColumns
from minisgl_backend.sampling.rules import RuleBook
from minisgl_backend.sampling.triton_draw import TritonDraw

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

VOCAB = 1000
DRAWN, FILTERED = Sampling(0.8, 0, 1.0, 1, 0), Sampling(0.8, 5, 0.9, 1, 0)
RULES = TokenRules(0.5, 0.5, 1.2, pack_tokens([3]), (1.0,), pack_tokens([5, 6]), (pack_tokens([7, 8]),), 9, b"\0" * 4)


class Uploads:
    """Counts transfers."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        self.count += 1
        return [torch.from_numpy(np.ascontiguousarray(array)).to(META) for array in arrays]


def launches(samplings: Sequence[Sampling], masked: Sequence[int] = ()) -> tuple[set[str], int]:
    """Which kernels a step of these rows launches, and how many transfers it makes."""
    rows, upload = len(samplings), Uploads()
    parameters, positions = SamplingColumns.greedy(rows), np.arange(rows) % 20 + 5
    book = RuleBook(torch.empty(rows, 32, dtype=torch.int32, device=META), np.full(rows, 3), VOCAB)
    for row, sampling in enumerate(samplings):
        parameters.put(row, sampling)
        book.put(row, sampling.rules)
    bits = torch.zeros(len(masked), -(-VOCAB // 32), dtype=torch.int32)
    masks = TokenMasks(np.array(masked), bits) if masked else None
    with collecting() as seen:
        draw = TritonDraw(upload)(parameters, positions, book.of(np.arange(rows), positions), masks)
        tokens = draw(torch.empty(rows, VOCAB, dtype=torch.bfloat16, device=META))
    assert tokens.shape == (rows,) and tokens.dtype == torch.int64
    return {launch.name for launch in seen.launches.values()}, upload.count


def test_rows_pay_for_what_the_step_asks_for_in_one_transfer() -> None:
    assert launches([GREEDY] * 300) == ({"_best", "_finish"}, 1)
    assert launches([GREEDY, DRAWN]) == ({"_best", "_race", "_finish"}, 1)
    assert launches([GREEDY, FILTERED] * 100) == ({"_best", "_race", "_filter", "_finish"}, 1)


def test_rules_and_masks_cost_three_transfers_for_all_of_a_block() -> None:
    masked, transfers = launches([GREEDY] * 20, masked=(3, 19))
    assert masked == {"_best", "_finish", "_change"} and transfers == 4
    ruled, transfers = launches([Sampling(0.9, 9, 0.9, 1, 0, rules=RULES), GREEDY] * 10, masked=(3, 4))
    of_rules = {"_add_biases", "_mark_said", "_mark_withheld", "_change", "_withhold"}
    assert ruled == {"_best", "_race", "_filter", "_finish", *of_rules} and transfers == 4
