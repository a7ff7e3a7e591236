"""Logits → tokens, for all sampled rows of a step.

Order, as in vLLM: temperature, then min_p, then top_k, then top_p on what these left (renormalised), then one draw by
inverse CDF with the row's own uniform number (`uniform.py`). What changes single logits comes before (`draw.py`).

A token is a pure function of (logits, seed, sample_index, position). What could break that in a batch is the order in
which a sum is added up, so probabilities become whole numbers first: weight = floor(2**40 · exp((logit − best) / t)),
and sums of integers do not depend on any order. A token below 2**-40 of the best one can not be drawn.

Rows pay for what they use: a greedy row one maximum; a row with a temperature one exp and one cumulative sum over the
vocabulary; min_p a comparison; top_k and top_p a selection of the best 1,024 tokens, and a full sort only if those do
not settle it.
Where tokens tie, the lower id comes first.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.messages.plan import NO_TOKEN
from minisgl_backend.sampling.masks import Rows
from minisgl_backend.sampling.parameters import SamplingColumns
from minisgl_backend.sampling.uniform import uniform

_WEIGHT_OF_BEST = float(1 << 40)  # times 2**20 tokens still fits int64
_CANDIDATES = 1024
_BLOCK_ELEMENTS = 8 << 20  # logits worked on at once: bounds memory, not results


def sample_tokens(logits: Tensor, parameters: SamplingColumns, positions: Rows) -> Tensor:
    """logits [rows, vocab] floating, parameters and positions [rows] on the host → [rows] int64 on logits' device.

    positions: index of the sampled token in its sequence. A row with a NaN or +inf, or with nothing but -inf, gives
    NO_TOKEN and does not touch the others. Does not write to logits.
    """
    best, tokens = logits.max(dim=-1)  # a NaN anywhere in a row is its maximum
    drawn = parameters.temperature > 0.0
    if drawn.any():
        filtered = drawn & ((parameters.top_k > 0) | (parameters.top_p < 1.0))
        tokens = tokens.clone()
        for kind, draw in ((drawn & ~filtered, _draw_from_all), (filtered, _draw_from_best)):
            for rows in blocks(np.flatnonzero(kind), logits.shape[1]):
                index = torch.from_numpy(rows).to(logits.device)
                own = parameters.take(rows)
                numbers = uniform(own.seed, own.sample_index, positions[rows].astype(np.uint64))
                weights = _weights(logits[index], best[index], own)
                tokens[index] = draw(logits[index], weights, own, torch.from_numpy(numbers).to(logits.device))
    return torch.where(best.isfinite(), tokens, NO_TOKEN)


def blocks(rows: Rows, width: int) -> list[Rows]:
    """rows in their order, cut so that a block stays within a fixed size. width: of a row: logits, or what is more."""
    size = max(_BLOCK_ELEMENTS // width, 1)
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def _weights(logits: Tensor, best: Tensor, parameters: SamplingColumns) -> Tensor:
    """[rows, vocab] int64, the best token of a row at 2**40. Temperatures are held to what fp32 can divide by.

    Tokens below min_p of the best one have none.
    """
    heat = torch.from_numpy(parameters.temperature.clip(1e-30, 1e30)).to(logits.device, torch.float32)
    scaled = logits.float().sub(best.float()[:, None]).div_(heat[:, None])
    weights = scaled.exp_().nan_to_num_(0.0, 0.0, 0.0).mul_(_WEIGHT_OF_BEST).to(torch.int64)
    floored = np.flatnonzero(parameters.min_p > 0.0)
    if len(floored):
        index = torch.from_numpy(floored).to(logits.device)
        floor = torch.from_numpy(np.ceil(parameters.min_p[floored] * _WEIGHT_OF_BEST).astype(np.int64))
        own = weights[index]
        weights[index] = own.masked_fill_(own < floor.to(logits.device)[:, None], 0)
    return weights


def _draw_from_all(logits: Tensor, weights: Tensor, parameters: SamplingColumns, numbers: Tensor) -> Tensor:
    """Rows without a filter: inverse CDF over the vocabulary in the order of ids. [rows] int64."""
    cumulative = weights.cumsum(-1)
    return _invert(cumulative, cumulative[:, -1], numbers)


def _draw_from_best(logits: Tensor, weights: Tensor, parameters: SamplingColumns, numbers: Tensor) -> Tensor:
    """Rows with a filter: inverse CDF over what it keeps, best first. [rows] int64."""
    vocab = logits.shape[1]
    keep_k = torch.from_numpy(np.where(parameters.top_k > 0, parameters.top_k, vocab)).to(logits.device)
    keep_p = torch.from_numpy(parameters.top_p).to(logits.device)
    tokens, settled = _filter(logits, weights, keep_k, keep_p, numbers, min(_CANDIDATES, vocab))
    at = torch.nonzero(~settled).flatten()
    if len(at):
        tokens[at] = _filter(logits[at], weights[at], keep_k[at], keep_p[at], numbers[at], vocab)[0]
    return tokens


def _filter(
    logits: Tensor, weights: Tensor, keep_k: Tensor, keep_p: Tensor, numbers: Tensor, candidates: int
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
    column = _invert(cumulative, _column(cumulative, kept - 1), numbers)
    settled = (kept <= certain) & ((keep_k <= certain) | (keep_k >= vocab))
    return _column(ids, column.clamp(max=candidates - 1)), settled


def _best_tokens(logits: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """(ids, best first [rows, candidates]; how many of them are certain [rows])."""
    if candidates == logits.shape[1]:
        ids = logits.sort(dim=-1, descending=True, stable=True).indices
        return ids, torch.full(ids.shape[:1], candidates, device=ids.device)
    by_id = logits.topk(candidates, sorted=False).indices.sort(dim=-1).values
    values, order = logits.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return by_id.gather(-1, order), (values > values[:, -1:]).sum(-1)


def _invert(cumulative: Tensor, total: Tensor, numbers: Tensor) -> Tensor:
    """The first column whose cumulative weight exceeds numbers · total. [rows] int64."""
    threshold = torch.minimum((total.double() * numbers).to(torch.int64), total - 1)
    return torch.searchsorted(cumulative, threshold[:, None], right=True).squeeze(-1)


def _column(table: Tensor, columns: Tensor) -> Tensor:
    """table [rows, n], columns [rows] → table[i, columns[i]]."""
    return table.gather(-1, columns[:, None]).squeeze(-1)
