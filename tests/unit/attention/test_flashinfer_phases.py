"""FlashInfer's phases against attention written out, over a fake that refuses what FlashInfer would not serve well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fakes import flashinfer as fake
from fakes.attention_case import AttentionCase
from fakes.flashinfer_rules import WrongCall
from fakes.phased_attention import described
from minisgl_backend.attention.flashinfer_phases import FlashInferPhases, flashinfer_obstacle, takes_tensor_cores
from minisgl_backend.attention.interface import AttentionVariant, StepRows
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.device.streams import HostStreams
from minisgl_backend.kernels.gpu.flashinfer import FlashInfer
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool


def fake_flashinfer(made: list[Any]) -> FlashInfer:
    """Wrappers are noted in `made`, in their order."""

    def noting(wrapper: Any) -> Any:
        def new(*args: Any, **options: Any) -> Any:
            made.append(wrapper(*args, **options))
            return made[-1]

        return new

    wrappers = fake.BatchPrefillWithPagedKVCacheWrapper, fake.BatchDecodeWithPagedKVCacheWrapper
    return FlashInfer("fake", *map(noting, wrappers))


# Decode rows between chunks, so that neither phase's tokens lie together; prefixes that end within a page and at its
# border; a one-token prompt.
ROWS = [(0, 1), (7, 1), (70, 1), (5, 4), (0, 9), (16, 5), (31, 1), (48, 1), (0, 1), (33, 16)]
VARIANTS = [
    AttentionVariant(0.3),
    AttentionVariant(0.2, window=10),
    AttentionVariant(0.3, softcap=1.5),
    AttentionVariant(0.3, window=1, softcap=1.5),
    AttentionVariant(0.3),
]
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2e-2}


def phases_of(case: AttentionCase, made: list[Any] | None = None) -> FlashInferPhases:
    flashinfer = fake_flashinfer([] if made is None else made)
    return FlashInferPhases(case.pool, case.variants, case.queries.shape[1], flashinfer, HostStreams().mark)


def write_step(case: AttentionCase) -> None:
    """Keys and values of the step, in all layers."""
    for layer in range(len(case.variants)):
        for store, whole in zip(case.pool.layer(layer), (case.keys, case.values), strict=True):
            for row, (start, length) in enumerate(case.rows):
                positions = torch.arange(start, start + length)
                pages = case.step.page_tables[row, positions // case.page_size]
                store[pages, positions % case.page_size] = whole[row][layer, start:]


def attend(case: AttentionCase, phases: FlashInferPhases) -> list[Tensor]:
    """Of each layer, both phases into one tensor, which begins as something that no phase gives."""
    step = described(case.step, case.page_size)
    write_step(case)
    attentions = []
    if len(step.host.chunk_rows):
        attentions.append(phases.chunks.begin(step))
    if len(step.host.decode_rows):
        attentions.append(phases.decode.begin(step))
    outs = []
    for layer in range(len(case.variants)):
        out = torch.full_like(case.queries, 77.0)
        for attention in attentions:
            attention.attend(layer, case.queries, out, None)
        outs.append(out.flatten(1))
    return outs


class Launches(TorchDispatchMode):
    """FlashInfer's launches, which can be made again over the same memory: what a CUDA graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch's compiler is imported

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "minisgl_fake_flashinfer":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    def replay(self) -> None:
        for func, args in self.calls:
            func(*args)


