"""Tokens that are drawn on the device, against those that the reference draws from the same logits on the CPU."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from minisgl_backend.kernels.gpu.sampling import sample_rows
from minisgl_backend.messages.plan import NO_TOKEN
from minisgl_backend.messages.sampling import GREEDY, Sampling, TokenRules
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.sampling.device_columns import device_columns
from minisgl_backend.sampling.draw import draw_tokens
from minisgl_backend.sampling.masks import TokenMasks
from minisgl_backend.sampling.parameters import SamplingColumns
from minisgl_backend.sampling.rules import RuleBook, StepRules
from minisgl_backend.sampling.sampler import sample_tokens
from minisgl_backend.sampling.triton_draw import TritonDraw
from minisgl_backend.sampling.utf8 import pack_bits
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

RULES = (
    TokenRules(presence_penalty=1.5, frequency_penalty=0.7),
    TokenRules(repetition_penalty=30.0),
    TokenRules(bias_ids=pack_tokens([3, 650]), biases=(-20.0, 40.0)),
    TokenRules(allowed_ids=pack_tokens(range(500, 600))),
    TokenRules(bad_words=tuple(pack_tokens([token]) for token in range(9))),
    TokenRules(bad_words=tuple(pack_tokens([one, two]) for one in range(9) for two in range(9))),
    TokenRules(min_tokens=99, held_ids=pack_tokens(range(9))),
    TokenRules(0.5, 0.5, 2.0, pack_tokens([4]), (7.0,), b"", (pack_tokens([1]),), 99, pack_tokens([2, 3])),
)

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
    report.check("rules and masks", partial(_check_rules, place, vocab))


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


def _check_rules(place: Place, vocab: int) -> Found:
    """Greedy tokens after everything that changes single logits, beside rows that nothing changes."""
    rows, chance = len(RULES) + 2, np.random.default_rng(7)
    said = torch.from_numpy(chance.integers(0, 9, (rows, 40), dtype=np.int32))
    logits, parameters, every = _logits(rows, vocab, place.half), SamplingColumns.greedy(rows), np.arange(rows)
    logits[:, :9] += 12.0  # what was said is what would be said
    masks = TokenMasks(np.array([0, rows - 1]), torch.from_numpy(pack_bits(chance.random((2, vocab)) < 0.01)))

    def rules(tokens: torch.Tensor) -> StepRules | None:
        book = RuleBook(tokens, np.full(rows, 10), vocab)
        for row, some in enumerate(RULES):
            book.put(row, some)
        return book.of(every, every + 20)

    expected = draw_tokens(logits, parameters, every + 20, rules(said), masks)
    prepare = TritonDraw(lambda arrays: [torch.from_numpy(array).to(place.device) for array in arrays])
    draw = prepare(parameters, every + 20, rules(said.to(place.device)), masks)
    equal(draw(logits.to(place.device)).tolist(), expected.tolist(), "tokens")
    plain = draw_tokens(logits, parameters, every + 20)
    if (plain == expected).sum() > 3:
        raise Failed("the rules change next to nothing: this checks nothing")
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
