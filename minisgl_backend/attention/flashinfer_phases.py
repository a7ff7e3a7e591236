"""Both phases on FlashInfer's paged kernels (Ye et al., "FlashInfer", MLSys 2025): plan once a step, run once a layer.

Where it stands in the flow: `GpuAttention` has written keys and values, and asks for the rows of a phase. Layers that
attend alike share a wrapper and its plan. All wrappers share the workspace of split rows, since their kernels run one
after another.

A plan is made on the host, from the host's side of the step's metadata, so that nothing is read back. What it found out
goes to the device from pinned memory that the next plan of the wrapper writes, so that one waits for the copy, which a
host one step ahead of its device finds done.

A recording holds the kernels of one wrapper over buffers that stay; each replay is planned anew (`refresh`).

Under a window FlashInfer leaves out what is hidden tile by tile and gives the rest of a tile weight 0, and 0 · NaN is
NaN: what is not finite spoils more of its own row than with other backends, so `auto` leaves windows and caps to
those. It has no sinks here: it takes them and ignores them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl_backend.attention.interface import AttentionVariant
from minisgl_backend.attention.phases import PhaseStep
from minisgl_backend.attention.step_metadata import Ints, describe_step
from minisgl_backend.device.streams import PASSED, Event
from minisgl_backend.kernels.gpu.flashinfer import HEAD_DIMS, FlashInfer, PagedWrapper
from minisgl_backend.kvpool.paged import PagedKvPool

_WORKSPACE_BYTES = 128 << 20
"""What FlashInfer asks for. Partial results of split rows: with head_dim 256 on 132 multiprocessors 35 MiB."""

_GRAPH_SCHEDULE_BYTES = 1 << 20
"""Of each recording, instead of 8 MiB: three numbers for each of some thousand blocks of decode rows take 64 KiB."""

_KERNELS = "fa2"
"""Of FlashInfer's families the one for every GPU from Ampere on. Not its "auto": what it takes, and compiles, hangs on
the rows of a step. Nobody has measured FA3 here, which is for Hopper; eight sources, one took eight minutes to compile.
"""

_TENSOR_CORE_GROUP = 4
"""Query heads of a KV head from which on decode rows go to matrix instructions, whose tiles have 16 queries. Those
without a kernel for CUDA cores (5, 7, 9 …) are among them.
"""


def flashinfer_obstacle(pool: PagedKvPool, variants: Sequence[AttentionVariant]) -> str:
    """Why FlashInfer can not serve a model; empty: it can."""
    k_pages, _ = pool.layer(0)
    if k_pages.dtype not in (torch.float16, torch.bfloat16):
        return f"keys and values are {k_pages.dtype}, and it takes fp16 and bf16"
    if k_pages.shape[3] not in HEAD_DIMS:
        return f"head_dim is {k_pages.shape[3]}, and it takes {', '.join(map(str, HEAD_DIMS))}"
    if any(variant.sinks for variant in variants):
        return "layers have attention sinks, which it ignores"
    return ""


def takes_tensor_cores(heads: int, kv_heads: int) -> bool:
    """Whether decode rows pay with matrix instructions."""
    return heads // kv_heads >= _TENSOR_CORE_GROUP


class FlashInferPhases:
    """A backend of each phase, over one pool. They share the workspace; who wants another one for a phase uses half."""

    def __init__(
        self,
        pool: PagedKvPool,
        variants: Sequence[AttentionVariant],
        heads: int,
        flashinfer: FlashInfer,
        mark: Callable[[], Event],
    ) -> None:
        """variants: of each layer. heads: of queries. The pool and the variants have no `flashinfer_obstacle`. mark:
        of the device's streams, when all that was launched so far is done.

        The workspace is taken here, so that who measures what a step needs sees it.
        """
        assert not (obstacle := flashinfer_obstacle(pool, variants)), obstacle
        device = pool.layer(0)[0].device
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)  # zeros: FlashInfer asks for them
        wrappers = _Wrappers(pool, tuple(variants), heads, flashinfer, workspace, mark)
        self.chunks = FlashInferChunks(wrappers)
        self.decode = FlashInferDecode(wrappers)


class _Planned:
    """The wrapper of the layers that attend alike."""

    def __init__(self, variant: AttentionVariant, wrapper: PagedWrapper) -> None:
        self.variant = variant
        self.wrapper = wrapper
        self.copied: Event = PASSED  # the last plan, out of pinned memory


@dataclass(frozen=True, slots=True)
class _Wrappers:
    """What wrappers are made from, and planned with."""

    pool: PagedKvPool
    variants: tuple[AttentionVariant, ...]  # of each layer
    heads: int
    flashinfer: FlashInfer
    workspace: Tensor  # bytes
    mark: Callable[[], Event]

    def make(self, new: Callable[[], PagedWrapper]) -> tuple[_Planned, ...]:
        """One for each variant there is."""
        return tuple(_Planned(variant, new()) for variant in dict.fromkeys(self.variants))

    def new_chunks(self) -> PagedWrapper:
        return self.flashinfer.chunks(self.workspace, "NHD", backend=_KERNELS)

    def new_decode(self, **graph: Tensor | bool) -> PagedWrapper:
        tensor_cores = takes_tensor_cores(self.heads, self.pool.layer(0)[0].shape[2])
        return self.flashinfer.decode(self.workspace, "NHD", use_tensor_cores=tensor_cores, backend=_KERNELS, **graph)

    def plan(self, wrappers: Sequence[_Planned], *rows: Ints | Tensor, **phase: bool) -> None:
        """rows: what a plan takes by position, numpy's on the host."""
        k_pages, _ = self.pool.layer(0)
        _, page_size, kv_heads, head_dim = k_pages.shape
        tensors = [torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in rows]
        for planned in wrappers:
            planned.copied.wait()
            planned.wrapper.plan(
                *tensors,
                self.heads,
                kv_heads,
                head_dim,
                page_size,
                q_data_type=k_pages.dtype,
                kv_data_type=k_pages.dtype,
                sm_scale=planned.variant.scale,
                window_left=planned.variant.window - 1,  # positions before a token; -1: all
                logits_soft_cap=planned.variant.softcap,
                **phase,
            )
            planned.copied = self.mark()

    def attention(self, wrappers: Sequence[_Planned], tokens: slice | Tensor) -> FlashInferAttention:
        of_variant = {planned.variant: planned.wrapper for planned in wrappers}
        return FlashInferAttention(self.pool, tuple(of_variant[variant] for variant in self.variants), tokens)


