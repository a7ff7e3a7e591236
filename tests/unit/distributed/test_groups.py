"""What ranks say to one another: over shared memory, over gloo. The ranks are threads, whose calls hold no GIL."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from minisgl_backend.distributed.gloo import GlooGroup
from minisgl_backend.distributed.group import RankGroup
from minisgl_backend.distributed.seat import SLOT_BYTES, make_memory
from minisgl_backend.distributed.shared import SharedGroup
from minisgl_backend.kernels.native.library import Library, open_library
from minisgl_backend.kernels.native.recording import record
from minisgl_backend.models.locate import cache_folder

T = TypeVar("T")

OpenGroup = Callable[[int, int], RankGroup]
"""rank, ranks → its end."""


@pytest.fixture(scope="module")
def library() -> Library:
    library = open_library(cache_folder())
    if library is None:
        pytest.skip("no kernels of our own on this machine")
    return library


@pytest.fixture
def memory() -> Iterator[Callable[[int], int]]:
    """Of so many ranks, made once."""
    made: dict[int, int] = {}
    making = threading.Lock()

    def memory(ranks: int) -> int:
        with making:
            if ranks not in made:
                made[ranks] = make_memory(ranks)
            return made[ranks]

    yield memory
    for descriptor in made.values():
        os.close(descriptor)


@pytest.fixture(params=["shared", "gloo"])
def open_group(request: pytest.FixtureRequest, memory: Callable[[int], int], tmp_path: Path) -> OpenGroup:
    if request.param == "gloo":
        return lambda rank, ranks: GlooGroup(rank, ranks, tmp_path / "meeting", 60.0)
    library: Library = request.getfixturevalue("library")
    return lambda rank, ranks: SharedGroup(library, rank, ranks, memory(ranks), 60.0)


def together(ranks: int, open_group: OpenGroup, work: Callable[[RankGroup], T]) -> list[T]:
    def run(rank: int) -> T:
        group = open_group(rank, ranks)
        out = work(group)
        group.close()
        return out

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_ranks_have_the_same_sum_of_their_tensors(open_group: OpenGroup, ranks: int, dtype: torch.dtype) -> None:
    shapes = [(1, 1), (1, 576), (7, 33), (32, 576), (0, 5)]

    def sums(group: RankGroup) -> list[Tensor]:
        return [group.add_up(numbers(group.rank, *shape, dtype=dtype)) for shape in shapes * 3]

    results = together(ranks, open_group, sums)
    for at, shape in enumerate(shapes * 3):
        parts = [numbers(rank, *shape, dtype=dtype).float() for rank in range(ranks)]
        torch.testing.assert_close(results[0][at].float(), sum(parts[1:], parts[0]).to(dtype).float())
        assert all(torch.equal(result[at], results[0][at]) for result in results)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("width", "columns"), [(7, 21), (7, 20), (7, 15), (7, 14), (1, 2)])
def test_columns_are_joined_in_the_order_of_the_ranks_and_those_of_nobody_are_left_out(
    open_group: OpenGroup, rows: int, width: int, columns: int
) -> None:
    results = together(3, open_group, lambda group: group.join_columns(numbers(group.rank, rows, width), columns))
    expected = torch.cat([numbers(rank, rows, width) for rank in range(3)], 1)[:, :columns]
    assert all(torch.equal(result, expected) and result.is_contiguous() for result in results)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_what_rank_0_has_is_on_all(open_group: OpenGroup, dtype: torch.dtype) -> None:
    def told(group: RankGroup) -> Tensor:
        return group.from_first(torch.full((11,), 100 + group.rank, dtype=dtype))

    assert all(torch.equal(result, torch.full((11,), 100, dtype=dtype)) for result in together(3, open_group, told))


def test_more_than_a_slot_holds_goes_in_pieces(library: Library, memory: Callable[[int], int]) -> None:
    count = 5 * SLOT_BYTES // 4 // 2 + 3
    width = SLOT_BYTES // 4 + 11

    def work(group: RankGroup) -> tuple[Tensor, Tensor, Tensor]:
        own = numbers(group.rank, 3, width)
        total, joined = group.add_up(numbers(group.rank, count)), group.join_columns(own, 2 * width - 5)
        return total, joined, group.from_first(own.clone())

    open_group = partial(_shared, library, memory(2))
    for total, joined, first in together(2, open_group, work):
        torch.testing.assert_close(total, numbers(0, count) + numbers(1, count))
        assert torch.equal(joined, torch.cat([numbers(0, 3, width), numbers(1, 3, width)], 1)[:, : 2 * width - 5])
        assert torch.equal(first, numbers(0, 3, width))


def _shared(library: Library, descriptor: int, rank: int, ranks: int) -> RankGroup:
    return SharedGroup(library, rank, ranks, descriptor, 60.0)


def test_a_recording_goes_through_as_many_rounds_as_it_is_replayed(
    library: Library, memory: Callable[[int], int]
) -> None:
    def work(group: RankGroup) -> list[Tensor]:
        x = torch.zeros(4, 9)

        def step() -> Tensor:
            return group.join_columns(group.add_up(x), 17)

        x.fill_(1.0 + group.rank)
        recording, out = record(library, step)
        seen = [out.clone()]
        for turn in range(1, 20):
            x.fill_(1.0 + group.rank + turn)
            recording.replay()
            seen.append(out.clone())
        recording.close()
        return seen

    for seen in together(2, partial(_shared, library, memory(2)), work):
        assert [out[0, 0].item() for out in seen] == [3.0 + 2 * turn for turn in range(20)]
        assert all(out.shape == (4, 17) and (out == out[0, 0]).all() for out in seen)


def test_rounds_go_on_where_their_numbers_begin_anew(library: Library, memory: Callable[[int], int]) -> None:
    """Each is counted in 32 bits, first of its rank's 128 bytes at the begin of the memory: a day or two of steps."""
    for rank in range(3):
        os.pwrite(memory(3), (2**32 - 3).to_bytes(4, sys.byteorder), rank * 128)

    def work(group: RankGroup) -> list[float]:
        return [group.add_up(torch.full((5,), float(group.rank + turn))).sum().item() for turn in range(8)]

    for sums in together(3, partial(_shared, library, memory(3)), work):
        assert sums == [5.0 * (3 * turn + 3) for turn in range(8)]


_ALONE = """
import torch
from minisgl_backend.distributed.seat import make_memory
from minisgl_backend.distributed.shared import SharedGroup
from minisgl_backend.kernels.native.library import open_library
from minisgl_backend.models.locate import cache_folder
library = open_library(cache_folder())
SharedGroup(library, 0, 2, make_memory(2), 0.2).add_up(torch.zeros(3))
"""


@pytest.mark.slow
def test_a_rank_that_waits_in_vain_ends_with_a_line(library: Library) -> None:
    done = subprocess.run([sys.executable, "-c", _ALONE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 70, done.stderr
    assert "rank 0: rank 1 has not come to the exchange for 0.2 s" in done.stderr


def test_a_tensor_with_gaps_is_refused(library: Library, memory: Callable[[int], int]) -> None:
    with pytest.raises(RuntimeError, match="add_up: gaps"):
        _shared(library, memory(2), 0, 2).add_up(torch.zeros(4, 4)[:, ::2])
