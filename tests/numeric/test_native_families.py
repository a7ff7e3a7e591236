"""Every family by the kernels in C++: its logits beside those of transformers and of torch's kernels, and recorded
decode steps beside the same steps run call by call, bit for bit.

The cases are in tests/fakes/family_cases.py. Where models are in fp32 only the order of sums differs. In bf16 each is
rounded in its own way: ours must be about as near to the same weights in fp32 as transformers' own bf16 is. Greedy
answers of the engine with these kernels beside transformers' are in test_families.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fakes.attention_backends import native_library
from fakes.family_cases import FAMILY_CASES, WINDOW
from fakes.forward import load, logits_of
from minisgl_backend.attention.interface import AttentionBackend
from minisgl_backend.attention.native_backend import NativeAttention, native_obstacle
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.device.graph import NotRecordable
from minisgl_backend.kernels.native.kernels import NativeKernels
from minisgl_backend.kernels.native.library import Library
from minisgl_backend.kernels.native.recording import record
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.load import LoadKernels, Packing
from minisgl_backend.worker.torch_runner import attention_variants

LENGTH = 110
CUTS = ([LENGTH], [WINDOW - 1, 1, WINDOW + 1, LENGTH - 2 * WINDOW - 1], [LENGTH - 4, 1, 1, 1, 1])
PAGE = 3
ROWS, STEPS = 5, 40  # of decode
TOLERANCE = 1e-4  # of logits in fp32
BF16_RATIO = 1.5  # of our distance from fp32, in the median token, to transformers'


@pytest.fixture(scope="module")
def library() -> Library:
    return native_library()


@pytest.fixture(scope="module", params=FAMILY_CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILY_CASES[request.param].write(tmp_path_factory.mktemp(request.param))


def native_model(folder: Path, library: Library, cache: Path, dtype: torch.dtype) -> Decoder:
    packing = Packing(library.ops.linear.default, cache, lambda line: None)
    model = load(folder, dtype, kernels=LoadKernels(NativeKernels(library), packing))
    assert isinstance(model, Decoder)
    return model


def pool_of(model: Decoder, num_pages: int, dtype: torch.dtype) -> PagedKvPool:
    spec = model.spec
    shape = KvShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype)
    return PagedKvPool(shape, num_pages, PAGE, torch.device("cpu"))


def by_transformers(folder: Path, tokens: list[int], dtype: torch.dtype, weights: torch.dtype) -> torch.Tensor:
    """[tokens, vocab] in fp32, computed in `dtype` with weights that were rounded to `weights`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=weights, attn_implementation="eager").to(dtype)
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def native_backend(model: Decoder, library: Library, dtype: torch.dtype) -> Callable[..., AttentionBackend]:
    """torch's for heads that native attention does not serve, as the engine has it."""
    if native_obstacle(pool_of(model, 1, dtype)):
        return TorchAttention
    return lambda pool, variants: NativeAttention(pool, variants, library)


def test_logits_equal_transformers_and_those_of_torchs_kernels_for_every_cut_of_a_sequence(
    folder: Path, library: Library, tmp_path: Path
) -> None:
    model = native_model(folder, library, tmp_path, torch.float32)
    tokens = torch.randint(0, 320, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = [
        by_transformers(folder, tokens, torch.float32, torch.float32),
        logits_of(load(folder), tokens, [LENGTH], PAGE, torch.float32),
    ]
    for cut in CUTS:
        for backend in {TorchAttention, native_backend(model, library, torch.float32)}:
            got = logits_of(model, tokens, cut, PAGE, torch.float32, backend)
            for one in expected:
                torch.testing.assert_close(got, one, atol=TOLERANCE, rtol=0)


def test_bf16_logits_are_about_as_near_to_fp32_as_those_of_transformers(
    folder: Path, library: Library, tmp_path: Path
) -> None:
    """Both from weights rounded to bf16. The median token: where experts are chosen, rounding may choose another."""
    tokens = torch.randint(0, 320, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    exact = by_transformers(folder, tokens, torch.float32, torch.bfloat16)

    def distance(logits: torch.Tensor) -> float:
        return (logits.float() - exact).square().mean(1).sqrt().median().item()

    theirs = distance(by_transformers(folder, tokens, torch.bfloat16, torch.bfloat16))
    model = native_model(folder, library, tmp_path, torch.bfloat16)
    backend = native_backend(model, library, torch.bfloat16)
    for cut in CUTS:
        ours = distance(logits_of(model, tokens, cut, PAGE, torch.bfloat16, backend))
        assert 0 < ours <= BF16_RATIO * theirs, f"{cut}: {ours:.4f} from fp32, transformers {theirs:.4f}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_replayed_decode_steps_equal_steps_run_call_by_call(
    folder: Path, library: Library, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Positions grow by one and tokens change; rows are at different lengths, within pages and at their edges."""
    model = native_model(folder, library, tmp_path, dtype)
    pools = [pool_of(model, ROWS * 30, dtype) for _ in range(2)]
    generator = torch.Generator().manual_seed(2)
    for layer in range(model.spec.num_layers):
        for recorded, eager in zip(*(pool.layer(layer) for pool in pools), strict=True):
            recorded.normal_(generator=generator)
            eager.copy_(recorded)
    if native_obstacle(pools[0]):
        pytest.skip("a head_dim that native attention does not serve")
    backends = [NativeAttention(pool, attention_variants(model.spec), library) for pool in pools]
    tables = torch.randperm(ROWS * 30, generator=generator).view(ROWS, 30)
    tokens, every = torch.zeros(ROWS, dtype=torch.int64), torch.arange(ROWS)
    positions = torch.tensor([0, 1, PAGE - 1, WINDOW, 2 * PAGE])
    recorded_step, eager_step = (backend.decode_step(positions, tables) for backend in backends)

    def forward() -> torch.Tensor:
        return model.forward(tokens, positions, recorded_step.begin(), every)

    if model.spec.moe is not None:
        with pytest.raises(NotRecordable, match="is no native call"):
            record(library, forward)
        return
    recording, logits = record(library, forward)
    assert torch.equal(logits, model.forward(tokens, positions, eager_step.begin(), every))
    for _ in range(STEPS):
        tokens.copy_(torch.randint(0, 320, (ROWS,), generator=generator))
        positions.add_(1)
        recording.replay()
        assert torch.equal(logits, model.forward(tokens, positions, eager_step.begin(), every))
    for layer in range(model.spec.num_layers):
        for recorded, eager in zip(*(pool.layer(layer) for pool in pools), strict=True):
            assert torch.equal(recorded, eager)
    recording.close()
