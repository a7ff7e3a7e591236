"""The attention backend of a GPU in Triton's interpreter: steps of all kinds against the truth in fp64, splits, rows
that depend on nothing but themselves, and recordings.

What every backend must do is in tests/unit/attention; some of it runs here too (test_triton_models.py), all of it by
hand: TRITON_INTERPRET=1 pytest -W ignore::RuntimeWarning -k "not bfloat16" tests/unit/attention
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from fakes.attention_backends import backend_of, triton_attention
from fakes.attention_case import AttentionCase
from minisgl_backend.attention import step_metadata
from minisgl_backend.attention.interface import AttentionVariant, StepRows
from minisgl_backend.kernels.gpu import attention_decode, attention_extend
from minisgl_backend.kernels.gpu.attention_decode import decode_tile, split_programs
from minisgl_backend.kernels.gpu.attention_extend import extend_tile
from minisgl_backend.kernels.gpu.places import find_places
from minisgl_backend.kernels.interface import HeadPreparation, Rotation
from minisgl_backend.kernels.torch_kernels import TORCH_KERNELS

PLAIN = AttentionVariant(0.3)
WINDOW = AttentionVariant(0.3, window=37)
ALL = AttentionVariant(0.3, window=37, softcap=1.5, sinks=True)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3}
MIXED = [(70, 1), (5, 4), (130, 20), (33, 1)]
"""A short chunk and a long one between decode rows."""


def case_of(
    rows: list[tuple[int, int]], page_size: int, dtype: torch.dtype = torch.float32, **options: object
) -> AttentionCase:
    return AttentionCase(rows, page_size, dtype, backend=backend_of("triton"), **options)  # type: ignore[arg-type]


def check(case: AttentionCase, tolerance: float = 1e-5) -> None:
    for layer in range(len(case.variants)):
        torch.testing.assert_close(case.attend(layer).double(), case.expected(layer), atol=tolerance, rtol=0)


@pytest.mark.parametrize(("page_size", "dtype"), [(1, torch.float16), (16, torch.float32)])
def test_mixed_rows_attend_to_their_own_positions_only(page_size: int, dtype: torch.dtype) -> None:
    check(case_of(MIXED, page_size, dtype, variants=[PLAIN, ALL]), TOLERANCES[dtype])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 80), (14, 2, 20), (18, 1, 96), (2, 1, 256)])
def test_heads_of_any_number_and_size(heads: int, kv_heads: int, dim: int) -> None:
    variant = replace(ALL, scale=dim**-0.5)
    check(case_of([(40, 1), (20, 27)], 16, heads=heads, kv_heads=kv_heads, dim=dim, variants=[variant]))


def test_more_heads_share_a_key_than_a_tile_has() -> None:
    assert decode_tile(66, 1, 16, 4).heads < 66 > extend_tile(66, 1, 16, 4).queries
    check(case_of([(4, 1), (3, 2)], 16, heads=66, kv_heads=1, variants=[ALL]))


def test_long_rows_are_cut_into_splits_and_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most there are, each with a part of the keys, and those of a row dealt among few programs."""
    rows = [(64, 1), (900, 1)]
    case = case_of(rows, 16, variants=[AttentionVariant(0.3, softcap=1.5, sinks=True), replace(ALL, window=300)])
    monkeypatch.setattr(attention_decode, "_LEAST_SPLIT_TOKENS", 64)
    monkeypatch.setattr(attention_decode, "_ROW_PROGRAMS", 16)
    assert decode_tile(6, 2, 16, 4).splits == 8
    expected = [case.attend(layer) for layer in range(2)]
    for layer in range(2):
        torch.testing.assert_close(expected[layer].double(), case.expected(layer), atol=1e-5, rtol=0)
    monkeypatch.setattr(attention_decode, "_PROGRAMS", 12)
    assert split_programs(len(rows), 2, 8) == 4
    for layer in range(2):
        assert torch.equal(case.attend(layer), expected[layer])