@pytest.mark.parametrize(
    ("page_size", "dtype", "heads"),
    [
        (1, torch.float16, (2, 2)),
        (3, torch.float16, (6, 2)),
        (16, torch.float16, (5, 1)),
        (64, torch.float16, (6, 2)),
        (3, torch.bfloat16, (5, 1)),
        (16, torch.bfloat16, (2, 2)),
    ],
    ids=str,
)
def test_rows_of_both_phases_attend_to_their_own_positions_only(
    page_size: int, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    case = AttentionCase(ROWS, page_size, dtype, heads=heads[0], kv_heads=heads[1], dim=64, variants=VARIANTS)
    for layer, out in enumerate(attend(case, phases_of(case))):
        torch.testing.assert_close(out.double(), case.expected(layer), atol=TOLERANCES[dtype], rtol=0)


@pytest.mark.parametrize("rows", [[(3, 1), (20, 1)], [(0, 4), (9, 30)], [(8, 1), (0, 3)]], ids=str)
def test_tokens_that_lie_together_are_attended_to_in_place(rows: list[tuple[int, int]]) -> None:
    case = AttentionCase(rows, 16, torch.float16, dim=64)
    with Launches() as launches:
        outs = attend(case, phases_of(case))
    for layer, out in enumerate(outs):
        torch.testing.assert_close(out.double(), case.expected(layer), atol=2e-3, rtol=0)
    written = [args[-1] for _, args in launches.calls]
    assert written and {out.untyped_storage().data_ptr() for out in written} == {out.data_ptr() for out in outs}


def test_layers_that_attend_alike_share_one_plan() -> None:
    case = AttentionCase(ROWS, 16, torch.float16, dim=64, variants=VARIANTS)
    wrappers: list[Any] = []
    attend(case, phases_of(case, wrappers))
    assert len(wrappers) == 2 * 4, "of each phase, one for each of four different variants"
    assert [(len(wrapper.plans), wrapper.runs) for wrapper in wrappers] == [(1, 2), (1, 1), (1, 1), (1, 1)] * 2
    assert len({wrapper.workspace.data_ptr() for wrapper in wrappers}) == 1, "and one workspace"


def test_a_plan_is_told_what_the_host_knows_and_reads_nothing_back() -> None:
    case = AttentionCase(ROWS, 16, torch.float16, dim=64)
    step = described(case.step, 16)
    hosts = [step.host.chunk_page_offsets.ctypes.data, step.host.decode_page_offsets.ctypes.data]
    wrappers: list[Any] = []
    phases = phases_of(case, wrappers)
    phases.chunks.begin(step)
    phases.decode.begin(step)
    assert [plan["indptr"].data_ptr() for wrapper in wrappers for plan in wrapper.plans] == hosts


def test_decode_rows_take_tensor_cores_from_four_queries_a_key_on_and_where_nothing_else_serves() -> None:
    assert [takes_tensor_cores(group * 2, 2) for group in (1, 2, 3, 4, 5, 7, 8)] == [False] * 3 + [True] * 4
    for heads, expected in ((2, False), (8, True)):
        case = AttentionCase([(5, 1)], 16, torch.float16, heads=heads, kv_heads=2, dim=64)
        wrappers: list[Any] = []
        phases_of(case, wrappers)
        assert [w.use_tensor_cores for w in wrappers if hasattr(w, "use_tensor_cores")] == [expected]


def test_a_plan_waits_until_the_device_has_read_the_one_before() -> None:
    events: list[str] = []

    class Copied:
        def wait(self) -> None:
            events.append("wait")

    def mark() -> Copied:
        events.append("mark")
        return Copied()

    class Noted(fake.BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *args: Any, **kwargs: Any) -> None:
            events.append("plan")
            super().plan(*args, **kwargs)

    case = AttentionCase([(0, 5)], 16, torch.float16, dim=64)
    flashinfer = replace(fake_flashinfer([]), chunks=Noted)
    phases = FlashInferPhases(case.pool, case.variants, case.queries.shape[1], flashinfer, mark)
    for _ in range(2):
        phases.chunks.begin(described(case.step, 16))
    assert events == ["plan", "mark", "wait", "plan", "mark"]


# ── recordings ───────────────────────────────────────────────────────────────────────────────────────────────────


class Recording:
    """A step of decode rows of a pool of 40 pages, recorded over its first state; rows can be moved."""

    def __init__(self, starts: Sequence[int], variants: Sequence[AttentionVariant]) -> None:
        generator = torch.Generator().manual_seed(5)
        rows, self.page_size = len(starts), 4
        self.pool = PagedKvPool(KvShape(len(variants), 2, 64, torch.float16), 40, 4, torch.device("cpu"))
        for layer in range(len(variants)):
            for pages in self.pool.layer(layer):
                pages.copy_(torch.randn(pages.shape, generator=generator))
        self.variants = tuple(variants)
        self.queries = torch.randn(rows, 4, 64, generator=generator).half()
        self.tables = torch.randperm(40, generator=generator)[: rows * 8].view(rows, 8).clone()
        self.positions = torch.tensor(starts)
        self.out = [torch.zeros_like(self.queries) for _ in variants]
        self.phases = FlashInferPhases(self.pool, variants, 4, fake_flashinfer([]), HostStreams().mark)
        self.step = self.phases.decode.decode_step(self.positions, self.tables)
        self.step.refresh(self.positions.numpy(), self.tables)
        with Launches() as self.launches:
            attention = self.step.begin()
            for layer, out in enumerate(self.out):
                attention.attend(layer, self.queries, out, None)

    def move(self, starts: Sequence[int], *, refresh: bool = True) -> None:
        """Other pages, in other places of the context."""
        self.positions.copy_(torch.tensor(starts))
        self.tables.copy_(self.tables.flip(1).roll(1, 0))
        if refresh:
            self.step.refresh(self.positions.numpy(), self.tables)
        for out in self.out:
            out.fill_(77.0)
        self.launches.replay()

    def right(self) -> bool:
        """Whether the output is what TorchAttention gives."""
        for layer, variant in enumerate(self.variants):
            pool = PagedKvPool(KvShape(1, 2, 64, torch.float16), 40, 4, torch.device("cpu"))
            places = self.positions[:, None] // 4, self.positions[:, None] % 4
            pages = self.tables.gather(1, places[0]), places[1]
            for mine, other in zip(self.pool.layer(layer), pool.layer(0), strict=True):
                other.copy_(mine)
            k, v = (store[pages][:, 0] for store in pool.layer(0))
            rows = StepRows(self.positions.numpy(), np.ones(len(self.positions), np.int64), self.tables)
            expected = TorchAttention(pool, [variant]).begin(rows).attend(0, self.queries, k, v)
            if not torch.allclose(self.out[layer].flatten(1), expected, atol=4e-3, rtol=0):
                return False
        return True


def test_a_recording_serves_the_rows_of_every_replay() -> None:
    recording = Recording([0, 3, 17, 30], VARIANTS[:4])
    assert recording.right()
    for starts in ([4, 8, 1, 31], [31, 31, 31, 31], [0, 0, 0, 0]):
        recording.move(starts)
        assert recording.right()


def test_a_replay_that_was_not_planned_gives_the_rows_of_the_last_plan() -> None:
    """Or the test above would hold of anybody who never plans again."""
    recording = Recording([0, 3, 17, 30], VARIANTS[:1])
    recording.move([4, 8, 1, 31], refresh=False)
    assert not recording.right()


def test_recordings_of_fewer_rows_share_the_list_of_pages_and_have_small_schedules() -> None:
    pool = PagedKvPool(KvShape(1, 2, 64, torch.float16), 8, 4, torch.device("cpu"))
    wrappers: list[Any] = []
    phases = FlashInferPhases(pool, VARIANTS[:1], 4, fake_flashinfer(wrappers), HostStreams().mark)
    wrappers.clear()
    for rows in (8, 4, 1):
        phases.decode.decode_step(torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, 8, dtype=torch.int64))
    assert len({wrapper.indices.data_ptr() for wrapper in wrappers}) == 1
    assert {wrapper.int_workspace_bytes for wrapper in wrappers} == {1 << 20}
    assert [len(wrapper.last_page_len) for wrapper in wrappers] == [8, 4, 1]


