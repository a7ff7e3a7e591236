"""Steps of a whole model on FlashInfer's phases: chunks and decode rows, recorded or not, rows that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from fakes import flashinfer as fake
from fakes.emulated_graph import EmulatedRecorder
from fakes.forward import load
from fakes.phased_attention import PhasedAttention
from fakes.random_model import write_random_llama
from minisgl_backend.attention.flashinfer_phases import FlashInferPhases
from minisgl_backend.attention.interface import AttentionBackend, StepRows
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.device.streams import HostStreams
from minisgl_backend.kernels.gpu.flashinfer import FlashInfer
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool
from minisgl_backend.models.model import Model
from minisgl_backend.worker.decode_graphs import DecodeGraphs
from minisgl_backend.worker.torch_runner import attention_variants

PAGE, TABLE = 4, 6
FLASHINFER = FlashInfer("fake", fake.BatchPrefillWithPagedKVCacheWrapper, fake.BatchDecodeWithPagedKVCacheWrapper)


@dataclass(frozen=True)
class Row:
    """What a row of a step computes: tokens from `start` on, in the pages of its sequence."""

    start: int
    tokens: list[int]
    pages: list[int]


def script() -> list[list[Row]]:
    """Prompts, one in chunks beside decode rows; then four, three and two sequences decode, in pages of any order."""
    pages = [[5, 0, 9], [3, 11, 7], [8, 1, 2], [10, 4, 6]]
    steps = [
        [Row(0, [7, 8, 9], pages[0]), Row(0, [5], pages[1])],
        [Row(3, [11], pages[0]), Row(0, [21, 22, 23, 24, 25], pages[2]), Row(1, [12], pages[1]), Row(0, [9], pages[3])],
        [Row(5, [26, 27], pages[2]), Row(4, [13], pages[0])],
    ]
    lengths = [5, 2, 7, 1]
    for step, rows in enumerate([4, 4, 3, 3, 2, 1, 3]):
        decoding = [Row(lengths[row], [40 + step + row], pages[row]) for row in range(rows)]
        lengths = [length + (row < rows) for row, length in enumerate(lengths)]
        steps.append(decoding)
    return steps


class Machine:
    """A model on FlashInfer's phases, and on torch's attention over a pool of its own."""

    def __init__(self, model: Model) -> None:
        spec = model.spec
        variants = attention_variants(spec)
        shape = KvShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, torch.float16)
        pools = [PagedKvPool(shape, 12, PAGE, torch.device("cpu")) for _ in range(2)]
        phases = FlashInferPhases(pools[0], variants, spec.num_heads, FLASHINFER, HostStreams().mark)
        self.model = model
        self.flashinfer = PhasedAttention(pools[0], phases.chunks, phases.decode)
        self.torch = TorchAttention(pools[1], variants)
        self.recorder = EmulatedRecorder()
        self.graphs = DecodeGraphs(
            model,
            self.flashinfer,
            self.recorder,
            sizes=(1, 2, 4),
            at_start=(1, 2, 4),
            table_pages=TABLE,
            scratch_page=pools[0].scratch_page,
            device=torch.device("cpu"),
        )
        self.graphs.warm_up()

    def logits(self, step: list[Row], attention: AttentionBackend | None) -> Tensor:
        """None: replayed, where the step has decode rows alone."""
        starts, lengths = (np.array(x) for x in ([row.start for row in step], [len(row.tokens) for row in step]))
        tokens = torch.tensor([token for row in step for token in row.tokens])
        positions = torch.cat([torch.arange(row.start, row.start + len(row.tokens)) for row in step])
        tables = torch.tensor([row.pages for row in step])
        if attention is None and len(tokens) == len(step):
            replayed = self.graphs.logits(tokens, positions, tables, starts)
            assert replayed is not None
            return replayed.clone()
        attention = attention or self.flashinfer
        ends = torch.from_numpy(np.cumsum(lengths) - 1)
        return self.model.forward(tokens, positions, attention.begin(StepRows(starts, lengths, tables)), ends)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[(4, 2), (5, 1)], ids=["CUDA cores", "tensor cores"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Model:
    heads, kv_heads = request.param
    folder = write_random_llama(
        tmp_path_factory.mktemp("random"),
        head_dim=64,
        hidden_size=64,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )
    return load(folder, torch.float16)


@torch.inference_mode()
def test_a_model_on_flashinfer_recorded_or_not_gives_the_logits_of_torchs_attention(model: Model) -> None:
    recorded, plain = Machine(model), Machine(model)
    replays = 0
    for step in script():
        expected = plain.logits(step, plain.torch)
        eager, replayed = plain.logits(step, plain.flashinfer), recorded.logits(step, None)
        torch.testing.assert_close(eager.float(), expected.float(), atol=0.02 * float(expected.std()), rtol=0)
        torch.testing.assert_close(replayed.float(), eager.float(), atol=0.01 * float(expected.std()), rtol=0)
        replays += len(step) == sum(len(row.tokens) for row in step)
    assert sum(graph.replays for graph in recorded.recorder.graphs) >= replays > 5


@torch.inference_mode()
def test_a_recording_that_is_not_planned_anew_loses_its_rows(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above would hold whatever `refresh` does."""
    recorded, plain = Machine(model), Machine(model)
    monkeypatch.setattr("minisgl_backend.attention.flashinfer_phases.RecordedFlashInfer.refresh", lambda *given: None)
    worst = 0.0
    for step in script():
        eager, replayed = plain.logits(step, plain.flashinfer), recorded.logits(step, None)
        worst = max(worst, float((replayed - eager).abs().max() / eager.std()))
    assert worst > 0.2
