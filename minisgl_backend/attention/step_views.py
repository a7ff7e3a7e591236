"""What the layers of one kind need of a step's rows: which pages to gather, and who is hidden from whom.

Where it stands in the flow: made by the torch backend once per step for each distinct window, read by every layer that
has it. What no row of a group sees is not gathered, so a decode row under a window costs what the window costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.attention.grouping import group_by_length
from minisgl_backend.attention.interface import StepRows

_Ints = npt.NDArray[np.int64]

_BLOCK_PLACES = {"cpu": 128, "cuda": 4096}
"""Keys that meet the queries of a chunk at once: a CPU keeps their scores in its cache, a GPU wants large products."""

_LEAST_QUERIES = 64
"""A chunk under a window is taken a quarter of the window at a time, and no fewer queries than these."""


@dataclass(frozen=True, slots=True)
class ViewLimits:
    """What a view may take, and what its tensors are."""

    page_size: int
    scratch_page: int
    mask_dtype: torch.dtype  # the pool's
    group_tokens: int  # whose keys and values are gathered at once in a decode group, padding included
    block_tokens: int  # the same where keys come block by block


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one token whose places are gathered side by side."""

    tokens: Tensor  # [rows] int64: where the rows' tokens lie in the flat batch
    tables: Tensor  # [rows, n] int64
    mask: Tensor | None  # [rows, 1, 1, n · page_size] in the pool's dtype: 0 or -inf; None when every place counts
    behind: Tensor | None  # [rows, page_size, 1, 1] bool: of the first page, what the window has left; None: nothing


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Queries of a chunk that go through one product."""

    queries: slice  # of the chunk's
    places: slice  # of the gathered ones: all that some of the queries see
    mask: Tensor | None  # [queries, places] in the pool's dtype: 0 or -inf; None: plain causal


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row of several tokens."""

    span: slice  # of the flat batch
    table: Tensor | None  # [1, n] int64; None: no prefix, the step's own keys are all there is
    places: int  # of the gathered ones, up to that of the last token
    parts: tuple[ChunkPart, ...]
    begins: Tensor | None  # [length] int64: the first place that each query sees; None: no window


@dataclass(frozen=True, slots=True)
class Block:
    """Keys that are gathered at once."""

    tables: Tensor  # [rows, n] int64
    queries: slice  # of each row's: all that see some of the keys
    hidden: Tensor | None  # [rows, queries, n · page_size] bool; None: they see all of it


