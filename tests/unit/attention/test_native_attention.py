"""What the native backend has beyond what every backend must: bf16 and fp16 arithmetic of its own, rows in pieces,
recordings, and numbers that depend on nothing but a row. On every set of instructions that this machine has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fakes.attention_backends import native_levels, native_library
from fakes.attention_case import AttentionCase
from minisgl_backend.attention.interface import AttentionVariant, StepRows
from minisgl_backend.attention.native_backend import NativeAttention, native_obstacle
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.kernels.native.library import Library
from minisgl_backend.kernels.native.recording import Recording
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
LONG = [(0, 1), (2, 1), (255, 1), (256, 1), (700, 1), (4200, 1), (1, 300), (700, 70), (0, 2)]
"""Rows of one piece, of two, of the most; chunks of several tiles and blocks."""

VARIANTS = [
    AttentionVariant(0.3),
    AttentionVariant(0.3, window=300),
    AttentionVariant(0.3, softcap=2.0),
    AttentionVariant(0.3, sinks=True),
    AttentionVariant(0.3, window=37, softcap=20.0, sinks=True),
]
BAD = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


@pytest.fixture(params=native_levels())
def library(request: pytest.FixtureRequest) -> Library:
    return native_library(request.param)


def native(case: AttentionCase, library: Library) -> AttentionCase:
    case.backend = lambda pool, variants: NativeAttention(pool, variants, library)
    return case


def check(case: AttentionCase, tolerance: float) -> None:
    for layer in range(len(case.variants)):
        torch.testing.assert_close(case.attend(layer).double(), case.expected(layer), atol=tolerance, rtol=0)


@pytest.mark.parametrize("page_size", [3, 16])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_long_rows_in_pieces_and_chunks_of_many_tiles(dtype: torch.dtype, page_size: int, library: Library) -> None:
    case = AttentionCase(LONG, page_size, dtype, variants=VARIANTS)
    check(native(case, library), TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(dim, torch.bfloat16) for dim in range(16, 257, 16)]
    + [(dim, dtype) for dim in (16, 48, 64, 80, 128, 256) for dtype in (torch.float32, torch.float16)],
)
def test_random_steps_are_those_of_the_torch_backend(dim: int, dtype: torch.dtype, library: Library) -> None:
    """Within twice the tolerance that each of both has from the truth; page sizes and groups of heads in turn."""
    generator = np.random.default_rng(dim)
    rows = [(int(generator.integers(0, 150)), int(generator.choice([1, 1, 9, 40]))) for _ in range(6)]
    page_size, (heads, kv_heads) = (1, 3, 16, 64)[dim // 16 % 4], ((3, 3), (9, 3), (34, 2))[dim // 16 % 3]
    variants = [replace(variant, scale=dim**-0.5) for variant in VARIANTS]
    case = AttentionCase(
        rows, page_size, dtype, heads=heads, kv_heads=kv_heads, dim=dim, variants=variants, backend=TorchAttention
    )
    expected = [case.attend(layer) for layer in range(len(variants))]
    native(case, library)
    for layer in range(len(variants)):
        torch.testing.assert_close(case.attend(layer), expected[layer], atol=2 * TOLERANCES[dtype], rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_scores_of_ten_thousand_give_the_value_of_the_largest(dtype: torch.dtype, library: Library) -> None:
    """Without a cap; and a token whose scores are all alike gives the mean of what it sees."""
    case = AttentionCase([(300, 1), (100, 40)], 16, dtype, variants=[AttentionVariant(1.0), AttentionVariant(1e-4)])
    for whole in case.keys:
        whole.fill_(25.0)
        whole[:, 50] = 26.0
    case.queries.fill_(26.0)
    case.fill()
    native(case, library)
    lengths = torch.from_numpy(case.step.lengths)
    largest = torch.stack([v[0, 50].repeat_interleave(3, 0).flatten() for v in case.values]).repeat_interleave(
        lengths, 0
    )
    torch.testing.assert_close(case.attend(0), largest, atol=TOLERANCES[dtype] / 10, rtol=0)
    torch.testing.assert_close(case.attend(1).double(), case.expected(1), atol=TOLERANCES[dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("page_size", [1, 16])
def test_what_is_not_finite_is_seen_by_who_attends_to_it_and_by_nobody_else(
    bad: str, page_size: int, dtype: torch.dtype, library: Library
) -> None:
    """In plain layers too, in short rows and long ones, whatever arithmetic their dtype has."""
    rows = [(50, 1), (0, 30), (40, 25), (61, 1), (20, 40), (600, 1), (280, 150)]
    for place in (2, 29, 45):
        case = AttentionCase(rows, page_size, dtype, variants=VARIANTS)
        for row, (start, length) in enumerate(rows):
            if place < start + length and row != 3:
                case.values[row][:, place, 1, 3] = BAD[bad]
                case.keys[row][:, place, 0, 2] = torch.nan
        case.fill()
        native(case, library)
        for layer in range(len(VARIANTS)):
            expected, given = case.expected(layer), case.attend(layer).double()
            sound = expected.isfinite().all(-1)
            assert sound.any() and not sound.all()
            assert not given[~sound].isfinite().all(-1).any(), "who sees it is not spared"
            torch.testing.assert_close(given[sound], expected[sound], atol=TOLERANCES[dtype], rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_row_comes_to_the_same_numbers_alone_and_in_company_and_on_any_number_of_threads(
    dtype: torch.dtype, library: Library
) -> None:
    case = native(AttentionCase(LONG, 16, dtype, variants=VARIANTS), library)
    ends = np.cumsum(case.step.lengths)
    for layer in range(len(VARIANTS)):
        together = case.attend(layer)
        torch.set_num_threads(3)
        assert torch.equal(case.attend(layer), together)
        torch.set_num_threads(1)
        for row, end in enumerate(ends):
            mine = slice(int(end - case.step.lengths[row]), int(end))
            whole = case.queries, case.new(case.keys, layer), case.new(case.values, layer)
            step = StepRows(case.step.starts[[row]], case.step.lengths[[row]], case.step.page_tables[[row]])
            alone = case.backend(case.pool, case.variants).begin(step)
            assert torch.equal(alone.attend(layer, *(x[mine] for x in whole), case.sinks[layer]), together[mine])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_recorded_decode_step_is_replayed_over_other_rows_exactly(dtype: torch.dtype, library: Library) -> None:
    rows = [(3, 1), (255, 1), (256, 1), (700, 1), (31, 1)]
    case = native(AttentionCase(rows, 16, dtype, variants=VARIANTS), library)
    positions, tables = torch.from_numpy(case.step.starts.copy()), case.step.page_tables.clone()
    attention = NativeAttention(case.pool, case.variants, library)
    q, keys, values = case.queries.clone(), case.new(case.keys, 0), case.new(case.values, 0)
    decode = attention.decode_step(positions, tables)
    recording = Recording(library)
    outs: list[Tensor] = []
    with recording:
        step = decode.begin()
        outs.extend(step.attend(layer, q, keys, values, case.sinks[layer]) for layer in range(len(VARIANTS)))
    order = torch.tensor([3, 0, 4, 2, 1])
    for shorter in (0, 2, 1):  # other rows, and other positions: as if tokens had been taken back
        starts = torch.from_numpy(case.step.starts)[order] - shorter
        positions.copy_(starts)
        tables.copy_(case.step.page_tables[order])
        for buffer, new in ((q, case.queries), (keys, case.new(case.keys, 1)), (values, case.new(case.values, 1))):
            buffer.copy_(new[order] * (1 + shorter))
        recording.replay()
        replayed = [out.clone() for out in outs]
        for threads in (1, 2):
            torch.set_num_threads(threads)
            eager = attention.begin(StepRows(starts.numpy(), case.step.lengths, tables))
            for layer, out in enumerate(replayed):
                assert torch.equal(eager.attend(layer, q, keys, values, case.sinks[layer]), out)
    recording.close()


def test_queries_may_be_a_slice_of_a_wider_product(library: Library) -> None:
    case = native(AttentionCase([(40, 1), (3, 20)], 16, torch.bfloat16), library)
    expected = case.attend(0)
    keys, values = case.new(case.keys, 0), case.new(case.values, 0)
    qkv = torch.cat((case.queries, keys, values), 1)
    step = case.backend(case.pool, case.variants).begin(case.step)
    assert torch.equal(step.attend(0, qkv[:, :6], qkv[:, 6:8], qkv[:, 8:]), expected)


@pytest.mark.parametrize(
    ("dim", "dtype", "reason"),
    [
        (8, torch.float32, "head_dim is 8, and they take 16, 32, 48 … 256"),
        (272, torch.bfloat16, "head_dim is 272"),
        (64, torch.float64, "keys and values are torch.float64"),
        (64, torch.float32, ""),
        (80, torch.bfloat16, ""),
    ],
)
def test_what_kernels_can_not_do_is_said_before_they_are_asked(dim: int, dtype: torch.dtype, reason: str) -> None:
    pool = PagedKvPool(KvShape(1, 2, dim, dtype), 1, 16, torch.device("cpu"))
    obstacle = native_obstacle(pool)
    assert obstacle.startswith(reason) and bool(obstacle) == bool(reason)


def test_operators_refuse_what_does_not_go_together(library: Library) -> None:
    case = native(AttentionCase([(3, 1)], 16), library)
    keys, values = case.new(case.keys, 0), case.new(case.values, 0)
    step = case.backend(case.pool, case.variants).begin(case.step)
    for q, k in ((case.queries.half(), keys), (case.queries[..., :8], keys), (case.queries, keys[..., :8])):
        with pytest.raises(RuntimeError, match="does not go with pages"):
            step.attend(0, q, k, values)
    with pytest.raises(RuntimeError, match="k, v and places differ in tokens"):
        step.attend(0, case.queries, keys.repeat(2, 1, 1), values.repeat(2, 1, 1))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"starts": np.array([3])},
            r"starts \[1\], lengths \[2\], begins \[2\] and page_tables \[2, 2\] differ in rows",
        ),
        ({"page_tables": torch.zeros(1, 2, dtype=torch.int64)}, r"page_tables \[1, 2\] differ in rows"),
        ({"page_tables": torch.zeros(2, 1, dtype=torch.int64)}, "row 1 of 5 tokens from 14 on, .* goes beyond 1 pages"),
        ({"starts": np.array([-1, 14])}, "row 0 of 1 tokens from -1 on"),
    ],
)
def test_rows_that_go_beyond_their_tables_are_refused(changed: dict[str, Any], reason: str, library: Library) -> None:
    case = native(AttentionCase([(3, 1), (14, 5)], 16), library)
    with pytest.raises(RuntimeError, match=reason):
        case.backend(case.pool, case.variants).begin(replace(case.step, **changed))
