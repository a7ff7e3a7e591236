"""Rules and masks of a block of rows on their way to the kernels of a GPU: arrays of the host, sent in one transfer.

Where it stands in the flow: `triton_draw.py` collects what the rows of a step ask for while the forward of the step is
launched, `kernels/gpu/penalties.py` computes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from minisgl_backend.device.staging import Upload
from minisgl_backend.kernels.gpu.penalties import (
    BAD,
    HELD,
    Biases,
    Masks,
    Penalties,
    RowChanges,
    TokenRows,
    Withheld,
)
from minisgl_backend.sampling.masks import Rows, TokenMasks
from minisgl_backend.sampling.rules import SlotRules, StepRules
from minisgl_backend.sampling.utf8 import Bits

Column = npt.NDArray[Any]


def row_changes(rules: StepRules | None, masks: TokenMasks | None, rows: Rows, upload: Upload) -> RowChanges:
    """rules, masks: of a step; rows: of those of it that make the block, ascending. Row i of the result is rows[i]."""
    own = None if rules is None else rules.within(rows)
    covers = None if masks is None else masks.within(rows)
    groups = {
        Biases: _biases(own) if own is not None else [],
        Penalties: _penalties(own, len(rows)) if own is not None else [],
        Withheld: _withheld(own) if own is not None else [],
        Masks: _masks(own, covers, len(rows)),
    }
    if own is not None and (groups[Penalties] or groups[Withheld]):
        groups[TokenRows] = [_spread(column, own.rows, len(rows)) for column in _said(own)]
    sent = iter(upload([array for group in groups.values() for array in group]))
    tensors = {kind: [next(sent) for _ in group] for kind, group in groups.items()}
    return _assemble(own, groups, tensors)


def _assemble(own: StepRules | None, arrays: dict[type, list[Column]], tensors: dict[type, list[Tensor]]) -> RowChanges:
    said = None if own is None or TokenRows not in tensors else TokenRows(own.tokens, *tensors[TokenRows])
    penalties = withheld = None
    if own is not None and arrays[Penalties]:
        penalties = Penalties(own.width, *tensors[Penalties])
    if arrays[Withheld]:
        withheld = Withheld(int(np.diff(arrays[Withheld][3]).max()), *tensors[Withheld])
    return RowChanges(
        said,
        Biases(*tensors[Biases]) if arrays[Biases] else None,
        penalties,
        Masks(*tensors[Masks]) if arrays[Masks] else None,
        withheld,
    )


def _said(own: StepRules) -> tuple[Rows, Rows, Rows]:
    return own.slots, own.positions, own.output_starts


def _spread(values: Column, rows: Rows, count: int) -> Column:
    """values of some rows → int32 of all; 0 where none is."""
    column = np.zeros(count, np.int32)
    column[rows] = values
    return column


def _biases(own: StepRules) -> list[Column]:
    """rows, ids, values."""
    counts = [len(rules.bias_ids) for rules in own.rules]
    if not any(counts):
        return []
    ids, values = (np.concatenate(some) for some in zip(*map(_own_biases, own.rules), strict=True))
    return [np.repeat(own.rows, counts).astype(np.int32), ids.astype(np.int32), values]


def _own_biases(rules: SlotRules) -> tuple[Column, Column]:
    return rules.bias_ids.numpy(), rules.biases.numpy()


def _penalties(own: StepRules, count: int) -> list[Column]:
    """presence, frequency, repetition, whether a row has any."""
    penalised = _spread(np.array([rules.penalise for rules in own.rules], np.int32), own.rows, count)
    if not penalised.any():
        return []
    columns = np.tile(np.array([[0.0], [0.0], [1.0]]), count)
    columns[:, own.rows] = np.array([rules.penalties for rules in own.rules]).reshape(-1, 3).T
    return [*columns, penalised]


def _withheld(own: StepRules) -> list[Column]:
    """rows, ids, kinds, firsts, before, backs: of each row its ends, where they come too early, then its bad words."""
    rows: list[Column] = []
    ids: list[Column] = []
    kinds: list[Column] = []
    lengths: list[Column] = []
    before: list[Column] = []
    backs: list[Column] = []
    for row, rules, outputs in zip(own.rows, own.rules, own.positions - own.output_starts, strict=True):
        held = rules.held_ids.numpy()[: None if outputs < rules.min_tokens else 0]
        words = rules.bad_ids.numpy()
        rows.append(np.full(len(held) + len(words), row))
        ids += (held, words)
        kinds.append(np.repeat([HELD, BAD], [len(held), len(words)]))
        lengths += (np.zeros(len(held), np.int64), np.bincount(rules.before_word.numpy(), minlength=len(words)))
        before.append(rules.before.numpy())
        backs.append(rules.before_back.numpy())
    if not any(map(len, rows)):
        return []
    firsts = np.concatenate(([0], np.cumsum(np.concatenate(lengths))))
    columns = (*map(np.concatenate, (rows, ids, kinds)), firsts, *map(np.concatenate, (before, backs)))
    return [column.astype(np.int32) for column in columns]


def _masks(own: StepRules | None, covers: TokenMasks | None, count: int) -> list[Column]:
    """Masks and which row has which: what a grammar lets through and what a rule allows, both where a row has both."""
    bits: dict[int, Bits] = {}
    if own is not None:
        bits |= {
            int(row): rules.allowed_bits
            for row, rules in zip(own.rows, own.rules, strict=True)
            if rules.allowed_bits is not None
        }
    if covers is not None:
        for row, mask in zip(covers.rows.tolist(), covers.bits.numpy(), strict=True):
            bits[row] = _both(bits[row], mask) if row in bits else mask
    if not bits:
        return []
    table = np.zeros((len(bits), max(map(len, bits.values()))), np.int32)
    of_row = np.full(count, -1, np.int32)
    for place, (row, mask) in enumerate(bits.items()):
        table[place, : len(mask)], of_row[row] = mask, place
    return [table, of_row]


def _both(one: Bits, other: Bits) -> Bits:
    words = min(len(one), len(other))
    return one[:words] & other[:words]
