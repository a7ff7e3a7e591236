"""Recordings of native calls: a replay does what the calls did, over the same memory, and nothing is left out."""

from __future__ import annotations

import gc
import resource
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from fakes.attention_backends import native_library, printed_by
from minisgl_backend.device.graph import NotRecordable
from minisgl_backend.kernels.native.kernels import NativeKernels
from minisgl_backend.kernels.native.recording import Recording, record

EPS = 1e-5


@pytest.fixture
def kernels() -> NativeKernels:
    return NativeKernels(native_library())


def small_model(kernels: NativeKernels, table: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """Several calls that feed one another, through views, and let go of what they have used."""
    x, added = kernels.take_rows(table, index), kernels.take_rows(table, index, 0.5)
    for _ in range(20):
        x, normed = kernels.add_rms_norm(x, added, weight, EPS)
        added = kernels.gated("silu")(normed, kernels.rms_norm(x.view(-1, 2, 48), weight[48:], EPS).flatten(1))
    return kernels.softcap(kernels.add(x, added), 30.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 33, 200])
def test_a_replay_gives_exactly_what_the_calls_give(kernels: NativeKernels, rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    table = torch.randn(500, 96, generator=generator).to(dtype)
    weight = torch.randn(96, generator=generator).to(dtype)
    index = torch.randint(500, (rows,), generator=generator)
    with torch.inference_mode():
        recording, out = record(kernels.library, lambda: small_model(kernels, table, index, weight))
        assert torch.equal(out, small_model(kernels, table, index, weight))
        for _ in range(5):
            index.copy_(torch.randint(500, (rows,), generator=generator))
            recording.replay()
            assert torch.equal(out, small_model(kernels, table, index, weight))
    recording.close()


def test_a_replay_is_the_same_on_any_number_of_threads(kernels: NativeKernels) -> None:
    table, weight, index = torch.randn(300, 96), torch.randn(96), torch.arange(200)
    recording, out = record(kernels.library, lambda: small_model(kernels, table, index, weight))
    expected, threads = out.clone(), torch.get_num_threads()
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            out.zero_()
            recording.replay()
            assert torch.equal(out, expected), f"{count} threads"
    finally:
        torch.set_num_threads(threads)
        recording.close()


def test_what_was_let_go_of_while_recording_is_used_again_in_it_and_by_nobody_else(kernels: NativeKernels) -> None:
    x = torch.randn(64, 64)
    recording = Recording(kernels.library)
    with recording:
        first = kernels.add(x, x).data_ptr()
        again = kernels.add(x, x).data_ptr()
        kept = kernels.add(x, x)
    assert first == again == kept.data_ptr()
    del kept
    assert all(kernels.add(x, x).data_ptr() != first for _ in range(50)), "a replay writes there"
    recording.close()


def test_what_calls_were_given_is_held_until_the_recording_is_closed(kernels: NativeKernels) -> None:
    def work() -> Tensor:
        one = torch.empty(8, 8)
        one.data.numpy()[:] = 1.0
        return kernels.add(one, given.pop())

    given = [torch.full((8, 8), 2.0)]
    recording, out = record(kernels.library, work)
    gc.collect()
    others = [torch.full((8, 8), 9.0) for _ in range(100)]  # what is freed would be theirs
    out.zero_()
    recording.replay()
    assert torch.equal(out, torch.full((8, 8), 3.0)) and others
    recording.close()


def test_outputs_outlive_their_recording(kernels: NativeKernels) -> None:
    x = torch.randn(16, 16)
    recording, out = record(kernels.library, lambda: kernels.add(x, x))
    recording.close()
    recording.close()
    del recording
    gc.collect()
    assert torch.equal(out, x + x)


def test_what_torch_computes_in_between_can_not_be_recorded_and_is_named(kernels: NativeKernels) -> None:
    x = torch.randn(4, 4)
    with pytest.raises(NotRecordable, match=r"aten\.relu\.default"):
        record(kernels.library, lambda: kernels.add(x, x).relu())
    with pytest.raises(NotRecordable, match=r"aten\.(clone|_to_copy|copy_)"):
        record(kernels.library, lambda: kernels.add(x, x).T.contiguous())
    with torch.inference_mode():  # where torch shows its compound operators whole
        with pytest.raises(NotRecordable, match=r"aten\.item\.default"):
            record(kernels.library, lambda: kernels.add(x, x)[0, 0].item())
        with pytest.raises(NotRecordable, match=r"aten\.reshape\.default"):
            record(kernels.library, lambda: kernels.add(x, x).T.reshape(16))
    with pytest.raises(NotRecordable, match="add_"):
        record(kernels.library, lambda: kernels.add(x, x).add_(1))


def test_a_recording_that_failed_leaves_the_thread_free_to_record(kernels: NativeKernels) -> None:
    x = torch.randn(4, 4)
    with pytest.raises(NotRecordable):
        record(kernels.library, lambda: x.relu())
    with pytest.raises(RuntimeError, match="add: Float"):
        record(kernels.library, lambda: kernels.add(x, x[:1]))
    recording, out = record(kernels.library, lambda: kernels.add(x, x))
    assert recording.calls == 1 and torch.equal(out, x + x)
    recording.close()


def test_views_and_empty_tensors_are_no_calls(kernels: NativeKernels) -> None:
    x = torch.randn(4, 6)

    def work() -> Tensor:
        left, right = x.split([3, 3], dim=-1)
        torch.empty_like(x).contiguous()
        return kernels.rms_norm(left.view(4, 1, 3).transpose(0, 1)[0], right[0], EPS).unsqueeze(0).flatten(0, 1)

    recording, _ = record(kernels.library, work)
    assert recording.calls == 1
    recording.close()


def test_threads_record_apart_from_one_another(kernels: NativeKernels) -> None:
    meet = threading.Barrier(2)

    def work(x: Tensor) -> Tensor:
        meet.wait(30)
        out = kernels.add(x, x)
        meet.wait(30)
        return out

    inputs = [torch.randn(8, 8), torch.randn(8, 8)]
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda x: record(kernels.library, lambda: work(x)), inputs))
    for x, (recording, out) in zip(inputs, made, strict=True):
        assert recording.calls == 1
        x.add_(1)
        recording.replay()
        assert torch.equal(out, x + x)
        recording.close()


def test_a_second_recording_of_a_thread_is_refused(kernels: NativeKernels) -> None:
    with Recording(kernels.library), pytest.raises(AssertionError, match="records already"):
        Recording(kernels.library).__enter__()


@pytest.mark.slow
def test_recording_does_not_import_torchs_compiler() -> None:
    """It would take 66 MiB of every engine."""
    script = (
        "import sys, torch\n"
        "from fakes.attention_backends import native_library\n"
        "from minisgl_backend.kernels.native.recording import record\n"
        "library, x = native_library(), torch.ones(4, 4)\n"
        "recording, _ = record(library, lambda: library.ops.add.default(x, x).view(16))\n"
        "print(recording.calls, 'torch._dynamo' in sys.modules)\n"
    )
    assert printed_by(script) == "1 False"


def test_a_large_output_takes_the_memory_of_one_before_and_no_new_pages(kernels: NativeKernels) -> None:
    x = torch.randn(1024, 1024)
    for _ in range(3):
        kernels.add(x, x)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        kernels.add(x, x)
        torch.empty(
            64 << 20, dtype=torch.uint8
        )  # a block taken and given back, after which the system takes others too
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    assert faults < x.nbytes // resource.getpagesize()  # of ten outputs: less than one has pages
