"""What is told to the GPU of a step: one array, whose parts agree with a plan read row by row."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.attention.step_metadata import StepMetadata, describe_step

rows = st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 1, 2, 3, 40, 200])), min_size=1, max_size=9)
page_sizes = st.sampled_from([1, 3, 16, 64])


def describe(rows: list[tuple[int, int]], page_size: int, tile_queries: int = 0) -> StepMetadata:
    starts, lengths = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return describe_step(starts, lengths, page_size, tile_queries)


@given(rows, page_sizes)
def test_every_token_has_its_row_and_its_position_and_belongs_to_one_phase(
    rows: list[tuple[int, int]], page_size: int
) -> None:
    step = describe(rows, page_size).host
    expected = [(row, start + i) for row, (start, length) in enumerate(rows) for i in range(length)]
    assert list(zip(step.token_rows.tolist(), step.token_positions.tolist(), strict=True)) == expected
    both = sorted([*step.decode_tokens.tolist(), *step.chunk_tokens.tolist()])
    assert both == list(range(len(expected)))
    assert step.token_rows[step.decode_tokens].tolist() == step.decode_rows.tolist()
    chunks = np.repeat(step.chunk_rows, np.diff(step.chunk_token_offsets))
    assert step.token_rows[step.chunk_tokens].tolist() == chunks.tolist()
    for row, (start, length) in enumerate(rows):
        tokens = slice(step.token_offsets[row], step.token_offsets[row + 1])
        assert step.token_positions[tokens].tolist() == list(range(start, start + length))
        assert (row in step.decode_rows) == (length == 1) != (row in step.chunk_rows)


@given(rows, page_sizes)
def test_pages_hold_the_keys_and_the_last_one_is_never_empty(rows: list[tuple[int, int]], page_size: int) -> None:
    step = describe(rows, page_size).host
    for row, (start, length) in enumerate(rows):
        assert (step.starts[row], step.lengths[row], step.kv_lengths[row]) == (start, length, start + length)
        assert 1 <= step.last_page_lengths[row] <= page_size
        assert (step.pages[row] - 1) * page_size + step.last_page_lengths[row] == start + length
    assert step.page_offsets.tolist() == [0, *np.cumsum(step.pages).tolist()]
    assert np.diff(step.decode_page_offsets).tolist() == step.pages[step.decode_rows].tolist()
    assert np.diff(step.chunk_page_offsets).tolist() == step.pages[step.chunk_rows].tolist()


@given(rows, st.integers(1, 70))
def test_each_query_of_a_chunk_is_in_one_tile_and_the_longest_tiles_come_first(
    rows: list[tuple[int, int]], tile_queries: int
) -> None:
    step = describe(rows, 16, tile_queries).host
    found = []
    for tiles in ((step.tile_rows, step.tile_firsts), (step.split_rows, step.split_firsts)):
        seen = []
        for row, first in zip(*(x.tolist() for x in tiles), strict=True):
            start, length = rows[row]
            last = min(first + tile_queries, length)
            assert first < last
            found += [(row, query) for query in range(first, last)]
            seen.append(start + last)
        assert seen == sorted(seen, reverse=True)
    assert sorted(found) == [(row, i) for row, (_, length) in enumerate(rows) if length > 1 for i in range(length)]


@given(st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 200)), min_size=1, max_size=6))
def test_keys_of_few_tiles_are_dealt_among_programs_by_what_the_row_alone_is(rows: list[tuple[int, int]]) -> None:
    step = describe(rows, 16, 32).host
    parts = np.diff(step.split_offsets)
    assert step.part_tiles.tolist() == np.repeat(np.arange(len(parts)), parts).tolist()
    for row, (start, length) in enumerate(rows):
        alone = describe([rows[row]], 16, 32).host
        mine = step.split_rows == row
        assert parts[mine].tolist() == np.diff(alone.split_offsets).tolist()
        assert step.split_firsts[mine].tolist() == alone.split_firsts.tolist()
        assert parts[mine].sum() <= 64 and (parts[mine] > 1).all()
        assert (parts[mine] * 1024 <= start + length).all(), "a part has keys enough"
        assert mine.any() == (length > 1 and start + length >= 2048)


@given(rows, page_sizes, st.sampled_from([0, 16]))
def test_what_the_device_gets_in_one_piece_are_the_same_fields_each_at_a_multiple_of_16_bytes(
    rows: list[tuple[int, int]], page_size: int, tile_queries: int
) -> None:
    step = describe(rows, page_size, tile_queries)
    assert step.array.dtype == np.int32
    sent = torch.from_numpy(step.array).clone()
    device = step.on_device(sent)
    for field in fields(step.host):
        part = getattr(device, field.name)
        assert part.tolist() == getattr(step.host, field.name).tolist(), field.name
        assert len(part) == 0 or (part.data_ptr() - sent.data_ptr()) % 16 == 0, field.name


def test_no_tiles_are_made_for_who_asks_for_none_or_has_decode_rows_alone() -> None:
    assert len(describe([(0, 40)], 16).host.tile_rows) == 0
    assert len(describe([(9, 1), (30, 1)], 16, 8).host.tile_rows) == 0
