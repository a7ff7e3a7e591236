"""The kernels of sampling against `sampling/sampler.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl_backend.kernels.gpu.sampling import cut_rows, sample_rows
from minisgl_backend.messages.plan import NO_TOKEN
from minisgl_backend.messages.sampling import GREEDY, Sampling
from minisgl_backend.sampling import sampler
from minisgl_backend.sampling.device_columns import device_columns
from minisgl_backend.sampling.masks import Rows
from minisgl_backend.sampling.parameters import SamplingColumns
from minisgl_backend.sampling.sampler import sample_tokens

INF, NAN = math.inf, math.nan

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's: overflows are meant, as on a GPU


def columns_of(samplings: Sequence[Sampling]) -> SamplingColumns:
    columns = SamplingColumns.greedy(len(samplings))
    for row, sampling in enumerate(samplings):
        columns.put(row, sampling)
    return columns


def draw(logits: Tensor, samplings: Sequence[Sampling], positions: Rows) -> list[int]:
    columns = device_columns(columns_of(samplings), positions, lambda arrays: [torch.from_numpy(a) for a in arrays])
    return sample_rows(logits, columns).tolist()


def random_sampling(chance: np.random.Generator, vocab: int) -> Sampling:
    """Greedy one time in three; filters alone and together, loose and tight, or none."""
    if chance.random() < 0.33:
        return GREEDY
    temperature = float(chance.choice([0.2, 0.7, 1.0, 1.0, 1.6, 4.0, 1e-6, 1e9]))
    top_k = int(chance.choice([0, 0, 0, 0, 0, 0, 0, 1, 2, 7, 50, vocab // 2, vocab - 1, vocab]))
    top_p = float(chance.choice([1.0, 1.0, 1.0, 1.0, 0.95, 0.8, 0.5, 0.01]))
    min_p = float(chance.choice([0.0, 0.0, 0.0, 0.02, 0.3, 1.0]))
    return Sampling(temperature, top_k, top_p, int(chance.integers(1 << 60)), int(chance.integers(4)), min_p)


def random_logits(chance: np.random.Generator, rows: int, vocab: int) -> Tensor:
    """Some rows coarse, so that many tie; some with forbidden tokens."""
    logits = torch.from_numpy(chance.standard_normal((rows, vocab)).astype(np.float32)) * 3
    logits[::3] = (logits[::3] * 2).round() / 2
    logits[1::4, ::2] = -INF
    return logits


@pytest.fixture
def _exp_is_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter exp is numpy's: with the same one in the reference what is kept must be the same exactly."""

    def weights(logits: Tensor, best: Tensor, parameters: SamplingColumns) -> Tensor:
        heat = parameters.temperature.clip(1e-30, 1e30).astype(np.float32)[:, None]
        with np.errstate(all="ignore"):
            exact = np.exp((logits.float().numpy() - best.float().numpy()[:, None]) / heat)
        floors = sampler.weight_floors(parameters.min_p)
        return torch.from_numpy(np.where(exact < floors[:, None], np.float32(0), exact))

    monkeypatch.setattr(sampler, "_weights", weights)


@pytest.mark.usefixtures("_exp_is_numpys")
@pytest.mark.parametrize(
    ("dtype", "vocab", "rows"), [(torch.float32, 301, 30), (torch.bfloat16, 1301, 150), (torch.float16, 2049, 30)]
)
def test_rows_of_mixed_parameters_draw_the_reference_s_tokens(dtype: torch.dtype, vocab: int, rows: int) -> None:
    """Of each filter what is kept must be the same, or many of these would not be."""
    chance = np.random.default_rng(vocab)
    samplings = [random_sampling(chance, vocab) for _ in range(rows)]
    positions = chance.integers(0, 100_000, rows)
    logits = random_logits(chance, rows, vocab).to(dtype)
    expected = sample_tokens(logits, columns_of(samplings), positions).tolist()
    assert draw(logits, samplings, positions) == expected


@pytest.mark.parametrize("how", [GREEDY, Sampling(1.0, 0, 1.0, 5, 0), Sampling(0.9, 40, 0.9, 6, 1, 0.01)])
def test_a_vocabulary_of_256k_and_one_token_is_drawn_whole(how: Sampling) -> None:
    logits = torch.randn(1, 262_145, generator=torch.Generator().manual_seed(3)) * 3
    logits[0, -1] = 17.0
    where = np.array([77])
    assert draw(logits, [how], where) == sample_tokens(logits, columns_of([how]), where).tolist()


def test_of_equal_logits_the_lower_id_comes_first_across_blocks_and_parts() -> None:
    logits = torch.zeros(1, 9000)
    assert draw(logits, [GREEDY], np.zeros(1, np.int64)) == [0]
    logits[0, [4500, 8999]] = 1.0
    assert draw(logits, [GREEDY], np.zeros(1, np.int64)) == [4500]
    logits[0, 4400:] = 1.0
    kept = Sampling(1.0, 2, 1.0, 1, 0)
    tokens = draw(logits.expand(6, -1), [kept] * 6, np.arange(6))
    assert set(tokens) == {4400, 4401}


def test_flat_rows_make_all_tokens_candidates() -> None:
    """top_k reaches far below every distance that is tried."""
    logits, how, where = torch.arange(5001).flip(0)[None] * -1.0, Sampling(5000.0, 3000, 0.9, 3, 0), np.array([5])
    assert draw(logits, [how], where) == sample_tokens(logits, columns_of([how]), where).tolist()


@pytest.mark.parametrize("how", [GREEDY, Sampling(1.0, 0, 1.0, 5, 0), Sampling(0.9, 40, 0.9, 6, 1)])
def test_a_row_that_is_not_finite_gives_no_token_and_harms_nobody(how: Sampling) -> None:
    good = torch.randn(700, generator=torch.Generator().manual_seed(4)) * 2
    rows = good.repeat(6, 1)
    rows[1, 650], rows[2, 3] = NAN, INF
    rows[3], rows[4] = -INF, NAN
    rows[0, 100:] = rows[5, 100:] = -INF
    tokens = draw(rows, [how] * 6, np.full(6, 9))
    assert tokens[1:5] == [NO_TOKEN] * 4
    assert tokens[0] == tokens[5] == draw(rows[:1], [how], np.full(1, 9))[0] >= 0


def test_rows_may_lie_apart_and_are_not_written_to() -> None:
    wide = torch.randn(3, 600, generator=torch.Generator().manual_seed(6))
    before, logits = wide.clone(), wide[:, :501]
    samplings, where = [GREEDY, Sampling(1.0, 0, 1.0, 5, 0), Sampling(1.0, 9, 0.9, 5, 0)], np.arange(3)
    assert draw(logits, samplings, where) == draw(logits.contiguous(), samplings, where)
    assert torch.equal(wide, before)


def test_the_parts_of_a_row_cover_it_and_small_batches_are_cut_finer() -> None:
    for rows in (1, 3, 64, 700):
        for vocab in (1, 2048, 2049, 49_152, 151_936, 262_145):
            cut, size = cut_rows(rows, vocab), 2048
            assert (cut.parts - 1) * cut.blocks * size < vocab <= cut.parts * cut.blocks * size
            assert cut.parts <= 128
    assert cut_rows(1, 151_936).parts == 75 > cut_rows(64, 151_936).parts == 8
