"""Logprobs of the prompt tokens that a step computes, for the sequences that ask.

Where it stands in the flow: `torch_runner.py`, between the last layer and the LM head, in steps with such rows only.
The logits of a long prompt would not fit into memory at once (8,192 tokens of a vocabulary of 128,000 are 4 GiB), so
the LM head goes over them in blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.messages.plan import Logprobs
from minisgl_backend.sampling.logprobs import Ranked
from minisgl_backend.sampling.masks import Rows
from minisgl_backend.sampling.sampler import blocks
from minisgl_backend.worker.slots import SlotState


def tokens_asked(state: SlotState, slots: Rows, starts: Rows, lengths: Rows) -> Rows:
    """How many tokens of each row [rows] are followed by a prompt token whose logprobs are asked for: its first ones.

    A sequence's outputs are not its prompt, also when it was admitted with them after a retraction.
    """
    followed = np.minimum(starts + lengths, state.output_starts[slots] - 1) - starts
    return np.where(state.sampling.prompt_logprobs[slots] >= 0, followed.clip(min=0), 0)


def describe_prompts(
    state: SlotState,
    slots: Rows,
    starts: Rows,
    firsts: Rows,
    asked: Rows,
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
) -> tuple[Logprobs, ...]:
    """One for each row of which `asked` > 0, in order. firsts [rows]: where in hidden [tokens, …] a row begins."""
    vocab, best = state.vocab, state.sampling.prompt_logprobs
    told: list[Logprobs] = []
    for row in np.flatnonzero(asked):
        slot, start, first = int(slots[row]), int(starts[row]), int(firsts[row])
        parts = []
        for places in blocks(np.arange(asked[row]), vocab):
            index = torch.from_numpy(places).to(hidden.device)
            targets = state.tokens_at(torch.full_like(index, slot), index + start + 1).long()
            parts.append(Ranked.of(head(hidden[index + first]), targets, int(best[slot])))
        told.append(Ranked.joined(parts).logprobs(start + 1))
    return tuple(told)
