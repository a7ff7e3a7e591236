"""Arrays on their way between host and device: in one transfer, through buffers that nobody writes while they are read.

The device is the one of fakes/delayed_streams.py, which does nothing before somebody waits for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from fakes.delayed_streams import DelayedStreams
from minisgl_backend.device.staging import Staging
from minisgl_backend.device.streams import PASSED, Event, HostStreams, Later

Arrays = list[npt.NDArray[Any]]


def arrays_of(seed: int) -> Arrays:
    """Of several types and odd sizes, one of them without elements."""
    random = np.random.default_rng(seed)
    return [
        random.integers(0, 1 << 40, (3, 5)),
        random.integers(0, 9, 7).astype(np.int32),
        np.zeros((0, 4), np.float32),
        random.random((2, 3)).astype(np.float32),
        random.integers(0, 2, 13).astype(np.bool_),
        random.random(1),
    ]


def same(sent: Arrays, tensors: list[Tensor]) -> bool:
    return all(
        torch.equal(torch.from_numpy(array), tensor) and torch.from_numpy(array).dtype == tensor.dtype
        for array, tensor in zip(sent, tensors, strict=True)
    )


def test_arrays_of_any_type_go_up_in_one_transfer() -> None:
    streams = DelayedStreams()
    staging = Staging(streams)
    sent = arrays_of(0)
    tensors = staging.upload(sent)
    assert streams.compute(lambda: same(sent, tensors)).value
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


@pytest.mark.parametrize("buffers", [1, 2, 16])
def test_no_buffer_is_written_while_the_device_still_reads_it(buffers: int) -> None:
    """Forty transfers before anything is computed: all of them must arrive as they were."""
    streams = DelayedStreams()
    staging = Staging(streams, buffers)
    arrived: list[Later[bool]] = []
    for step in range(40):
        sent = arrays_of(step)
        kept = [array.copy() for array in sent]
        tensors = staging.upload(sent)
        for array in sent:
            array.fill(1)  # the caller may write them again
        arrived.append(streams.compute(lambda kept=kept, tensors=tensors: same(kept, tensors)))  # type: ignore[misc]
    assert all(later.value for later in arrived)
    assert streams.waits["up"] == 40 - buffers and streams.waits["compute"] == 0, "the host waits for copies alone"
    assert len(streams.buffers) == buffers


def test_a_buffer_that_is_not_waited_for_shows() -> None:
    """What the tests here rest on."""

    class Hasty(DelayedStreams):
        def upload(self, host: Tensor) -> tuple[Tensor, Event]:
            return super().upload(host)[0], PASSED

    streams = Hasty()
    staging = Staging(streams, 2)
    sent = [staging.upload([np.full(5, step)])[0] for step in range(3)]
    assert streams.compute(lambda: [int(tensor[0]) for tensor in sent]).value == [2, 1, 2]


def test_a_buffer_that_is_too_small_grows_only_when_it_is_free() -> None:
    streams = DelayedStreams()
    staging = Staging(streams, 1)
    small, large = np.arange(5), np.arange(5000)
    ((first,), (second,)) = staging.upload([small]), staging.upload([large])
    assert streams.compute(lambda: torch.equal(first, torch.arange(5))).value
    assert streams.compute(lambda: torch.equal(second, torch.arange(5000))).value


def test_what_comes_down_is_read_when_it_is_there_and_its_buffer_serves_again() -> None:
    streams = DelayedStreams()
    staging = Staging(streams)
    for step in range(6):
        results = [streams.compute(lambda n=n: torch.arange(n, n + 4)) for n in (step, step + 100)]  # type: ignore[misc]
        downs = [staging.download(result, (4,), torch.int64) for result in results]
        first = downs[0].tensor()
        assert streams.pending, "the second is not waited for"
        assert first.tolist() == list(range(step, step + 4))
        assert downs[1].tensor().tolist() == list(range(step + 100, step + 104))
    assert len(streams.buffers) == 2, "as many as were on their way at a time"


def test_an_array_that_was_read_stays_when_its_buffer_serves_another() -> None:
    streams = DelayedStreams()
    staging = Staging(streams)
    first = staging.download(streams.compute(lambda: torch.arange(4)), (4,), torch.int64).tensor()
    assert staging.download(streams.compute(lambda: torch.zeros(4).long()), (4,), torch.int64).tensor().sum() == 0
    assert first.tolist() == [0, 1, 2, 3]


def test_on_a_cpu_nothing_is_copied() -> None:
    staging = Staging(HostStreams())
    sent = arrays_of(0)
    tensors = staging.upload(sent)
    assert same(sent, tensors)
    for array, tensor in zip(sent, tensors, strict=True):
        assert tensor.data_ptr() == array.ctypes.data or not array.size
    result = staging.streams.compute(lambda: torch.arange(3))
    assert staging.download(result, (3,), torch.int64).tensor() is result.value