# ── what is not served ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("dtype", "dim", "variant", "says"),
    [
        (torch.float32, 64, AttentionVariant(0.3), "float32, and it takes fp16 and bf16"),
        (torch.float16, 80, AttentionVariant(0.3), "head_dim is 80, and it takes 64, 128, 256"),
        (torch.float16, 64, AttentionVariant(0.3, sinks=True), "sinks, which it ignores"),
        (torch.bfloat16, 256, AttentionVariant(0.3, window=8, softcap=2.0), ""),
    ],
)
def test_what_flashinfer_can_not_serve_is_said(
    dtype: torch.dtype, dim: int, variant: AttentionVariant, says: str
) -> None:
    pool = PagedKvPool(KvShape(1, 2, dim, dtype), 2, 4, torch.device("cpu"))
    obstacle = flashinfer_obstacle(pool, [variant])
    assert says in obstacle and bool(says) == bool(obstacle)


WORKSPACE = torch.zeros(128 << 20, dtype=torch.uint8)


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


GOOD_PLAN: dict[str, Any] = {
    "indptr": _int32(0, 2, 3),
    "indices": _int32(1, 0, 2),
    "last_page_len": _int32(3, 4),
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "page_size": 4,
    "q_data_type": torch.float16,
}


def _run_decode(plan: dict[str, Any] | None, run: dict[str, Any], **options: Any) -> None:
    wrapper = fake.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD", **{"backend": "fa2", **options})
    if plan is not None:
        wrapper.plan(**{**GOOD_PLAN, **plan})
    q = torch.zeros(2, 4, 64, dtype=torch.float16)
    cache = tuple(torch.zeros(3, 4, 2, 64, dtype=torch.float16) for _ in range(2))
    given = {"q": q, "paged_kv_cache": cache, "out": torch.empty_like(q), **run}
    wrapper.run(**given)


