"""What changes single logits of a row, on a GPU: see `sampling/rules.py` for what is computed, and in which order.

    tokens of the row ─┐
    what is withheld ──┴─ marks [rows, vocab] ─┐
    logits ─ biases ───────────────────────────┴─ penalties, masks, what is left ─ withhold

Tokens are marked by integer atomics, so their order does not matter. Values are computed in float64, as there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

HELD, BAD = 1, 2
"""Kinds of what is withheld: ends that come too early, words not to be said."""

_BAD = tl.constexpr(BAD)
_SEEN_MARK = tl.constexpr(1 << 28)  # beside the count of outputs, in the bits below
_HELD_MARK = tl.constexpr(1 << 29)
_BAD_MARK = tl.constexpr(1 << 30)
_COUNT = tl.constexpr((1 << 28) - 1)
_FREE, _HELD_ONLY = tl.constexpr(1), tl.constexpr(2)  # what is left in a row: tokens that nobody withholds; held ones
_LARGEST = tl.constexpr(3e38)

_BLOCK = 1024
_PAIRS = 128


@dataclass(frozen=True, slots=True)
class TokenRows:
    """What the rows have said: prompts and outputs. Integers are int32, on the device."""

    tokens: Tensor  # of all slots [slots, context]
    slots: Tensor  # [rows]
    ends: Tensor  # [rows]: so many tokens are known
    starts: Tensor  # [rows]: of them, those from here on are output


@dataclass(frozen=True, slots=True)
class Biases:
    """Pairs, each once."""

    rows: Tensor  # int32 [pairs]
    ids: Tensor
    values: Tensor  # float64


@dataclass(frozen=True, slots=True)
class Penalties:
    """[rows]; rows without any have (0, 0, 1)."""

    width: int  # the most tokens that such a row has
    presence: Tensor  # float64
    frequency: Tensor
    repetition: Tensor
    penalised: Tensor  # int32: whether the row has any


@dataclass(frozen=True, slots=True)
class Masks:
    """What may be drawn at all, of some rows."""

    bits: Tensor  # int32 [masks, words]; as in sampling/masks.py
    of_row: Tensor  # int32 [rows]: its mask; -1: none


@dataclass(frozen=True, slots=True)
class Withheld:
    """Tokens that are not drawn, unless nothing else is left: pairs, each with what must stand before it."""

    longest: int  # part of `before`
    rows: Tensor  # int32 [pairs]
    ids: Tensor
    kinds: Tensor  # HELD or BAD
    firsts: Tensor  # int32 [pairs + 1]: where each one's part of `before` begins
    before: Tensor  # int32: a token
    backs: Tensor  # int32: so many places before the one that is drawn, within the output


@dataclass(frozen=True, slots=True)
class RowChanges:
    """All that changes the logits of some rows. None: nobody asked."""

    said: TokenRows | None  # there with penalties and with what is withheld
    biases: Biases | None
    penalties: Penalties | None
    masks: Masks | None
    withheld: Withheld | None


def change_rows(logits: Tensor, changes: RowChanges) -> None:
    """logits [rows, vocab] fp32, contiguous: in place. Takes 4 bytes a logit for the time being."""
    rows, vocab = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32, (logits.dtype, logits.stride())
    if (biases := changes.biases) is not None:
        pairs = len(biases.ids)
        grid = (triton.cdiv(pairs, _PAIRS),)
        _add_biases[grid](logits, biases.rows, biases.ids, biases.values, vocab, pairs, BLOCK=_PAIRS, num_warps=4)
    marks = _marks(logits, changes)
    left = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    penalties, masks, nothing = (
        changes.penalties,
        changes.masks,
        torch.empty(1, dtype=torch.float64, device=logits.device),
    )
    presence, frequency, repetition = (
        (nothing,) * 3 if penalties is None else (penalties.presence, penalties.frequency, penalties.repetition)
    )
    bits, of_row, words = (left, left, 0) if masks is None else (masks.bits, masks.of_row, masks.bits.shape[1])
    _change[rows, triton.cdiv(vocab, _BLOCK)](
        logits, left if marks is None else marks, presence, frequency, repetition, bits, of_row, left, vocab, words,
        int(marks is not None), int(penalties is not None), int(masks is not None), BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    if (withheld := changes.withheld) is not None:
        pairs = len(withheld.ids)
        grid = (triton.cdiv(pairs, _PAIRS),)
        _withhold[grid](logits, marks, left, withheld.rows, withheld.ids, vocab, pairs, BLOCK=_PAIRS, num_warps=4)


def _marks(logits: Tensor, changes: RowChanges) -> Tensor | None:
    """int32, like logits: how often each token stands in the output, and marks. None: nobody needs them."""
    said, penalties, withheld = changes.said, changes.penalties, changes.withheld
    if said is None:
        return None
    rows, vocab = logits.shape
    context = said.tokens.stride(0)
    marks = torch.zeros(rows, vocab, dtype=torch.int32, device=logits.device)
    if penalties is not None:
        _mark_said[rows, triton.cdiv(penalties.width, _BLOCK)](
            marks, said.tokens, said.slots, said.ends, said.starts, penalties.penalised, vocab, context,
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    if withheld is not None:
        pairs = len(withheld.ids)
        _mark_withheld[(triton.cdiv(pairs, _PAIRS),)](
            marks, said.tokens, said.slots, said.ends, said.starts, withheld.rows, withheld.ids, withheld.kinds,
            withheld.firsts, withheld.before, withheld.backs, vocab, context, pairs, withheld.longest,
            BLOCK=_PAIRS, num_warps=4,
        )  # fmt: skip
    return marks


@triton.jit(do_not_specialize=["pairs"])
def _add_biases(logits, rows, ids, values, vocab, pairs, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < pairs
    place = logits + tl.load(rows + at, there, 0).to(tl.int64) * vocab + tl.load(ids + at, there, 0)
    old = tl.load(place, there, 0.0)
    tl.store(place, _held_finite(old, old.to(tl.float64) + tl.load(values + at, there, 0.0)), there)


@triton.jit
def _mark_said(marks, tokens, slots, ends, starts, penalised, vocab, context, BLOCK: tl.constexpr):
    """A part of what a row has said: outputs are counted, what stands in the prompt is marked."""
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if tl.load(penalised + row) > 0:
        there = at < tl.load(ends + row)
        output = at >= tl.load(starts + row)
        token = tl.load(tokens + tl.load(slots + row).to(tl.int64) * context + at, there, 0)
        place = marks + row.to(tl.int64) * vocab + token
        tl.atomic_add(place, 1, there & output, sem="relaxed")
        tl.atomic_or(place, _SEEN_MARK, there & (at < tl.load(starts + row)), sem="relaxed")


@triton.jit(do_not_specialize=["pairs", "longest"])
def _mark_withheld(
    marks, tokens, slots, ends, starts, rows, ids, kinds, firsts, before, backs, vocab, context, pairs, longest,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Pairs whose tokens before stand there."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < pairs
    row = tl.load(rows + at, there, 0)
    own = tokens + tl.load(slots + row, there, 0).to(tl.int64) * context
    end, start = tl.load(ends + row, there, 0), tl.load(starts + row, there, 0)
    first, last = tl.load(firsts + at, there, 0), tl.load(firsts + at + 1, there, 0)
    missing = tl.full((BLOCK,), 0, tl.int32)
    for step in range(0, longest):
        asked = first + step < last
        place = end - tl.load(backs + first + step, asked, 0)
        known = asked & (place >= start)
        same = tl.load(own + place, known, -1) == tl.load(before + first + step, asked, -2)
        missing += tl.where(asked, tl.where(same, 0, 1), 0)
    mark = tl.where(tl.load(kinds + at, there, 0) == _BAD, _BAD_MARK, _HELD_MARK)
    place = marks + row.to(tl.int64) * vocab + tl.load(ids + at, there, 0)
    tl.atomic_or(place, mark, there & (missing == 0), sem="relaxed")


@triton.jit(do_not_specialize=["words", "marked", "penalised", "masked"])
def _change(
    logits, marks, presence, frequency, repetition, bits, of_row, left, vocab, words, marked, penalised, masked,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of a row: penalties, then its mask; and what is left. One machine code, whatever is asked for."""
    row, ids = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    place = logits + row.to(tl.int64) * vocab + ids
    x = tl.load(place, inside, -float("inf"))
    mark = tl.load(marks + row.to(tl.int64) * vocab + ids, ids < vocab * marked, 0)
    if penalised > 0:
        said = mark & _COUNT
        seen = (said > 0) | ((mark & _SEEN_MARK) > 0)
        if tl.max(seen.to(tl.int32)) > 0:
            repeat, old = tl.load(repetition + row), x.to(tl.float64)
            new = _finite(tl.where(old > 0.0, old / repeat, old * repeat))
            new = new - tl.load(frequency + row) * said.to(tl.float64)
            new = new - tl.load(presence + row) * (said > 0).to(tl.float64)
            x = tl.where(seen, _held_finite(x, new), x)
    if masked > 0:
        mask = tl.load(of_row + row)
        if mask >= 0:
            word = tl.load(bits + mask.to(tl.int64) * words + ids // 32, inside & (ids // 32 < words), 0)
            x = tl.where(((word >> (ids % 32)) & 1) > 0, x, -float("inf"))
    tl.store(place, x, inside)
    if marked > 0:
        alive, free = inside & (x > -float("inf")), (mark & (_HELD_MARK | _BAD_MARK)) == 0
        only_held = (mark & (_HELD_MARK | _BAD_MARK)) == _HELD_MARK
        found = tl.max((alive & free).to(tl.int32)) * _FREE + tl.max((alive & only_held).to(tl.int32)) * _HELD_ONLY
        tl.atomic_or(left + row, found, sem="relaxed")


@triton.jit(do_not_specialize=["pairs"])
def _withhold(logits, marks, left, rows, ids, vocab, pairs, BLOCK: tl.constexpr):
    """-inf for what is withheld. Where nothing else is left ends may be drawn; where there are none, bad words."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < pairs
    row = tl.load(rows + at, there, 0)
    place = row.to(tl.int64) * vocab + tl.load(ids + at, there, 0)
    mark, found = tl.load(marks + place, there, 0), tl.load(left + row, there, 0)
    bad, held = (mark & _BAD_MARK) > 0, (mark & _HELD_MARK) > 0
    covered = tl.where(bad, found, tl.where(held, found & _FREE, 0)) > 0
    tl.store(logits + place, -float("inf"), there & covered)


@triton.jit
def _held_finite(old, new):
    """new (float64), held to what fp32 can tell, where old is finite; elsewhere old."""
    finite = (old == old) & (tl.abs(old) < float("inf"))
    return tl.where(finite, _finite(new).to(tl.float32), old)


@triton.jit
def _finite(values):
    return tl.minimum(tl.maximum(values, -_LARGEST), _LARGEST)
