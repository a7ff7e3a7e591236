"""Streams and graphs of a GPU by the calls they make, over a torch.cuda that notes them: there is none on this machine.

What the calls do is seen on a GPU alone (tests/gpu/). Here it is told which stream does what, and what waits for what.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl_backend.device.cuda import CudaDevice
from minisgl_backend.device.cuda_graphs import CudaRecorder
from minisgl_backend.device.cuda_streams import CudaStreams
from minisgl_backend.device.graph import NotRecordable
from minisgl_backend.device.streams import Done

GIB = 1 << 30


class FakeCuda:
    """Notes calls in `log`. free, reserved: memory, in GiB, as it is at each question in turn."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.free: list[float] = []
        self.reserved: list[float] = []
        self._streams = self._events = 0
        self.compute = _Stream(self, "compute")
        self.current = self.compute
        for name in ("Event", "CUDAGraph", "graph", "device"):
            patch.setattr(torch.cuda, name, getattr(self, f"make_{name.lower()}"))
        patch.setattr(torch.cuda, "Stream", self.new_stream)
        patch.setattr(torch.cuda, "stream", self.use_stream)
        patch.setattr(torch.cuda, "current_stream", lambda index: self.current)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        patch.setattr(torch.cuda, "synchronize", lambda index: self.log.append("synchronize"))
        patch.setattr(torch.cuda, "empty_cache", lambda: self.log.append("empty cache"))
        patch.setattr(torch.cuda, "mem_get_info", lambda index: (int(self.free.pop(0) * GIB), 100 * GIB))
        patch.setattr(torch.cuda, "memory_reserved", lambda index: int(self.reserved.pop(0) * GIB))
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: self.log.append(f"{stream.name} reads it too"))

    def new_stream(self, index: int) -> _Stream:
        self._streams += 1
        return _Stream(self, f"side {self._streams}")

    def make_event(self) -> _Event:
        self._events += 1
        return _Event(self, f"event {self._events}")

    def make_cudagraph(self) -> _Graph:
        return _Graph(self)

    @contextmanager
    def use_stream(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def make_device(self, index: int) -> Iterator[None]:
        yield

    @contextmanager
    def make_graph(self, graph: _Graph, *, pool: str, stream: _Stream, capture_error_mode: str) -> Iterator[None]:
        self.log.append(f"capture in {stream.name}, {pool}, {capture_error_mode}")
        with self.use_stream(stream):
            yield
        self.log.append("captured")


class _Stream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.name, self._cuda = name, cuda

    def wait_event(self, event: _Event) -> None:
        self._cuda.log.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, stream: _Stream) -> None:
        self._cuda.log.append(f"{self.name} waits for {stream.name}")


class _Event:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.name, self._cuda = name, cuda

    def record(self, stream: _Stream) -> None:
        self._cuda.log.append(f"{self.name} in {stream.name}")

    def synchronize(self) -> None:
        self._cuda.log.append(f"the host waits for {self.name}")


