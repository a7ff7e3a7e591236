"""Tokens that are drawn on the device, against those that the reference draws from the same logits on the CPU."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from minisgl_backend.kernels.gpu.sampling import sample_rows
from minisgl_backend.messages.plan import NO_TOKEN
from minisgl_backend.messages.sampling import GREEDY, Sampling
from minisgl_backend.sampling.device_columns import device_columns
from minisgl_backend.sampling.parameters import SamplingColumns
from minisgl_backend.sampling.sampler import sample_tokens
from tests.gpu.checks import Failed, Found, Place, Report, equal

KINDS = {
    "greedy": GREEDY,
    "temperature": Sampling(temperature=0.8, top_k=0, top_p=1.0, seed=11, sample_index=0),
    "min_p": Sampling(temperature=1.3, top_k=0, top_p=1.0, seed=12, sample_index=1, min_p=0.02),
    "top_k": Sampling(temperature=1.0, top_k=40, top_p=1.0, seed=13, sample_index=0),
    "top_p": Sampling(temperature=1.0, top_k=0, top_p=0.9, seed=14, sample_index=0),
    "flat": Sampling(temperature=100.0, top_k=0, top_p=0.95, seed=15, sample_index=0),
}
EXACT = ("greedy",)  # in the others a row's race may be decided by the rounding of one exp

AGREEMENT = 0.98
"""Least share of equal tokens of the others."""


def run(report: Report, place: Place) -> None:
    vocab, rows = place.pick((151936, 64), (700, 3))
    for dtype in place.dtypes:
        for name in KINDS:
            report.check(
                f"{name}, {rows} rows of {vocab} {str(dtype).removeprefix('torch.')}",
                partial(_check, place, dtype, name, rows, vocab),
            )
    report.check("rows that are not finite stay alone", partial(_check_spoilt, place, vocab))


def _check(place: Place, dtype: torch.dtype, name: str, rows: int, vocab: int) -> Found:
    logits = _logits(rows, vocab, dtype)
    expected, got = _both(place, logits, [KINDS[name]] * rows)
    if name in EXACT:
        equal(got.tolist(), expected.tolist(), "tokens")
    share = (got == expected).float().mean().item()
    if share < AGREEMENT:
        raise Failed(f"{share:.3f} of the tokens are the reference's, asked for {AGREEMENT}")
    return {"equal": round(share, 4)}


def _check_spoilt(place: Place, vocab: int) -> Found:
    """One row has a NaN, one nothing at all; rows of every kind beside them."""
    samplings = [*KINDS.values(), GREEDY, KINDS["top_p"]]
    logits = _logits(len(samplings), vocab, place.half)
    clean, _ = _both(place, logits, samplings)
    logits[-2, vocab // 2] = torch.nan
    logits[-1] = -torch.inf
    _, got = _both(place, logits, samplings)
    equal(got[-2:].tolist(), [NO_TOKEN] * 2, "tokens of spoilt rows")
    if (got[:-2] != clean[:-2]).sum() > 1:  # the rounding of one exp
        raise Failed(f"{got.tolist()} instead of {clean.tolist()}")
    return None


def _logits(rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5)) * 3).to(dtype)


def _both(place: Place, logits: torch.Tensor, samplings: list[Sampling]) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's, and the device's."""
    parameters = SamplingColumns.greedy(len(samplings))
    for row, sampling in enumerate(samplings):
        parameters.put(row, sampling)
    positions = np.arange(len(samplings)) * 7 + 3
    columns = device_columns(
        parameters, positions, lambda arrays: [torch.from_numpy(array).to(place.device) for array in arrays]
    )
    return sample_tokens(logits, parameters, positions), sample_rows(logits.to(place.device), columns).cpu()
