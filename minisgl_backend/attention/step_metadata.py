"""What GPU backends need to know of a step's rows, in one array, so that it goes to the device in one transfer. Pure.

Where it stands in the flow: made once a step from the plan's starts and lengths; both phases read it, on the host (a
plan of FlashInfer) and on the device (our kernels). Page tables are on the device already and not part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int32]
_Longs = npt.NDArray[np.int64]

Array = TypeVar("Array", Ints, Tensor)

_PART_KEYS, _ROW_PARTS = 1024, 64
"""A short chunk behind a long prefix has few tiles, and each reads all of it: parts of so many keys or more, at most so
many in a row, keep a GPU busy. They depend on nothing but the row.
"""

_ALIGNED = 4
"""Every part begins at a multiple of 16 bytes: a kernel is compiled anew for a pointer that does not."""


@dataclass(frozen=True, slots=True)
class StepFields(Generic[Array]):
    """int32, on the host or on the device. A decode row computes one token, a chunk row several."""

    starts: Array  # [rows]: first position that the row computes
    lengths: Array  # [rows]: tokens that it computes
    kv_lengths: Array  # [rows]: keys there are when they are written
    token_offsets: Array  # [rows + 1]: where each row's tokens begin in the flat batch; last: all tokens
    pages: Array  # [rows]: that hold its keys
    page_offsets: Array  # [rows + 1]: running sum of `pages`
    last_page_lengths: Array  # [rows]: keys in its last page, 1 … page_size

    token_rows: Array  # [tokens]: whose it is
    token_positions: Array  # [tokens]

    decode_rows: Array  # [d]: indices of the decode rows, ascending
    decode_tokens: Array  # [d]: where their tokens lie in the flat batch
    decode_page_offsets: Array  # [d + 1]: running sum of their pages

    chunk_rows: Array  # [c]: indices of the chunk rows, ascending
    chunk_tokens: Array  # [sum of their lengths]: where their tokens lie in the flat batch
    chunk_token_offsets: Array  # [c + 1]: running sum of their lengths
    chunk_page_offsets: Array  # [c + 1]: running sum of their pages

    tile_rows: Array  # [tiles]: of which row the queries of each tile of a chunk are
    tile_firsts: Array  # [tiles]: the first of them, counted in the row; tiles that see the most keys come first
    split_rows: Array  # [s], as tile_rows: of the tiles whose keys are dealt among several programs, the parts
    split_firsts: Array  # [s]
    split_offsets: Array  # [s + 1]: running sum of their parts
    part_tiles: Array  # [parts]: which of the s it is of


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """All fields of a step, one after another in one array."""

    array: Ints  # the parts between which nothing lies but zeros up to the next multiple of 16 bytes
    host: StepFields[Ints]  # views of it

    def on_device(self, array: Tensor) -> StepFields[Tensor]:
        """array: a copy of `array`, int32 → views of it."""
        parts, at = {}, 0
        for field in fields(self.host):
            size = len(getattr(self.host, field.name))
            parts[field.name] = array[at : at + size]
            at += _aligned(size)
        return StepFields(**parts)


def describe_step(starts: _Longs, lengths: _Longs, page_size: int, tile_queries: int = 0) -> StepMetadata:
    """starts, lengths: as in StepRows. tile_queries: most queries of a tile; 0: nobody asks for tiles."""
    kv_lengths = starts + lengths
    pages = -(-kv_lengths // page_size)
    token_offsets = _offsets(lengths)
    token_rows = np.repeat(np.arange(len(lengths)), lengths)
    decode_rows, chunk_rows = np.flatnonzero(lengths == 1), np.flatnonzero(lengths > 1)
    tile_rows, tile_firsts, parts = _tiles(chunk_rows, starts, lengths, tile_queries)
    whole, split = parts < 2, parts > 1
    return _packed(
        {
            "starts": starts,
            "lengths": lengths,
            "kv_lengths": kv_lengths,
            "token_offsets": token_offsets,
            "pages": pages,
            "page_offsets": _offsets(pages),
            "last_page_lengths": (kv_lengths - 1) % page_size + 1,
            "token_rows": token_rows,
            "token_positions": np.arange(len(token_rows)) + (starts - token_offsets[:-1])[token_rows],
            "decode_rows": decode_rows,
            "decode_tokens": token_offsets[decode_rows],
            "decode_page_offsets": _offsets(pages[decode_rows]),
            "chunk_rows": chunk_rows,
            "chunk_tokens": np.flatnonzero((lengths > 1)[token_rows]),
            "chunk_token_offsets": _offsets(lengths[chunk_rows]),
            "chunk_page_offsets": _offsets(pages[chunk_rows]),
            "tile_rows": tile_rows[whole],
            "tile_firsts": tile_firsts[whole],
            "split_rows": tile_rows[split],
            "split_firsts": tile_firsts[split],
            "split_offsets": _offsets(parts[split]),
            "part_tiles": np.repeat(np.arange(split.sum()), parts[split]),
        }
    )


def _offsets(counts: _Longs) -> _Longs:
    """[n] → [n + 1]: 0, and the running sums."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))


def _tiles(rows: _Longs, starts: _Longs, lengths: _Longs, tile_queries: int) -> tuple[_Longs, _Longs, _Longs]:
    """→ the row, the first query and the parts of each tile."""
    if not tile_queries:
        return (np.empty(0, np.int64),) * 3
    counts = -(-lengths[rows] // tile_queries)
    of = np.repeat(rows, counts)
    firsts = (np.arange(len(of)) - np.repeat(_offsets(counts)[:-1], counts)) * tile_queries
    seen = starts[of] + np.minimum(firsts + tile_queries, lengths[of])
    parts = np.minimum(seen // _PART_KEYS, _ROW_PARTS // np.repeat(counts, counts))
    order = np.argsort(-seen, kind="stable")
    return of[order], firsts[order], parts[order]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _packed(values: dict[str, _Longs]) -> StepMetadata:
    """values: in the order of the fields."""
    assert list(values) == [field.name for field in fields(StepFields)]
    array = np.zeros(sum(_aligned(len(value)) for value in values.values()), np.int32)
    views, at = {}, 0
    for name, value in values.items():
        views[name] = array[at : at + len(value)]
        views[name][:] = value
        at += _aligned(len(value))
    return StepMetadata(array, StepFields(**views))
