"""Logits → tokens, for all sampled rows of a step.

Order, as in vLLM: temperature, then min_p, then top_k, then top_p on what these left (renormalised), then one race
among the tokens that are left, on the row's own chances (`race.py`). What changes single logits comes before
(`draw.py`).

A token is a pure function of (logits, seed, sample_index, position). What could break that in a batch is the order in
which a sum is added up. Only filters add: for them probabilities become whole numbers, floor(2**40 · exp((logit − best)
/ t)), and sums of integers do not depend on any order. Logits that differ by the rounding of another batch change a
token only where two are first in the race within that rounding, or stand at the edge of a filter.

Rows pay for what they use: a greedy row one maximum; a row with a temperature one exp and one race over the vocabulary;
min_p a comparison; top_k and top_p a selection of the best 1,024 tokens and a race among these, and a full sort only if
they do not settle it.
Where tokens tie, the lower id comes first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl_backend.messages.plan import NO_TOKEN
from minisgl_backend.sampling.masks import Rows
from minisgl_backend.sampling.parameters import SamplingColumns
from minisgl_backend.sampling.race import row_keys, winners

_WHOLE = float(1 << 40)  # times 2**20 tokens still fits int64
_CANDIDATES = 1024
_BLOCK_ELEMENTS = 8 << 20  # logits worked on at once: bounds memory, not results


Best = Callable[[Tensor], tuple[Tensor, Tensor]]
"""logits [rows, vocab] → of each row the best value, which is finite only where the row has no NaN and no +inf, and the
lowest id that has it, int64."""


def best_of_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See Best; the value is in the logits' dtype."""
    best, tokens = logits.max(dim=-1)  # a NaN anywhere in a row is its maximum
    return best, tokens


def sample_tokens(
    logits: Tensor, parameters: SamplingColumns, positions: Rows, best_of_rows: Best = best_of_rows
) -> Tensor:
    """logits [rows, vocab] floating, parameters and positions [rows] on the host → [rows] int64 on logits' device.

    positions: index of the sampled token in its sequence. A row with a NaN or +inf, or with nothing but -inf, gives
    NO_TOKEN and does not touch the others. Does not write to logits.
    """
    best, tokens = best_of_rows(logits)
    drawn = parameters.temperature > 0.0
    if drawn.any():
        filtered = drawn & ((parameters.top_k > 0) | (parameters.top_p < 1.0))
        tokens = tokens.clone()
        for kind, draw in ((drawn & ~filtered, _draw_from_all), (filtered, _draw_from_best)):
            for rows in blocks(np.flatnonzero(kind), logits.shape[1]):
                index = torch.from_numpy(rows).to(logits.device)
                own = parameters.take(rows)
                keys = row_keys(own.seed, own.sample_index, positions[rows].astype(np.uint64))
                tokens[index] = draw(logits[index], best[index], own, torch.from_numpy(keys).to(logits.device))
    return torch.where(best.isfinite(), tokens, NO_TOKEN)


