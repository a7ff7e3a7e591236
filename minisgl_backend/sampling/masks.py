"""Masks that somebody has filled in for some rows of a step: a grammar says which tokens may follow.

Where it stands in the flow: the runner may have them filled while the forward runs, since all tokens up to the one to
be drawn are known by then; `draw.py` lays them over the logits of their rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """rows [n]: which of the step's sampled rows, ascending. bits [n, ⌈vocab / 32⌉] int32, on any device: the token
    32 · w + b of row i may be drawn when bit b of bits[i, w] is set.
    """

    rows: Rows
    bits: Tensor

    def within(self, rows: Rows) -> TokenMasks:
        """Of a block of rows (ascending) those that have a mask, numbered by their places in the block."""
        mine = np.isin(self.rows, rows)
        return TokenMasks(np.searchsorted(rows, self.rows[mine]), self.bits[torch.from_numpy(np.flatnonzero(mine))])

    def cover(self, logits: Tensor) -> None:
        """-inf where a token of logits [rows of the block, vocab] may not be drawn. In place; no other row is touched.

        Bits beyond the vocabulary mean nothing; tokens beyond the bits may not be drawn.
        """
        if not len(self.rows):
            return
        bits = self.bits.to(logits.device)
        places = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = (bits[:, :, None] >> places & 1).bool().flatten(1)
        covered = min(logits.shape[1], allowed.shape[1])
        index = torch.from_numpy(self.rows).to(logits.device)
        own = logits[index]
        own[:, :covered].masked_fill_(~allowed[:, :covered], -torch.inf)
        own[:, covered:] = -torch.inf
        logits[index] = own
