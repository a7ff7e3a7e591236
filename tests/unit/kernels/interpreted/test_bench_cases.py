"""What load/bench/kernels_gpu times beside our kernels: on a GPU it is captured in a graph, where nobody may wait."""

from __future__ import annotations

import pytest
import torch

from fakes.emulated_graph import EmulatedRecorder
from load.bench.kernels_gpu_cases import Case, all_cases
from minisgl_backend.device.graph import NotRecordable


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    with torch.inference_mode():
        return {maker.name: maker.make() for maker in all_cases(torch.device("cpu"), torch.float16)}


@torch.inference_mode()
def test_torchs_ways_can_be_recorded_where_nothing_else_is_said(cases: dict[str, Case]) -> None:
    recorded = [name for name, case in cases.items() if case.peer is not None and not case.peer_waits]
    for name in recorded:
        peer = cases[name].peer
        assert peer is not None
        EmulatedRecorder()(peer)  # type: ignore[arg-type]
    assert len(recorded) >= 6


@torch.inference_mode()
def test_torchs_draw_waits_and_is_timed_call_by_call(cases: dict[str, Case]) -> None:
    draws = [case for name, case in cases.items() if "top_p" in name]
    assert len(draws) == 2
    for case in draws:
        assert case.peer is not None and case.peer_waits
        with pytest.raises(NotRecordable):
            EmulatedRecorder()(case.peer)  # type: ignore[arg-type]