def blocks(rows: Rows, width: int) -> list[Rows]:
    """rows in their order, cut so that a block stays within a fixed size. width: of a row: logits, or what is more."""
    size = max(_BLOCK_ELEMENTS // width, 1)
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def heats(temperature: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Temperatures, held to what fp32 can divide by."""
    return temperature.clip(1e-30, 1e30).astype(np.float32)


def weight_floors(min_p: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """The least fp32 weights whose whole numbers are not below min_p's; 0 without it."""
    exact = np.ceil(min_p * _WHOLE) / _WHOLE
    near = exact.astype(np.float32)
    return np.where(near < exact, np.nextafter(near, np.float32(2.0)), near)


def _weights(logits: Tensor, best: Tensor, parameters: SamplingColumns) -> Tensor:
    """[rows, vocab] fp32, the best token of a row at 1.

    Tokens below min_p of the best one have none. A row that is not finite has anything, NaN too.
    """
    heat = torch.from_numpy(heats(parameters.temperature)).to(logits.device)
    weights = logits.float().sub(best.float()[:, None]).div_(heat[:, None]).exp_()
    floored = np.flatnonzero(parameters.min_p > 0.0)
    if len(floored):
        index = torch.from_numpy(floored).to(logits.device)
        floor = torch.from_numpy(weight_floors(parameters.min_p[floored])).to(logits.device)
        own = weights[index]
        weights[index] = own.masked_fill_(own < floor[:, None], 0.0)
    return weights


def _whole(weights: Tensor) -> Tensor:
    """In int64, the best token of a row at 2**40. Writes to weights."""
    return weights.nan_to_num_(0.0, 0.0, 0.0).mul_(_WHOLE).to(torch.int64)


def _draw_from_all(logits: Tensor, best: Tensor, parameters: SamplingColumns, keys: Tensor) -> Tensor:
    """Rows without a filter: a race over the vocabulary. [rows] int64."""
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    return winners(keys, ids[None], _weights(logits, best, parameters))


def _draw_from_best(logits: Tensor, best: Tensor, parameters: SamplingColumns, keys: Tensor) -> Tensor:
    """Rows with a filter: a race among what it keeps. [rows] int64."""
    vocab = logits.shape[1]
    weights = _whole(_weights(logits, best, parameters))
    keep_k = torch.from_numpy(np.where(parameters.top_k > 0, parameters.top_k, vocab)).to(logits.device)
    keep_p = torch.from_numpy(parameters.top_p).to(logits.device)
    tokens, settled = _filter(logits, weights, keep_k, keep_p, keys, min(_CANDIDATES, vocab))
    at = torch.nonzero(~settled).flatten()
    if len(at):
        tokens[at] = _filter(logits[at], weights[at], keep_k[at], keep_p[at], keys[at], vocab)[0]
    return tokens


def _filter(
    logits: Tensor, weights: Tensor, keep_k: Tensor, keep_p: Tensor, keys: Tensor, candidates: int
) -> tuple[Tensor, Tensor]:
    """Draws from what top_k and top_p keep, looking only at the best `candidates` tokens.

    → (tokens [rows] int64, settled [rows] bool). Candidates that tie with the last one are not certain: others like
    them may have been left out. A row is settled when its top_k and what it keeps lie within the certain ones.
    """
    vocab = logits.shape[1]
    ids, certain = _best_tokens(logits, candidates)
    ordered = weights.gather(-1, ids)
    cumulative = ordered.cumsum(-1)
    last_of_k = keep_k.clamp(max=candidates) - 1
    mass = torch.where(keep_k >= vocab, weights.sum(-1), _column(cumulative, last_of_k))
    enough = torch.where(keep_p < 1.0, (mass.double() * keep_p).ceil().to(torch.int64), mass)
    kept = (cumulative - ordered < enough[:, None]).sum(-1).clamp(min=1).minimum(keep_k)
    settled = (kept <= certain) & ((keep_k <= certain) | (keep_k >= vocab))
    del cumulative
    left_out = torch.arange(candidates, device=ids.device) >= kept[:, None]
    own = ordered.to(torch.float32).masked_fill_(left_out, 0.0)
    return _column(ids, winners(keys, ids.to(torch.int32), own)), settled


def _best_tokens(logits: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """(ids, best first [rows, candidates]; how many of them are certain [rows])."""
    if candidates == logits.shape[1]:
        ids = logits.sort(dim=-1, descending=True, stable=True).indices
        return ids, torch.full(ids.shape[:1], candidates, device=ids.device)
    by_id = logits.topk(candidates, sorted=False).indices.sort(dim=-1).values
    values, order = logits.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return by_id.gather(-1, order), (values > values[:, -1:]).sum(-1)


def _column(table: Tensor, columns: Tensor) -> Tensor:
    """table [rows, n], columns [rows] → table[i, columns[i]]."""
    return table.gather(-1, columns[:, None]).squeeze(-1)