@dataclass(frozen=True, slots=True)
class FlashInferAttention:
    """See PhaseAttention."""

    pool: PagedKvPool
    wrappers: tuple[PagedWrapper, ...]  # of each layer, planned
    tokens: slice | Tensor  # of the phase in the flat batch: where they lie together, or int64 [n]

    def attend(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        """See PhaseAttention."""
        assert sinks is None, "a model with sinks is not served"
        wrapper, pages = self.wrappers[layer], self.pool.layer(layer)
        if isinstance(self.tokens, slice):
            wrapper.run(q[self.tokens], pages, out=out[self.tokens])
            return
        own = q[self.tokens]
        out.index_copy_(0, self.tokens, wrapper.run(own, pages, out=torch.empty_like(own)))


class FlashInferChunks:
    """See PhaseBackend."""

    tile_queries = 0

    def __init__(self, wrappers: _Wrappers) -> None:
        self._wrappers = wrappers
        self._planned = wrappers.make(wrappers.new_chunks)

    def begin(self, step: PhaseStep) -> FlashInferAttention:
        """See PhaseBackend."""
        host, device = step.host, step.device
        total = int(host.chunk_page_offsets[-1])
        pages = page_list(step.page_tables[device.chunk_rows], device.chunk_page_offsets, total)
        last_pages = host.last_page_lengths[host.chunk_rows]
        bounds = host.chunk_token_offsets, host.chunk_page_offsets
        self._wrappers.plan(self._planned, *bounds, pages, last_pages, causal=True)
        return self._wrappers.attention(self._planned, _together(host.chunk_tokens, device.chunk_tokens))


class FlashInferDecode:
    """See DecodeBackend."""

    tile_queries = 0

    def __init__(self, wrappers: _Wrappers) -> None:
        self._wrappers = wrappers
        self._planned = wrappers.make(wrappers.new_decode)
        self._pages = torch.zeros(0, dtype=torch.int32, device=wrappers.workspace.device)

    def begin(self, step: PhaseStep) -> FlashInferAttention:
        """See PhaseBackend."""
        host, device = step.host, step.device
        offsets, last_pages = host.decode_page_offsets, host.last_page_lengths[host.decode_rows]
        pages = page_list(step.page_tables[device.decode_rows], device.decode_page_offsets, int(offsets[-1]))
        self._wrappers.plan(self._planned, offsets, pages, last_pages)
        return self._wrappers.attention(self._planned, _together(host.decode_tokens, device.decode_tokens))

    def decode_step(self, positions: Tensor, page_tables: Tensor) -> RecordedFlashInfer:
        """See DecodeBackend. Recordings of all sizes share the list of pages, if the largest is made first."""
        if page_tables.numel() > len(self._pages):
            self._pages = torch.zeros(page_tables.numel(), dtype=torch.int32, device=page_tables.device)
        return RecordedFlashInfer(self._wrappers, len(positions), self._pages)


class RecordedFlashInfer:
    """See RecordedPhase. Holds the buffers that the recorded kernels read."""

    def __init__(self, wrappers: _Wrappers, rows: int, pages: Tensor) -> None:
        """pages: int32, as many as the rows can have together."""
        device = pages.device
        self._wrappers = wrappers
        self._rows = rows
        self._pages = pages
        self._page_offsets = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._last_pages = torch.zeros(rows, dtype=torch.int32, device=device)
        self._planned = wrappers.make(self._new_wrapper)

    def begin(self) -> FlashInferAttention:
        """See RecordedPhase."""
        return self._wrappers.attention(self._planned, slice(0, self._rows))

    def refresh(self, starts: npt.NDArray[np.int64], page_tables: Tensor) -> None:
        """See RecordedPhase."""
        page_size = self._wrappers.pool.page_size
        host = describe_step(starts, np.ones_like(starts), page_size).host
        pages = self._pages[: int(host.decode_page_offsets[-1])]
        self._wrappers.plan(self._planned, host.decode_page_offsets, pages, host.last_page_lengths)
        pages.copy_(page_list(page_tables, self._page_offsets, len(pages)))  # the plan has copied the offsets

    def _new_wrapper(self) -> PagedWrapper:
        wrapper = self._wrappers.new_decode(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=self._page_offsets,
            paged_kv_indices_buffer=self._pages,
            paged_kv_last_page_len_buffer=self._last_pages,
        )
        schedule = torch.empty(_GRAPH_SCHEDULE_BYTES, dtype=torch.uint8, device=self._pages.device)
        wrapper.reset_workspace_buffer(self._wrappers.workspace, schedule)
        return wrapper


def page_list(page_tables: Tensor, offsets: Tensor, total: int) -> Tensor:
    """page_tables [rows, n]; offsets [rows + 1] int32: running sum of the rows' pages; total: the last of them, known
    to the host, which therefore does not wait → [total] int32: the pages of one row after the other.
    """
    rows = torch.repeat_interleave(offsets.diff(), output_size=total)
    columns = torch.arange(total, dtype=torch.int32, device=offsets.device) - offsets[rows]
    return page_tables[rows, columns].to(torch.int32)


def _together(host: Ints, device: Tensor) -> slice | Tensor:
    """Indices of tokens, ascending, on the host and on the device → a slice, where none is left out between them."""
    first, end = int(host[0]), int(host[-1]) + 1
    return slice(first, end) if end - first == len(host) else device.long()