class _Graph:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def replay(self) -> None:
        self._cuda.log.append(f"replay in {self._cuda.current.name}")

    def reset(self) -> None:
        self._cuda.log.append("reset")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def streams_of(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> CudaStreams:
    """Whose memory is the host's. Copies are noted with their stream."""
    streams = CudaStreams(0)
    streams._device = torch.device("cpu")
    copy = Tensor.copy_

    def noted(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
        fake.log.append(f"copy in {fake.current.name}" + ("" if non_blocking else ", blocking"))
        return copy(tensor, source)

    monkeypatch.setattr(Tensor, "copy_", noted)
    return streams


def test_what_goes_up_does_so_beside_the_computing_which_waits_for_it(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, copied = streams_of(fake, monkeypatch).upload(torch.arange(3))
    assert device.tolist() == [0, 1, 2]
    assert fake.log == [
        "copy in side 1",
        "event 1 in side 1",
        "compute waits for event 1",
        "compute reads it too",
    ]
    copied.wait()
    assert fake.log[-1] == "the host waits for event 1"


def test_what_comes_down_waits_for_what_was_launched_and_holds_nothing_up(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = torch.zeros(3)
    streams_of(fake, monkeypatch).download(Done(torch.ones(3)), host).wait()
    assert host.tolist() == [1, 1, 1]
    assert fake.log == [
        "side 2 waits for compute",
        "copy in side 2",
        "side 2 reads it too",
        "event 1 in side 2",
        "the host waits for event 1",
    ]


def test_work_is_launched_on_the_current_stream_and_a_mark_stands_in_it(fake: FakeCuda) -> None:
    streams = CudaStreams(0)
    assert streams.compute(lambda: fake.current.name).value == "compute"
    streams.mark().wait()
    assert fake.log == ["event 1 in compute", "the host waits for event 1"]


def test_work_runs_once_as_it_is_then_is_captured_in_the_shared_pool_and_replayed(fake: FakeCuda) -> None:
    fake.free, fake.reserved = [50, 47, 47, 46.5], [1, 3, 3, 3.25]
    recorder = CudaRecorder(0, torch.cuda.Stream(0))
    out = torch.ones(2)
    collecting: list[bool] = []

    def work() -> Tensor:
        fake.log.append(f"work in {fake.current.name}")
        collecting.append(gc.isenabled())
        return out

    graph, returned = recorder(work)
    assert returned is out and collecting == [True, False] and gc.isenabled()
    assert fake.log == [
        "side 1 waits for compute",
        "work in side 1",
        "compute waits for side 1",
        "synchronize",
        "empty cache",
        "capture in side 1, pool, thread_local",
        "work in side 1",
        "captured",
        "replay in compute",
        "synchronize",
    ]
    assert recorder.held_bytes == 3 * GIB, "what the driver gave, the pool and more"
    recorder(work)
    assert recorder.held_bytes == 3.5 * GIB
    graph.replay()
    graph.close()
    graph.close()
    assert fake.log[-2:] == ["replay in compute", "reset"]


def test_memory_that_another_process_gives_back_meanwhile_does_not_hide_what_a_recording_takes(fake: FakeCuda) -> None:
    fake.free, fake.reserved = [50, 60], [1, 3]
    recorder = CudaRecorder(0, torch.cuda.Stream(0))
    recorder(lambda: torch.ones(1))
    assert recorder.held_bytes == 2 * GIB


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            RuntimeError("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA"),
            NotRecordable,
        ),
        (torch.OutOfMemoryError("no room"), torch.OutOfMemoryError),
    ],
)
def test_what_cuda_forbids_in_a_capture_makes_work_not_recordable_and_no_room_is_no_room(
    error: Exception, expected: type[Exception], fake: FakeCuda
) -> None:
    fake.free, fake.reserved = [50], [1]
    runs: list[int] = []

    def work() -> Tensor:
        runs.append(1)
        if len(runs) == 2:
            raise error
        return torch.ones(1)

    with pytest.raises(expected, match=str(error).splitlines()[0]):
        CudaRecorder(0, torch.cuda.Stream(0))(work)
    assert gc.isenabled()


def test_recorders_of_a_gpu_share_a_stream_and_none_is_the_one_that_computes(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("is_available", True), ("device_count", 1), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *given, value=value: value)
    device = CudaDevice(0, threads=1)
    assert device.streams.ahead
    fake.free, fake.reserved = [50] * 4, [1] * 4
    for _ in range(2):
        recorder = device.recorder()
        assert recorder.shares_memory
        recorder(lambda: torch.ones(1))
    assert [line for line in fake.log if line.startswith("capture in")] == ["capture in side 3, pool, thread_local"] * 2


def test_memory_for_activations_is_taken_when_what_the_warm_up_left_has_gone_back(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both together would be more than the engine's share, which its neighbours reckon with."""

    def take(size: int, **options: Any) -> None:
        fake.log.append(f"takes {size} of {options['device']}")
        raise torch.OutOfMemoryError("others have it")

    monkeypatch.setattr(torch, "empty", take)
    device = object.__new__(CudaDevice)
    device._index = 1
    device.reserve_memory(7)
    assert fake.log == ["empty cache", "takes 7 of cuda:1"]
