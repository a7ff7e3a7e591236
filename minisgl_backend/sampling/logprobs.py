"""How likely tokens were, and which were likeliest: of sampled tokens and of prompts.

Where it stands in the flow: `worker/torch_runner.py` has the rows ranked whose sequences ask, after the draw, and tells
when the numbers are on the host. As in vLLM
the distribution is that of the raw logits, before everything that sampling does to them; log_softmax in fp32. What is
told of a token does not depend on other rows, also where logits tie: of equals the lower id comes first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl_backend.messages.plan import Logprobs
from minisgl_backend.sampling.masks import Rows
from minisgl_backend.sampling.sampler import blocks

Asked = tuple[tuple[Rows, int], ...]
"""Rows [n] of a step that ask for so many of the best tokens, in blocks."""


def who_asks(best: Rows, vocab: int) -> Asked:
    """best [rows]: how many each row asks for; below 0: none, and not for its token either."""
    counts = [int(count) for count in np.unique(best[best >= 0])]
    return tuple((rows, count) for count in counts for rows in blocks(np.flatnonzero(best == count), vocab))


def rank_sampled(logits: Tensor, tokens: Tensor, asked: Asked, rows: Sequence[Tensor]) -> Tensor:
    """logits [rows, vocab], tokens [rows] int64 → what `tell_sampled` needs, [ranked_size] int32, on their device.

    rows: those of `asked`, on the device. Waits for nothing.
    """
    parts = []
    for (_, best), index in zip(asked, rows, strict=True):
        ids, values, ranks = _rank(logits[index], tokens[index].clamp(min=0), best)
        parts += [ids.flatten(), values.view(torch.int32).flatten(), ranks]
    return torch.cat(parts)


def ranked_size(asked: Asked, vocab: int) -> int:
    """Numbers that `rank_sampled` gives."""
    return sum(len(rows) * (2 * (1 + min(best, vocab)) + 1) for rows, best in asked)


def tell_sampled(ranked: Tensor, asked: Asked, vocab: int, positions: Rows) -> tuple[Logprobs, ...]:
    """ranked: of `rank_sampled`, on the host → of each row that asks, in order, the token at its position and the best.

    What is told of a NO_TOKEN means nothing.
    """
    told: dict[int, Logprobs] = {}
    numbers, at = ranked.numpy(), 0
    for rows, best in asked:
        count, width = len(rows), 1 + min(best, vocab)
        size = ranked_size(((rows, best),), vocab)
        ids, values, ranks = np.split(numbers[at : at + size], (count * width, 2 * count * width))
        block = Ranked(ids.reshape(count, width), values.view(np.float32).reshape(count, width), ranks)
        at += size
        for place, row in enumerate(rows):
            told[int(row)] = block.logprobs(int(positions[row]), slice(place, place + 1))
    return tuple(told[row] for row in sorted(told))


class Ranked:
    """Columns on the host: ids, values [tokens, 1 + best], ranks [tokens]; see messages.Logprobs."""

    def __init__(self, ids: npt.NDArray[np.int32], values: npt.NDArray[np.float32], ranks: npt.NDArray[np.int32]):
        self._ids = ids
        self._values = values
        self._ranks = ranks

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, best: int) -> Ranked:
        """logits [n, vocab], tokens [n] int64 on their device. Takes twice the memory of logits in int64."""
        ids, values, ranks = (column.cpu().numpy() for column in _rank(logits, tokens, best))
        return cls(ids, values, ranks)

    @classmethod
    def joined(cls, parts: list[Ranked]) -> Ranked:
        """One after another; there is at least one."""
        ids, values, ranks = zip(*((part._ids, part._values, part._ranks) for part in parts), strict=True)
        return cls(np.concatenate(ids), np.concatenate(values), np.concatenate(ranks))

    def logprobs(self, position: int, tokens: slice = slice(None)) -> Logprobs:
        """The message about some of the tokens, the first of which stands at `position`."""
        ids, values, ranks = self._ids[tokens], self._values[tokens], self._ranks[tokens]
        return Logprobs(
            position, ids.astype("<i4").tobytes(), values.astype("<f4").tobytes(), ranks.astype("<i4").tobytes()
        )


def _rank(logits: Tensor, tokens: Tensor, best: int) -> tuple[Tensor, Tensor, Tensor]:
    """See Ranked: ids int32, values fp32, ranks int32, on the device."""
    raw = logits.float()
    ids = tokens[:, None]
    own = raw.gather(-1, ids)
    ranks = (raw > own).sum(-1) + 1
    if best:
        ids = torch.cat((ids, _best_ids(raw, min(best, raw.shape[1]))), -1)
    values = raw.log_softmax(-1).gather(-1, ids)
    return ids.to(torch.int32), values, ranks.to(torch.int32)


def _best_ids(logits: Tensor, best: int) -> Tensor:
    """logits [n, vocab] fp32 → the ids of the best [n, best], best first.

    One integer per token: its logit's bits, so that they are in the logit's order, then its id, so that no two tie.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0.0 is 0.0
    ordered = (bits ^ (bits >> 31 & 0x7FFFFFFF)).to(torch.int64)
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = (ordered << 32) + (logits.shape[1] - 1 - ids)
    return keys.topk(best).indices
