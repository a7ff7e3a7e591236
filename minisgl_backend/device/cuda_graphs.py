"""CUDA graphs: decode steps that one launch replays.

All graphs of a recorder work in one pool of memory. Recorded from the largest to the smallest, the later ones find room
in what the first has taken (as vLLM and SGLang do).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minisgl_backend.device.graph import Graph, NotRecordable


class CudaRecorder:
    """See Recorder."""

    shares_memory = True

    def __init__(self, index: int, stream: torch.cuda.Stream) -> None:
        """stream: to record in, since the default one can not be captured. One for all recorders of a process: matrix
        products keep a workspace for each.
        """
        self._index = index
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """What the driver gave away while recording: the pool, and what it keeps of each graph itself."""
        return self._held_bytes

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """See Recorder. Runs the work once as it is: libraries load, kernels are compiled and matrix products take
        their workspace, none of which may happen while a stream is captured. Then it is captured, and replayed.
        """
        compute = torch.cuda.current_stream(self._index)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            work()
        compute.wait_stream(self._stream)
        torch.cuda.synchronize(self._index)
        torch.cuda.empty_cache()  # what is reserved from here on is the graph's
        free, reserved = self._free_and_reserved()
        graph, out = self._capture(work)
        graph.replay()
        torch.cuda.synchronize(self._index)
        free_now, reserved_now = self._free_and_reserved()
        self._held_bytes += max(free - free_now, reserved_now - reserved, 0)  # another process may have given some back
        return CudaGraph(graph), out

    def _capture(self, work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                _no_collection(),
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),  # other threads may go on with the device
            ):
                out = work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a copy from pageable memory, a value read by the host: CUDA forbids them here
            raise NotRecordable(str(error).strip().splitlines()[0]) from error
        return graph, out

    def _free_and_reserved(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self._index)[0], torch.cuda.memory_reserved(self._index)


class CudaGraph:
    """See Graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph

    def replay(self) -> None:
        """See Graph: on the current stream."""
        assert self._graph is not None, "a closed recording"
        self._graph.replay()

    def close(self) -> None:
        """See Graph."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector may free things of the device at any moment; in a capture that would break it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
