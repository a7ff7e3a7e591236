"""What changes single logits of a row: penalties, biases, allowed tokens, words not to be said, ends held back.

Where it stands in the flow: `worker/slots.py` keeps a RuleBook beside the tokens, `draw.py` has the rules of a step's
rows applied to a copy of their raw logits, before temperature. Most rows have none and never come here.

Nothing is counted from step to step: what stands in prompt and output is read off the tokens that the worker knows,
whether they were sampled in the step before, came back after a retraction or were found in the cache. So it can not
get out of step with them. A row's tokens are read by attention in every layer anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.messages.sampling import TokenRules
from minisgl_backend.messages.tokens import unpack_tokens
from minisgl_backend.sampling.masks import Rows
from minisgl_backend.sampling.utf8 import Bits, pack_bits

_LARGEST = 3e38  # of a finite logit that a rule has made: fp32 holds it


@dataclass(frozen=True, slots=True)
class SlotRules:
    """One sequence's TokenRules with its ids as int64. All of it is on the host: of a step's rules those that act are
    sent where the logits are.

    A bad word is its last token and the tokens before it, one entry each: entry i of `before` must stand
    `before_back[i]` places before the token that is drawn, or the word `before_word[i]` is not about to be said.
    """

    penalties: tuple[float, float, float]  # presence, frequency, repetition
    bias_ids: Tensor
    biases: Tensor  # float64
    forbidden: Tensor | None  # bool [vocab]: all but the allowed tokens; None: all are allowed
    allowed_bits: Bits | None  # the same as a mask [⌈vocab / 32⌉], see masks.py
    bad_ids: Tensor  # [words]
    before: Tensor
    before_word: Tensor
    before_back: Tensor
    min_tokens: int
    held_ids: Tensor

    @property
    def penalise(self) -> bool:
        return self.penalties != (0.0, 0.0, 1.0)


class RuleBook:
    """The rules of each slot's present life.

    Reads, and never writes, what the worker keeps: tokens [slots, context] and where each slot's output starts [slots].
    """

    def __init__(self, tokens: Tensor, output_starts: Rows, vocab: int) -> None:
        slots = len(output_starts)
        self._tokens = tokens
        self._output_starts = output_starts
        self._vocab = vocab
        self._rules: list[SlotRules | None] = [None] * slots
        self._has_rules = np.zeros(slots, np.bool_)

    def put(self, slot: int, rules: TokenRules | None) -> None:
        """A slot's new life."""
        self._rules[slot] = None if rules is None else _prepare(rules, self._vocab)
        self._has_rules[slot] = rules is not None

    def of(self, slots: Rows, positions: Rows) -> StepRules | None:
        """The rules of the rows of a step, which sample the tokens at `positions` of `slots`. None: no row has any."""
        rows = np.flatnonzero(self._has_rules[slots])
        if not len(rows):
            return None
        slots = slots[rows]
        rules = tuple(rule for slot in slots if (rule := self._rules[slot]) is not None)
        return StepRules(self._tokens, rows, rules, slots, positions[rows], self._output_starts[slots])