@dataclass(frozen=True, slots=True)
class BlockedRows:
    """A decode group, or a chunk, whose keys come block by block."""

    tokens: Tensor  # [rows, queries] int64: where they lie in the flat batch
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class StepView:
    """All rows of a step, as the layers of one window see them: in whole products, or block by block."""

    groups: tuple[DecodeGroup, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    blocked: tuple[BlockedRows, ...] = ()


def view_rows(rows: StepRows, window: int, limits: ViewLimits) -> StepView:
    """For whole products: a masked one per decode group, and one per chunk, or several where a window is shorter."""
    groups = tuple(_decode_group(group, limits) for group in _decode_rows(rows, window, limits))
    beyond = rows.lengths[(rows.lengths > 1) & (rows.starts + rows.lengths > window)]
    band = _Band(window, int(beyond.max(initial=0)), limits.mask_dtype, rows.page_tables.device)
    chunks = tuple(_chunk(table, span, start, band, limits) for table, span, start in _chunk_rows(rows))
    return StepView(groups=groups, chunks=chunks)


def view_blocked_rows(rows: StepRows, window: int, limits: ViewLimits) -> StepView:
    """For attention that takes its keys block by block."""
    groups = [_blocked_group(group, limits) for group in _decode_rows(rows, window, limits)]
    edges = _Edges(window, rows.page_tables.device)
    chunks = [_blocked_chunk(table, span, start, edges, limits) for table, span, start in _chunk_rows(rows)]
    return StepView(blocked=(*groups, *chunks))


@dataclass(frozen=True, slots=True)
class _DecodeRows:
    tokens: _Ints  # [rows]
    tables: Tensor  # [rows, n]
    seen_from: _Ints  # [rows]: of the gathered places, the first that each row sees; always in its first page
    seen_to: _Ints  # [rows]: behind the last


def _decode_rows(rows: StepRows, window: int, limits: ViewLimits) -> Iterator[_DecodeRows]:
    page_size = limits.page_size
    single = np.flatnonzero(rows.lengths == 1)
    tokens = (np.cumsum(rows.lengths) - rows.lengths)[single]
    ends = (rows.starts + rows.lengths)[single]
    begins = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
    first_pages = begins // page_size
    seen_from, seen_to = begins - first_pages * page_size, ends - first_pages * page_size
    for members in group_by_length(seen_to.tolist(), page_size, limits.group_tokens):
        width = -(-int(seen_to[members].max()) // page_size)
        tables = _tables_from(rows.page_tables, single[members], first_pages[members], width, limits.scratch_page)
        yield _DecodeRows(tokens[members], tables, seen_from[members], seen_to[members])


def _tables_from(page_tables: Tensor, rows: _Ints, first_pages: _Ints, width: int, scratch_page: int) -> Tensor:
    """[rows, width]: of each row's table the columns from its first page on; the scratch page past the last column."""
    index = torch.from_numpy(rows).to(page_tables.device)
    if not first_pages.any():
        return page_tables[index, :width]
    columns = np.minimum(first_pages[:, None] + np.arange(width), page_tables.shape[1])
    padded = F.pad(page_tables[index], (0, 1), value=scratch_page)
    return padded.gather(1, torch.from_numpy(columns).to(page_tables.device))


def _decode_group(rows: _DecodeRows, limits: ViewLimits) -> DecodeGroup:
    device, dtype = rows.tables.device, limits.mask_dtype
    places = rows.tables.shape[1] * limits.page_size
    mask = behind = None
    if int(rows.seen_to.min()) < places or rows.seen_from.any():
        hidden = torch.from_numpy(_hidden_places(rows, places)).to(device)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        mask = mask[:, None, None, :]
        if rows.seen_from.any():
            left = np.arange(limits.page_size)[None, :] < rows.seen_from[:, None]
            behind = torch.from_numpy(left).to(device)[:, :, None, None]
    return DecodeGroup(torch.from_numpy(rows.tokens).to(device), rows.tables, mask, behind)


def _hidden_places(rows: _DecodeRows, places: int) -> npt.NDArray[np.bool_]:
    """[rows, places]."""
    at = np.arange(places)[None, :]
    hidden = at >= rows.seen_to[:, None]
    return hidden | (at < rows.seen_from[:, None]) if rows.seen_from.any() else hidden


def _chunk_rows(rows: StepRows) -> Iterator[tuple[Tensor, slice, int]]:
    """Of each row of several tokens: its page table [n], its tokens in the flat batch, its first position."""
    begins = np.cumsum(rows.lengths) - rows.lengths
    for row in np.flatnonzero(rows.lengths > 1).tolist():
        span = slice(int(begins[row]), int(begins[row] + rows.lengths[row]))
        yield rows.page_tables[row], span, int(rows.starts[row])


class _Band:
    """Masks of chunks under a window. Interior parts of all chunks have the same one; the others are slices of it."""

    def __init__(self, window: int, most_queries: int, dtype: torch.dtype, device: torch.device) -> None:
        """most_queries: of a chunk that reaches beyond the window; 0: there is none."""
        self.window = window
        self.queries = max(window // 4, _LEAST_QUERIES)
        if window and most_queries:
            # Query i and places from that of query 0's first key on: it sees i … i + window - 1.
            queries = min(self.queries, most_queries)
            mask = torch.full((queries, queries + window - 1), float("-inf"), dtype=dtype, device=device)
            self._mask = mask.triu(window) + mask.tril(-1)

    def part(self, start: int, queries: slice) -> tuple[int, Tensor]:
        """Queries of a chunk that begins at position `start` → the first position that some of them see, their mask."""
        first = start + queries.start - self.window + 1
        count = queries.stop - queries.start
        return max(first, 0), self._mask[:count, max(-first, 0) : count + self.window - 1]


def _chunk(page_table: Tensor, span: slice, start: int, band: _Band, limits: ViewLimits) -> Chunk:
    window, page_size, device = band.window, limits.page_size, page_table.device
    length = span.stop - span.start
    end = start + length
    first = max(start - window + 1, 0) // page_size * page_size if window else 0  # position of the first gathered place
    if window and end > window:
        pieces = [slice(at, min(at + band.queries, length)) for at in range(0, length, band.queries)]
        parts = []
        for piece in pieces:
            low, mask = band.part(start, piece)
            parts.append(ChunkPart(piece, slice(low - first, start + piece.stop - first), mask))
    else:
        causal = None
        if start:
            shape = (length, end)
            causal = torch.full(shape, float("-inf"), dtype=limits.mask_dtype, device=device).triu_(start + 1)
        parts = [ChunkPart(slice(0, length), slice(0, end), causal)]
    begins = None
    if window:
        lowest = start - window + 1 - first
        begins = torch.arange(lowest, lowest + length, device=device).clamp_(min=0)
    table = page_table[None, first // page_size : -(-end // page_size)] if start else None
    return Chunk(span, table, end - first, tuple(parts), begins)


def _blocked_group(rows: _DecodeRows, limits: ViewLimits) -> BlockedRows:
    device, page_size = rows.tables.device, limits.page_size
    count, width = rows.tables.shape
    hidden = _hidden_places(rows, width * page_size)
    pages = max(limits.block_tokens // (count * page_size), 1)
    blocks = []
    for page in range(0, width, pages):
        part = hidden[:, None, page * page_size : (page + pages) * page_size]
        mask = torch.from_numpy(part).to(device) if part.any() else None
        blocks.append(Block(rows.tables[:, page : page + pages], slice(0, 1), mask))
    return BlockedRows(torch.from_numpy(rows.tokens).to(device)[:, None], tuple(blocks))


class _Edges:
    """Who of a chunk's queries does not see which keys of a block. Blocks that lie alike share a mask."""

    def __init__(self, window: int, device: torch.device) -> None:
        self.window = window
        self._device = device
        self._masks: dict[tuple[int, int], Tensor] = {}

    def hidden(self, queries: int, places: int, ahead: int) -> Tensor | None:
        """[1, queries, places]: place 0 is `ahead` positions before query 0; None: nothing is hidden."""
        window = self.window
        if ahead >= places - 1 and (not window or queries + ahead <= window):
            return None
        mask = self._masks.get((places, ahead))
        if mask is None or mask.shape[0] < queries:
            mask = torch.ones(queries, places, dtype=torch.bool, device=self._device).triu_(ahead + 1)
            if window:
                mask |= torch.ones_like(mask).tril_(ahead - window)
            self._masks[places, ahead] = mask
        return mask[None, :queries]


def _blocked_chunk(page_table: Tensor, span: slice, start: int, edges: _Edges, limits: ViewLimits) -> BlockedRows:
    window, page_size, device = edges.window, limits.page_size, page_table.device
    length = span.stop - span.start
    first = max(start - window + 1, 0) // page_size if window else 0
    last = -(-(start + length) // page_size)
    pages = max(min(_BLOCK_PLACES[device.type], limits.block_tokens) // page_size, 1)
    blocks = []
    for page in range(first, last, pages):
        table = page_table[None, page : min(page + pages, last)]
        position, places = page * page_size, table.shape[1] * page_size
        low = max(position - start, 0)  # who comes before sees nothing of it, who comes so far behind neither
        high = min(length, position + places - 1 + window - start) if window else length
        hidden = edges.hidden(high - low, places, start + low - position)
        blocks.append(Block(table, slice(low, high), hidden))
    return BlockedRows(torch.arange(span.start, span.stop, device=device)[None], tuple(blocks))
