"""How likely tokens were, and which were likeliest: of sampled tokens and of prompts.

Where it stands in the flow: `worker/torch_runner.py` asks for the rows whose sequences do, after the draw. As in vLLM
the distribution is that of the raw logits, before everything that sampling does to them; log_softmax in fp32. What is
told of a token does not depend on other rows, also where logits tie: of equals the lower id comes first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl_backend.messages.plan import Logprobs
from minisgl_backend.sampling.masks import Rows
from minisgl_backend.sampling.sampler import blocks


def describe_sampled(logits: Tensor, tokens: Tensor, best: Rows, positions: Rows) -> tuple[Logprobs, ...]:
    """logits [rows, vocab], tokens [rows] int64 on their device; best, positions [rows] on the host → of each row whose
    `best` is at least 0 the token, at its position, and so many of the best tokens.

    What is told of a NO_TOKEN means nothing.
    """
    told: dict[int, Logprobs] = {}
    for count in np.unique(best[best >= 0]):
        for rows in blocks(np.flatnonzero(best == count), logits.shape[1]):
            index = torch.from_numpy(rows).to(logits.device)
            ranked = Ranked.of(logits[index], tokens[index].clamp(min=0), int(count))
            for place, row in enumerate(rows):
                told[int(row)] = ranked.logprobs(int(positions[row]), slice(place, place + 1))
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
        raw = logits.float()
        ids = tokens[:, None]
        own = raw.gather(-1, ids)
        ranks = (raw > own).sum(-1) + 1
        if best:
            ids = torch.cat((ids, _best_ids(raw, min(best, raw.shape[1]))), -1)
        values = raw.log_softmax(-1).gather(-1, ids)
        return cls(ids.to(torch.int32).cpu().numpy(), values.cpu().numpy(), ranks.to(torch.int32).cpu().numpy())

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


def _best_ids(logits: Tensor, best: int) -> Tensor:
    """logits [n, vocab] fp32 → the ids of the best [n, best], best first.

    One integer per token: its logit's bits, so that they are in the logit's order, then its id, so that no two tie.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0.0 is 0.0
    ordered = (bits ^ (bits >> 31 & 0x7FFFFFFF)).to(torch.int64)
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = (ordered << 32) + (logits.shape[1] - 1 - ids)
    return keys.topk(best).indices
