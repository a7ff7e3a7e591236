"""Rank 0 draws the tokens of a step, the others hear of them: no difference of rounding can make ranks part.

Where it stands in the flow: between the runner of one of several ranks and who draws (sampling/draw.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.distributed.group import RankGroup
from minisgl_backend.sampling.draw import Draw, PrepareDraw
from minisgl_backend.sampling.masks import Rows, TokenMasks
from minisgl_backend.sampling.parameters import SamplingColumns
from minisgl_backend.sampling.rules import StepRules


@dataclass(frozen=True, slots=True)
class FirstDraws:
    """See PrepareDraw."""

    draw: PrepareDraw  # asked on rank 0 alone
    group: RankGroup

    def __call__(
        self,
        parameters: SamplingColumns,
        positions: Rows,
        rules: StepRules | None = None,
        masks: TokenMasks | None = None,
    ) -> Draw:
        own = self.draw(parameters, positions, rules, masks) if self.group.rank == 0 else None

        def draw(logits: Tensor) -> Tensor:
            if own is not None:
                return self.group.from_first(own(logits))
            return self.group.from_first(torch.empty(len(positions), dtype=torch.int64, device=logits.device))

        return draw