@pytest.mark.parametrize(
    ("plan", "run", "says"),
    [
        (None, {}, "run before plan"),
        ({"indptr": torch.tensor([0, 2, 3])}, {}, "indptr is torch.int64"),
        ({"indptr": _int32(0, 2)}, {}, "2 bounds of pages, 2 rows"),
        ({"indptr": _int32(0, 0, 3)}, {}, "rows have pages"),
        ({"indices": _int32(1, 0)}, {}, "2 pages, 3 by indptr"),
        ({"indices": _int32(1, 0, 3)}, {}, "a page that the pool has not"),
        ({"last_page_len": _int32(0, 4)}, {}, "last_page_len is from 1"),
        ({"last_page_len": _int32(5, 4)}, {}, "last_page_len is from 1"),
        ({"q_data_type": torch.float32}, {}, "q_data_type torch.float32"),
        ({"q_data_type": "float16"}, {}, "q_data_type float16"),
        ({"head_dim": 80}, {}, "head_dim 80"),
        ({"num_qo_heads": 3}, {}, "3 heads, 2"),
        ({"num_qo_heads": 10}, {}, "Unsupported group_size: 5"),
        ({"rope_theta": 1e4}, {}, "rope_theta is 10000"),
        ({"disable_split_kv": True}, {}, "disable_split_kv"),
        ({}, {"sinks": torch.zeros(4)}, "sinks"),
        ({}, {"q": torch.zeros(3, 4, 64, dtype=torch.float16)}, "q is (3, 4, 64)"),
        ({}, {"q": torch.zeros(2, 4, 64, dtype=torch.bfloat16)}, "q is torch.bfloat16"),
        ({}, {"out": None}, "without out"),
        ({}, {"out": torch.zeros(2, 8, 64, dtype=torch.float16)[:, ::2]}, "out has gaps"),
        ({}, {"paged_kv_cache": (torch.zeros(3, 8, 2, 64, dtype=torch.float16),) * 2}, "keys are (3, 8, 2, 64)"),
        ({}, {"paged_kv_cache": (torch.zeros(3, 4, 2, 64),) * 2}, "keys are torch.float32"),
    ],
)
def test_the_fake_refuses_what_flashinfer_would_not_compute_as_meant(
    plan: dict[str, Any] | None, run: dict[str, Any], says: str
) -> None:
    with pytest.raises(WrongCall) as caught:
        _run_decode(plan, run)
    assert says in str(caught.value)


def test_the_fake_takes_a_good_call() -> None:
    _run_decode({}, {})
