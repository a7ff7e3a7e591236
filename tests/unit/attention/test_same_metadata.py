"""1,000 random plans: every backend is told of the same keys for the same tokens.

What a backend reads is turned into one form: of each token of the flat batch, the places (page · page_size + offset)
of all keys that it may see, its own last. A backend that writes keys writes them to that last place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fakes import flashinfer as fake
from minisgl_backend.attention.flashinfer_phases import FlashInferPhases
from minisgl_backend.attention.interface import AttentionVariant, StepRows
from minisgl_backend.attention.phases import PhaseStep
from minisgl_backend.attention.step_metadata import describe_step
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.device.streams import HostStreams
from minisgl_backend.kernels.gpu.flashinfer import FlashInfer
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool

PAGES = 64
VARIANTS = [AttentionVariant(0.3)]
Seen = dict[int, list[int]]  # token of the flat batch → places


class Backends:
    """Over one pool."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pool = PagedKvPool(KvShape(1, 1, 64, torch.float16), PAGES, page_size, torch.device("cpu"))
        self.wrappers: list[Any] = []
        self.flashinfer = FlashInferPhases(
            self.pool, VARIANTS, 1, FlashInfer("fake", self._chunks, self._decode), HostStreams().mark
        )
        self.torch = TorchAttention(self.pool, VARIANTS)

    def _chunks(self, *args: Any, **options: Any) -> Any:
        self.wrappers.append(fake.BatchPrefillWithPagedKVCacheWrapper(*args, **options))
        return self.wrappers[-1]

    def _decode(self, *args: Any, **options: Any) -> Any:
        self.wrappers.append(fake.BatchDecodeWithPagedKVCacheWrapper(*args, **options))
        return self.wrappers[-1]


def random_rows(rng: np.random.Generator, page_size: int) -> StepRows:
    """Up to six rows, which may share pages, as the prefix cache lets them."""
    rows = int(rng.integers(1, 7))
    lengths = np.where(rng.random(rows) < 0.5, 1, rng.integers(2, 18, rows))
    starts = rng.integers(0, 70, rows) * rng.integers(0, 2, rows)
    needs = -(-(starts + lengths) // page_size)
    width = int(needs.max()) + int(rng.integers(0, 3))
    return StepRows(starts, lengths, torch.from_numpy(rng.integers(0, PAGES, (rows, width))))


def seen_by_plan(rows: StepRows, page_size: int) -> Seen:
    """From the plan itself, row by row."""
    seen, token = {}, 0
    for row, (start, length) in enumerate(zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True)):
        table = rows.page_tables[row].tolist()
        places = [table[at // page_size] * page_size + at % page_size for at in range(start + length)]
        for position in range(start, start + length):
            seen[token] = places[: position + 1]
            token += 1
    return seen


def seen_by_flashinfer(backends: Backends, step: PhaseStep) -> Seen:
    """From what its wrappers were told; which tokens they get, from what they are begun with."""
    chunks, decode = backends.wrappers
    seen: Seen = {}
    for wrapper, phase, tokens in (
        (chunks, backends.flashinfer.chunks, step.host.chunk_tokens),
        (decode, backends.flashinfer.decode, step.host.decode_tokens),
    ):
        if not len(tokens):
            continue
        attention = phase.begin(step)
        of = attention.tokens
        order = list(range(of.start, of.stop)) if isinstance(of, slice) else of.tolist()
        plan = wrapper.plans.pop()
        bounds = plan.get("bounds", list(range(len(order) + 1)))
        for row, last in enumerate(plan["last_page_len"].tolist()):
            first_page, end_page = plan["indptr"][row : row + 2].tolist()
            pages = plan["indices"][first_page:end_page].tolist()
            places = [page * backends.page_size + at for page in pages for at in range(backends.page_size)]
            places = places[: len(places) - backends.page_size + last]
            queries = order[bounds[row] : bounds[row + 1]]
            for i, token in enumerate(queries):
                seen[token] = places[: len(places) - len(queries) + i + 1]
    return seen


def seen_by_our_kernels(step: PhaseStep, page_size: int) -> Seen:
    """From the fields on the device, as a kernel reads them: a token's row, its position, the row's table."""
    device, seen = step.device, {}
    tables, starts, offsets = step.page_tables.tolist(), device.starts.tolist(), device.token_offsets.tolist()
    row_of, positions = device.token_rows.tolist(), device.token_positions.tolist()
    for phase in (device.decode_tokens, device.chunk_tokens):
        for token in phase.tolist():
            row, position = row_of[token], positions[token]
            assert token == offsets[row] + position - starts[row]
            seen[token] = [tables[row][at // page_size] * page_size + at % page_size for at in range(position + 1)]
    return seen


@pytest.mark.slow
def test_every_backend_is_told_of_the_same_keys_in_1000_random_plans() -> None:
    rng = np.random.default_rng(9)
    backends = {page_size: Backends(page_size) for page_size in (1, 3, 16, 64)}
    for _ in range(1000):
        page_size = int(rng.choice(list(backends)))
        rows = random_rows(rng, page_size)
        metadata = describe_step(rows.starts, rows.lengths, page_size)
        device = metadata.on_device(torch.from_numpy(metadata.array.copy()))
        step = PhaseStep(metadata.host, device, rows.page_tables)
        expected = seen_by_plan(rows, page_size)
        assert seen_by_flashinfer(backends[page_size], step) == expected
        assert seen_by_our_kernels(step, page_size) == expected
        written = backends[page_size].torch.begin(rows).places.tolist()
        assert written == [places[-1] for _, places in sorted(expected.items())]
