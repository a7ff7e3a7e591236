"""The tokens of a step: rows whose logits are used as they are in one go, those that something changes beside them.

Order, as in vLLM: on the raw logits, in fp32, what changes single logits (`rules.py`) and what a grammar forbids
(`masks.py`); then temperature, min_p, top_k, top_p and one draw (`sampler.py`).

    logits ──┬── all rows ────────────────────────────────────────────── sample ──► tokens
             └── copy of changed rows ── change ── cover ── withhold ─── sample ──► theirs instead

What is drawn for a row without rules and mask costs what it costs without neighbours that have some.

This is the reference, and what a CPU does. A GPU has kernels of its own for it (`triton_draw.py`): who draws is chosen
once per engine (worker/kernel_choice.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.messages.plan import NO_TOKEN
from minisgl_backend.sampling.masks import Rows, TokenMasks
from minisgl_backend.sampling.parameters import SamplingColumns
from minisgl_backend.sampling.rules import StepRules
from minisgl_backend.sampling.sampler import Best, best_of_rows, blocks, sample_tokens


class Draw(Protocol):
    """The draw of one step, of which the host has sent all that it knows."""

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [rows, vocab] → tokens [rows] int64, new, on their device; see draw_tokens. Once."""
        ...


class PrepareDraw(Protocol):
    """Who draws the tokens of an engine."""

    def __call__(
        self,
        parameters: SamplingColumns,
        positions: Rows,
        rules: StepRules | None = None,
        masks: TokenMasks | None = None,
    ) -> Draw:
        """All [rows], on the host; see draw_tokens."""
        ...


@dataclass(frozen=True, slots=True)
class TorchDraw:
    """See PrepareDraw: the reference. On a GPU it waits for the device."""

    best_of_rows: Best = best_of_rows

    def __call__(
        self,
        parameters: SamplingColumns,
        positions: Rows,
        rules: StepRules | None = None,
        masks: TokenMasks | None = None,
    ) -> Draw:
        return partial(
            draw_tokens,
            parameters=parameters,
            positions=positions,
            rules=rules,
            masks=masks,
            best_of_rows=self.best_of_rows,
        )


def draw_tokens(
    logits: Tensor,
    parameters: SamplingColumns,
    positions: Rows,
    rules: StepRules | None = None,
    masks: TokenMasks | None = None,
    best_of_rows: Best = best_of_rows,
) -> Tensor:
    """See sample_tokens. rules, masks: of some of the rows; None when no row has any.

    A row gives NO_TOKEN when its raw logits are not finite, or when its allowed tokens and its grammar have no token in
    common. Does not write to logits.
    """
    if rules is None and masks is None:
        return sample_tokens(logits, parameters, positions, best_of_rows)
    changed = changed_rows(rules, masks)
    plain = parameters.take(np.arange(len(positions)))
    plain.temperature[changed] = 0.0  # of these only whether they are finite is asked
    tokens = sample_tokens(logits, plain, positions, best_of_rows)
    for rows in blocks(changed, max(logits.shape[1], 0 if rules is None else rules.width)):
        index = torch.from_numpy(rows).to(logits.device)
        own = logits[index].float()
        change_logits(own, rows, rules, masks)
        drawn = sample_tokens(own, parameters.take(rows), positions[rows], best_of_rows)
        tokens[index] = torch.where(tokens[index] == NO_TOKEN, NO_TOKEN, drawn)
    return tokens


def changed_rows(rules: StepRules | None, masks: TokenMasks | None) -> Rows:
    """Those that something changes, ascending."""
    with_rules, with_masks = (np.zeros(0, np.int64) if some is None else some.rows for some in (rules, masks))
    return np.union1d(with_rules, with_masks)


def change_logits(logits: Tensor, rows: Rows, rules: StepRules | None, masks: TokenMasks | None) -> Tensor:
    """In place, and given back: logits [rows of the block, vocab] fp32. What a client asked for softly (`withhold`)
    comes last: it yields where nothing else is left.
    """
    own = None if rules is None else rules.within(rows)
    if own is not None:
        own.change(logits)
    if masks is not None:
        masks.within(rows).cover(logits)
    if own is not None:
        own.withhold(logits)
    return logits
