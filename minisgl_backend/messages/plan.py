"""Between the scheduler and the workers: one plan per step to every rank, one result per step from rank 0.

Everything with an effect on a worker is in the plan; workers decide nothing. Columns instead of row objects: a
decode row costs a few bytes, and nothing is allocated per row on either side.

What a worker keeps between steps, per slot: the tokens known so far (prompt, then what it sampled), the page table
(append-only while the slot lives), the sampling parameters. A plan carries only the changes.
"""

from __future__ import annotations

import msgspec

from minisgl_backend.messages.ids import SlotId, StepId
from minisgl_backend.messages.sampling import Sampling

NO_TOKEN = -1
"""In StepResult.tokens: the row's logits were not finite; its sequence fails alone."""


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A slot begins a new life: its tokens become the prompt, its page table becomes empty.

    A sequence that was retracted begins again with all its tokens as the prompt. Its first row may start behind pages
    that hold what others have computed.

    Of the admissions of a plan that have the same grammar (by its key) the first says what it is; in the others
    Grammar.compiled is empty. It may be a megabyte, and n answers to one prompt have the same.
    """

    slot: SlotId
    prompt: bytes  # packed int32
    sampling: Sampling
    num_outputs: int = 0  # so many of the last tokens of `prompt` were sampled before


class PageGrant(msgspec.Struct, frozen=True, array_like=True):
    """Pages appended to a slot's page table, before the step's rows run: the slot's row ends in the last of them."""

    slot: SlotId
    pages: tuple[int, ...]  # PageIds, in table order


class BatchPlan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """One step. Row i computes tokens row_starts[i] … row_starts[i] + row_lengths[i] - 1 of slot row_slots[i]:
    their K/V are written to the slot's pages, and when row_samples[i] is 1 the token after them is sampled and
    appended to the slot's tokens. A prompt chunk and a decode token (length 1) are the same thing.

    Each layer writes the K/V of all rows before any row attends: a row may read pages that another row of the same
    step fills.
    """

    step: StepId
    admissions: tuple[Admission, ...]
    grants: tuple[PageGrant, ...]
    row_slots: tuple[int, ...]  # SlotIds, each at most once
    row_starts: tuple[int, ...]  # tokens whose K/V are in the pool already; may be past the last row's end
    row_lengths: tuple[int, ...]  # ≥ 1
    row_samples: tuple[int, ...]  # 0 or 1


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of some tokens of one sequence that follow each other: the distribution each was drawn from (or, in a prompt,
    would have been), before temperature, penalties, masks and filters.
    """

    position: int  # of the first of them in its sequence, the prompt included
    ids: bytes  # packed int32 [tokens, 1 + best]: the token itself, then the best ones, best first
    values: bytes  # float32, little-endian [tokens, 1 + best]: natural logarithms
    ranks: bytes  # packed int32 [tokens]: how many tokens are likelier than the token itself, and one


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """tokens[j] is the token of the j-th row with row_samples = 1, in plan order, or NO_TOKEN.

    With `failed` the step as a whole came to nothing: no tokens, and what it should have written is not there. Every
    plan whose slots were not all admitted anew since must be answered so, too.
    """

    step: StepId
    tokens: tuple[int, ...]
    failed: str = ""  # why, for the log; empty: it ran
    logprobs: tuple[Logprobs, ...] = ()  # of the sampled rows that ask (NO_TOKEN rows included), in plan order
    prompt_logprobs: tuple[Logprobs, ...] = ()  # of the rows whose sequence asks, and that hold prompt tokens, likewise