@dataclass(frozen=True, slots=True)
class StepRules:
    """Rules of some rows of a step, in place on logits [rows of a block, vocab] fp32. No other row is touched, and
    what becomes of a row depends on its own logits, rules and tokens alone.
    """

    tokens: Tensor  # of all slots [slots, context]
    rows: Rows  # [n], ascending
    rules: tuple[SlotRules, ...]
    slots: Rows
    positions: Rows  # of the token to be drawn: so many are known
    output_starts: Rows

    @property
    def width(self) -> int:
        """What penalties work on beside a row's logits: so many tokens, as many as its longest neighbour has."""
        return max((int(self.positions[row]) for row in self._those(lambda rules: rules.penalise)), default=0)

    def within(self, rows: Rows) -> StepRules:
        """Of a block of rows (ascending) those that have rules, numbered by their places in the block."""
        mine = np.flatnonzero(np.isin(self.rows, rows))
        return self._take(mine, np.searchsorted(rows, self.rows[mine]))

    def change(self, logits: Tensor) -> None:
        """Biases, penalties, and -inf for all but the allowed tokens, in this order."""
        self._add_biases(logits)
        penalised = self._those(lambda rules: rules.penalise)
        if len(penalised):
            self._take(penalised, self.rows[penalised])._penalise(logits)
        self._keep_allowed(logits)

    def withhold(self, logits: Tensor) -> None:
        """-inf for tokens that would complete a bad word, and for those that would end the output too early.

        Where nothing at all would be left, the ends may be drawn; where that leaves nothing either, the bad words.
        """
        held, bad = self._held(logits.device), self._bad(logits.device)
        if held is None and bad is None:
            return
        dead = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
        before = [None if some is None else logits[some.rows, some.ids] for some in (held, bad)]
        for some in (held, bad):
            if some is not None:
                some.cover(logits)
        for some, values, other in ((held, before[0], bad), (bad, before[1], None)):
            if some is None or values is None:
                continue
            rows = torch.unique(some.rows)
            dead[rows] = logits[rows].amax(-1) == -torch.inf
            now = logits[some.rows, some.ids]
            logits[some.rows, some.ids] = torch.where(dead[some.rows], values, now)
            if other is not None:
                other.cover(logits)  # a token may be both

    def _add_biases(self, logits: Tensor) -> None:
        ids = self._pairs([rules.bias_ids for rules in self.rules], logits.device)
        if ids is None:
            return
        own, biases = logits[ids.rows, ids.ids], torch.cat([rules.biases for rules in self.rules]).to(logits.device)
        logits[ids.rows, ids.ids] = _held_finite(own, own.double() + biases)

    def _penalise(self, logits: Tensor) -> None:
        """Repetition over prompt and output, then frequency and presence over the output (Keskar et al. 2019; OpenAI).

        All rows at once, as wide as the longest; in the others' places stands their first token once more. What is
        written to a token's logit depends on the token alone, so it does not matter how often it is written.
        """
        device = logits.device
        slots, rows = (torch.from_numpy(which).to(device) for which in (self.slots, self.rows))
        width = int(self.positions.max())
        places = torch.arange(width, device=device)
        ends, starts = (torch.from_numpy(which).to(device)[:, None] for which in (self.positions, self.output_starts))
        ids = self.tokens[slots, :width].long()
        ids = torch.where(places < ends, ids, ids[:, :1])
        output = (places >= starts) & (places < ends)
        counts = torch.zeros(len(rows), logits.shape[1], dtype=torch.int32, device=device)
        counts.scatter_add_(1, ids, output.to(torch.int32))
        said = counts.gather(1, ids).double()
        presence, frequency, repetition = (
            torch.tensor(column, dtype=torch.float64, device=device)[:, None]
            for column in zip(*(rules.penalties for rules in self.rules), strict=True)
        )
        old = logits[rows[:, None], ids]
        new = old.double()
        new = torch.where(new > 0, new / repetition, new * repetition)
        new = _finite(new) - frequency * said - presence * (said > 0)
        logits[rows[:, None], ids] = _held_finite(old, new)

    def _keep_allowed(self, logits: Tensor) -> None:
        which = self._those(lambda rules: rules.forbidden is not None)
        if len(which):
            rows = torch.from_numpy(self.rows[which]).to(logits.device)
            forbidden = torch.stack([rules.forbidden for rules in self.rules if rules.forbidden is not None])
            forbidden = forbidden.to(logits.device)
            logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)

    def _held(self, device: torch.device) -> _Pairs | None:
        early = self.positions - self.output_starts
        nothing = torch.zeros(0, dtype=torch.int64)
        return self._pairs(
            [
                rules.held_ids if outputs < rules.min_tokens else nothing
                for rules, outputs in zip(self.rules, early, strict=True)
            ],
            device,
        )

    def _bad(self, device: torch.device) -> _Pairs | None:
        """Bad words whose other tokens stand at the end of the output; those of one token always."""
        words = self._pairs([rules.bad_ids for rules in self.rules], device)
        if words is None:
            return None
        counts = np.array([len(rules.bad_ids) for rules in self.rules])
        first_words = np.cumsum(counts) - counts
        of_row = np.repeat(np.arange(len(self.rules)), [len(rules.before) for rules in self.rules])
        slots, starts, ends, firsts = (
            torch.from_numpy(column[of_row]).to(device)
            for column in (self.slots, self.output_starts, self.positions, first_words)
        )
        backs, before, of_words = (
            torch.cat(columns).to(device)
            for columns in zip(*((one.before_back, one.before, one.before_word) for one in self.rules), strict=True)
        )
        places = ends - backs
        there = self.tokens[slots, places.clamp(min=0)] == before
        missing = (~(there & (places >= starts))).to(torch.int32)
        word = firsts + of_words
        missing = torch.zeros(len(words.ids), dtype=torch.int32, device=device).index_add_(0, word, missing)
        return _Pairs(words.rows, words.ids, missing == 0)

    def _pairs(self, ids: Sequence[Tensor], device: torch.device) -> _Pairs | None:
        """Row i with each of ids[i]; None when there are none."""
        counts = [len(some) for some in ids]
        if not any(counts):
            return None
        return _Pairs(torch.from_numpy(np.repeat(self.rows, counts)).to(device), torch.cat(list(ids)).to(device), None)

    def _those(self, ask: Callable[[SlotRules], bool]) -> Rows:
        return np.flatnonzero([ask(rules) for rules in self.rules])

    def _take(self, which: Rows, rows: Rows) -> StepRules:
        """The entries `which`, as `rows`."""
        rules = tuple(self.rules[one] for one in which)
        return StepRules(self.tokens, rows, rules, self.slots[which], self.positions[which], self.output_starts[which])


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Single logits: of row rows[i] that of token ids[i]; a pair may be there twice."""

    rows: Tensor
    ids: Tensor
    active: Tensor | None  # bool; None: all are

    def cover(self, logits: Tensor) -> None:
        """-inf where active."""
        if self.active is None:
            logits[self.rows, self.ids] = -torch.inf
        else:
            logits[self.rows[self.active], self.ids[self.active]] = -torch.inf


def _held_finite(old: Tensor, new: Tensor) -> Tensor:
    """new (float64), held to what fp32 can tell, where old is finite; elsewhere old."""
    return torch.where(old.isfinite(), _finite(new).float(), old)


def _finite(values: Tensor) -> Tensor:
    return values.clamp(-_LARGEST, _LARGEST)


def _prepare(rules: TokenRules, vocab: int) -> SlotRules:
    def ids(packed: bytes) -> Tensor:
        return torch.from_numpy(np.asarray(unpack_tokens(packed), np.int64))

    def column(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    words = [unpack_tokens(word) for word in rules.bad_words]
    before = [
        (token, number, len(word) - 1 - place)
        for number, word in enumerate(words)
        for place, token in enumerate(word[:-1])
    ]
    held, allowed = ids(rules.held_ids), ids(rules.allowed_ids)
    forbidden = torch.ones(vocab, dtype=torch.bool).index_fill_(0, allowed, False) if len(allowed) else None
    return SlotRules(
        penalties=(rules.presence_penalty, rules.frequency_penalty, rules.repetition_penalty),
        bias_ids=ids(rules.bias_ids),
        biases=torch.tensor(rules.biases, dtype=torch.float64),
        forbidden=forbidden,
        allowed_bits=None if forbidden is None else pack_bits(~forbidden.numpy()[None])[0],
        bad_ids=column([word[-1] for word in words]),
        before=column([token for token, _, _ in before]),
        before_word=column([number for _, number, _ in before]),
        before_back=column([back for _, _, back in before]),
        min_tokens=rules.min_tokens,
        held_ids=held[held < vocab],  # a checkpoint may name end tokens that it has no logits for
    )