def test_more_tiles_than_a_grid_has_take_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of([(2, 30), (0, 11)], 16)
    tile = extend_tile(6, 2, 16, 4)
    assert len(step_metadata.describe_step(case.step.starts, case.step.lengths, 16, tile.tokens).host.tile_rows) == 5
    monkeypatch.setattr(attention_extend, "_MOST_TILES", 2)
    assert attention_extend.most_parts(tile, 6, 2) == 2
    check(case)


def test_keys_of_few_tiles_are_dealt_among_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches of parts, the second of two tiles, and a tile that is not split. Under a window most parts are empty.
    Broken values lie in the prefix and among the chunk's own.
    """
    monkeypatch.setattr(step_metadata, "_PART_KEYS", 64)
    monkeypatch.setattr(attention_extend, "_PART_BYTES", 7 * 2 * 128 * 16 * 4)
    monkeypatch.setattr(attention_extend, "_JOIN_LANES", 64)
    variants = [AttentionVariant(0.3, sinks=True), replace(ALL, window=70)]
    case = case_of([(290, 50), (3, 1), (130, 7), (0, 5)], 16, torch.float16, variants=variants)
    starts, lengths = case.step.starts, case.step.lengths
    step = step_metadata.describe_step(starts, lengths, 16, extend_tile(6, 2, 16, 2).tokens).host
    assert np.diff(step.split_offsets).tolist() == [5, 5, 2] and step.tile_rows.tolist() == [3]
    batches = attention_extend.batch_parts(step.split_offsets.tolist(), 7)
    assert [(list(batch.tiles), len(batch.parts)) for batch in batches] == [([0], 5), ([1, 2], 7)]
    for row, place in ((0, 331), (2, 20)):
        case.values[row][:, place, 1, 3] = torch.nan
    case.fill()
    for layer in range(2):
        expected, given = case.expected(layer), case.attend(layer).double()
        sound = expected.isfinite().all(-1)
        assert sound.any() and not given[~sound].isfinite().all(-1).any()
        torch.testing.assert_close(given[sound], expected[sound], atol=2e-3, rtol=0)


def test_a_row_gets_the_very_same_numbers_whatever_is_beside_it() -> None:
    """A short row in a batch whose tables are wide, for which more splits are launched than it has."""
    case = case_of([(300, 1), (40, 13), (900, 1)], 16, torch.float16, variants=[ALL])
    together = case.attend(0)
    for row, tokens in enumerate((slice(0, 1), slice(1, 14))):
        alone = StepRows(
            case.step.starts[row : row + 1],
            case.step.lengths[row : row + 1],
            case.step.page_tables[row : row + 1, : -(-sum(case.rows[row]) // 16)],
        )
        step = case.backend(case.pool, case.variants).begin(alone)
        new = [case.new(whole, 0)[tokens] for whole in (case.keys, case.values)]
        assert torch.equal(step.attend(0, case.queries[tokens], *new, case.sinks[0]), together[tokens])


def test_chunks_of_any_size_give_each_token_the_very_same_numbers() -> None:
    """Blocks of keys begin where they begin, and what is hidden adds nothing."""
    case = case_of([(30, 90)], 16, torch.float16, variants=[PLAIN, ALL])
    for layer in range(2):
        whole = case.attend(layer)
        step = StepRows(np.array([71]), np.array([49]), case.step.page_tables)
        new = [case.new(x, layer)[41:] for x in (case.keys, case.values)]
        attention = case.backend(case.pool, case.variants).begin(step)
        assert torch.equal(attention.attend(layer, case.queries[41:], *new, case.sinks[layer]), whole[41:])


@pytest.mark.parametrize("variant", [PLAIN, ALL], ids=["plain", "all"])
def test_what_is_not_finite_reaches_those_who_see_it_and_nobody_else(variant: AttentionVariant) -> None:
    """In other rows, in the scratch page, behind the end of a row, before its window, and in its own later tokens."""
    rows = [(50, 1), (40, 25), (61, 1), (0, 50)]
    case = case_of(rows, 16, torch.float16, variants=[variant])
    for page in case.pool.layer(0):
        page[:] = torch.nan
    case.fill()
    check(case, 2e-3)
    for row, place in ((0, 12), (1, 12), (1, 2), (3, 33)):
        case.values[row][:, place, 1, 3] = torch.inf
        case.keys[row][:, place, 0, 2] = torch.nan
    case.fill()
    expected, given = case.expected(0), case.attend(0).double()
    sound = expected.isfinite().all(-1)
    assert sound.any() and not sound.all()
    assert not given[~sound].isfinite().all(-1).any(), "who sees it is not spared"
    torch.testing.assert_close(given[sound], expected[sound], atol=2e-3, rtol=0)


def test_scratch_memory_that_nobody_wrote_is_not_read() -> None:
    """It is NaN in new tensors here."""
    case = case_of([(0, 1), (600, 1), (7, 3)], 16, variants=[ALL])
    torch.use_deterministic_algorithms(True)
    try:
        check(case)
    finally:
        torch.use_deterministic_algorithms(False)


def test_heads_are_prepared_and_written_before_anybody_attends() -> None:
    """Queries, keys and values lie in one projection, with gaps between them."""
    case = case_of([(7, 1), (5, 4), (20, 1)], 3, variants=[PLAIN])
    angles = torch.rand(len(case.queries), 1, 8)
    preparation = HeadPreparation(
        TORCH_KERNELS, Rotation(angles.cos(), angles.sin()), torch.rand(16), torch.rand(16), 1e-5
    )
    projected = torch.randn(len(case.queries), 10, 16)
    results = []
    for backend in ("torch", "triton"):
        q, k, v = projected.split([6, 2, 2], dim=1)
        attention = backend_of(backend)(case.pool, case.variants).begin(case.step)
        results.append(attention.attend(0, q, k, v, None, preparation))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=0)


def test_a_recorded_step_reads_positions_and_tables_anew_and_gives_what_a_step_begun_gives() -> None:
    """Recorded for more rows and longer contexts than come. Rows that fill it up are broken, and nobody sees it."""
    case = case_of([(300, 1), (3, 1), (63, 1)], 16, variants=[ALL])
    positions, tables = torch.zeros(4, dtype=torch.int64), torch.full((4, 90), case.pool.scratch_page)
    step = triton_attention(case.pool, case.variants, 6).decode_step(positions, tables)
    positions[:3] = torch.from_numpy(case.step.starts)
    tables[:3, : case.step.page_tables.shape[1]] = case.step.page_tables
    step.refresh(case.step.starts, tables)
    q, k, v = (torch.full((4, heads, 16), torch.nan) for heads in (6, 2, 2))
    q[:3], k[:3], v[:3] = case.queries, case.new(case.keys, 0), case.new(case.values, 0)
    assert torch.equal(step.begin().attend(0, q, k, v, case.sinks[0])[:3], case.attend(0))


def test_tiles_are_powers_of_two_that_hold_a_token_and_programs_are_no_more_than_a_gpu_needs() -> None:
    for heads, kv_heads in ((1, 1), (9, 3), (28, 4), (32, 8), (32, 32), (64, 8), (71, 1), (400, 1)):
        for dim, item_bytes in itertools.product((16, 64, 80, 96, 128, 192, 256), (2, 4)):
            decode, extend = (tile(heads, kv_heads, dim, item_bytes) for tile in (decode_tile, extend_tile))
            for size in (decode.heads, decode.keys, decode.columns, decode.splits, extend.queries, extend.keys):
                assert size >= 8 and size & (size - 1) == 0
            assert min(decode.columns, extend.columns) >= dim and min(decode.heads, extend.queries, decode.keys) >= 16
            assert extend.tokens >= 1 and extend.queries // 2 < extend.tokens * extend.heads <= extend.queries
            assert attention_extend.most_parts(extend, heads, kv_heads) >= 1
            for rows in (1, 7, 64, 256):
                programs = split_programs(rows, kv_heads, decode.splits)
                assert programs == 1 or rows * kv_heads * programs <= 4096


def test_places_follow_the_page_tables() -> None:
    tables = torch.tensor([[7, 3, 1], [2, 0, 5]])
    rows, positions = torch.tensor([0, 1, 1, 0], dtype=torch.int32), torch.tensor([6, 0, 7, 2], dtype=torch.int32)
    assert find_places(rows, positions, tables, 3).tolist() == [1 * 3, 2 * 3, 5 * 3 + 1, 7 * 3 + 2]
