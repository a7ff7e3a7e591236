"""The Triton kernels between the products beside the torch references: odd sizes, gaps between vectors, values at the
ends of the range.

In fp32 and fp16: the interpreter cuts bf16 off instead of rounding it. In fp16 both sides round in the same places, so
what differs is one unit in the last place where a sum fell on the other side of a boundary.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minisgl_backend.kernels.gpu.heads import prepare_and_write
from minisgl_backend.kernels.gpu.kernels import TritonKernels
from minisgl_backend.kernels.interface import HeadPreparation, Rotation
from minisgl_backend.kernels.paged_kv import write_kv
from minisgl_backend.kernels.torch_kernels import TORCH_KERNELS

GPU = TritonKernels()
EPS = 1e-5
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
SIZES = ((1, 1), (2, 15), (3, 16), (7, 97), (5, 576), (2, 2050))  # rows, numbers in each

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, below the interpreter: exp overflows


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_alike(got: Tensor, expected: Tensor) -> None:
    """Two units in the last place, in fp32 what the order of a sum may do; what is not finite in the same places."""
    assert got.dtype == expected.dtype
    relative = {torch.float32: 1e-5, torch.float16: 2.0**-9}[got.dtype]
    torch.testing.assert_close(got, expected, rtol=relative, atol=1e-5, equal_nan=True)


@DTYPES
def test_norms_are_the_references_for_any_size_with_weights_of_either_dtype(dtype: torch.dtype) -> None:
    for rows, size in SIZES:
        x, added = numbers(rows, size, dtype=dtype), numbers(rows, size, dtype=dtype, seed=1)
        for weight in (numbers(size, dtype=dtype, seed=2), numbers(size, dtype=torch.float32, seed=2)):
            assert_alike(GPU.rms_norm(x, weight, EPS), TORCH_KERNELS.rms_norm(x, weight, EPS))
            total, normed = GPU.add_rms_norm(x, added, weight, EPS)
            expected_total, expected = TORCH_KERNELS.add_rms_norm(x, added, weight, EPS)
            assert torch.equal(total, expected_total)
            assert_alike(normed, expected)


@DTYPES
def test_norms_take_heads_and_rows_out_of_a_wider_projection(dtype: torch.dtype) -> None:
    heads = numbers(5, 6 * 40, dtype=dtype).view(5, 6, 40)[:, 1:4]
    assert not heads.is_contiguous()
    for x in (heads, heads[:, 0]):
        weight = numbers(40, dtype=dtype, seed=1)
        assert_alike(GPU.rms_norm(x, weight, EPS), TORCH_KERNELS.rms_norm(x, weight, EPS))


def test_a_vector_that_registers_can_not_hold_is_refused() -> None:
    x = torch.zeros(1, 65_537)
    with pytest.raises(ValueError, match="65,537 numbers, and kernels of a GPU take at most 65,536"):
        GPU.rms_norm(x, x[0], EPS)


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activations_are_the_references_in_both_halves_of_one_projection(
    activation: str, dtype: torch.dtype
) -> None:
    for rows, size in SIZES:
        gate, up = (4 * numbers(rows, 2 * size, dtype=dtype)).chunk(2, dim=-1)
        assert_alike(GPU.gated(activation)(gate, up), TORCH_KERNELS.gated(activation)(gate, up))


def test_activations_and_caps_in_fp32_are_near_those_in_fp64() -> None:
    x = torch.cat((torch.linspace(-90, 90, 4001), torch.logspace(-8, 0, 500))).view(1, -1)
    one, wide = torch.ones_like(x), x.double()
    within = {"rtol": 2e-6, "atol": 4e-37}  # less is 0 in both: e^-x is beyond fp32 from x = -88.7 on
    silu = GPU.gated("silu")(x, one).double()
    torch.testing.assert_close(silu, wide / (1 + torch.exp(-wide)), **within)
    inner = 2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
    gelu = GPU.gated("gelu_tanh")(x, one).double()
    torch.testing.assert_close(gelu, wide / (1 + torch.exp(-inner)), rtol=2e-5, atol=4e-37)  # e^-90 of an fp32 argument
    torch.testing.assert_close(GPU.softcap(x, 30.0).double(), torch.tanh(wide / 30) * 30, **within)


@DTYPES
def test_what_is_not_finite_or_at_the_ends_of_the_range_comes_out_as_in_torch(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    ends = [0.0, -0.0, limits.tiny, limits.smallest_normal / 8, limits.max, -limits.max]
    x = torch.tensor([*ends, torch.inf, -torch.inf, torch.nan] * 3, dtype=dtype).view(1, -1)
    one = torch.ones_like(x)
    for activation in ("silu", "gelu_tanh"):
        assert_alike(GPU.gated(activation)(x, one), TORCH_KERNELS.gated(activation)(x, one))
    assert_alike(GPU.softcap(x, 50.0), TORCH_KERNELS.softcap(x, 50.0))
    rows = x.view(-1, 1).expand(-1, 20).contiguous()  # each value in a row of its own
    assert_alike(GPU.rms_norm(rows, one[0, :20], EPS), TORCH_KERNELS.rms_norm(rows, one[0, :20], EPS))


@DTYPES
def test_rows_of_a_table_are_taken_in_any_order_and_scaled(dtype: torch.dtype) -> None:
    for rows, size in SIZES:
        table = numbers(rows, size + 3, dtype=dtype)[:, :size]
        index = torch.randint(rows, (11,), generator=torch.Generator().manual_seed(rows))
        assert torch.equal(GPU.take_rows(table, index.int()), table[index])
        assert torch.equal(GPU.take_rows(table, index, 2.75), TORCH_KERNELS.take_rows(table, index, 2.75))
    assert GPU.take_rows(table, index[:0]).shape == (0, 2050)


def test_a_row_that_is_not_there_comes_out_as_nan() -> None:
    table = torch.ones(4, 5)
    got = GPU.take_rows(table, torch.tensor([3, 4, -1, 2**40, 0]))
    assert got.isnan().all(dim=1).tolist() == [False, True, True, True, False]


def preparation(head_dim: int, rotary_dim: int, *, norms: torch.dtype | None, interleaved: bool) -> HeadPreparation:
    """For five tokens. rotary_dim 0: no rotation; norms: the dtype of their weights."""
    angles = torch.rand(5, 1, rotary_dim // 2, generator=torch.Generator().manual_seed(4)) * 100
    rotation = Rotation(angles.cos() * 1.25, angles.sin() * 1.25, interleaved) if rotary_dim else None
    weights = (None, None) if norms is None else (numbers(head_dim, dtype=norms, seed=seed) for seed in (5, 6))
    return HeadPreparation(GPU, rotation, *weights, EPS)


@DTYPES
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "interleaved"),
    [(24, 24, False), (24, 24, True), (40, 24, False), (40, 24, True), (64, 64, False), (20, 0, False)],
)
def test_heads_are_prepared_as_by_the_reference_and_written_in_the_same_launch(
    head_dim: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype
) -> None:
    """Heads out of one projection; places in any order, and two of padding tokens alike."""
    projected = numbers(5, (6 + 2 + 2) * head_dim + 1, dtype=dtype)[:, 1:].view(5, 10, head_dim)
    q, k, v = projected.split([6, 2, 2], dim=1)
    places = torch.tensor([13, 0, 7, 2, 2])
    for norms in (None, dtype, torch.float32):
        chosen = preparation(head_dim, rotary_dim, norms=norms, interleaved=interleaved)
        expected = TORCH_KERNELS.prepare_heads(q, k, chosen)
        for got, reference in zip(GPU.prepare_heads(q, k, chosen), expected, strict=True):
            assert_alike(got, reference)
        k_pages, v_pages = (torch.full((5, 3, 2, head_dim), 77.0, dtype=dtype) for _ in range(2))
        got = prepare_and_write(q, k, v, chosen, k_pages, v_pages, places)
        assert_alike(got, expected[0])
        expected_pages = [torch.full((5, 3, 2, head_dim), 77.0, dtype=dtype) for _ in range(2)]
        write_kv(*expected_pages, expected[1], v, places)
        for pages, reference in zip((k_pages, v_pages), expected_pages, strict=True):
            pages[0, 2], reference[0, 2] = 0.0, 0.0  # place 2: of two tokens, nobody knows whose stays
            assert_alike(pages, reference)


def test_without_a_preparation_queries_stay_and_keys_are_written_as_they_are() -> None:
    q, k, v = (numbers(3, heads, 16, dtype=torch.float16, seed=heads) for heads in (4, 2, 1))
    v = v.expand(3, 2, 16)
    k[1, 0, 3], v = torch.nan, v.clone()
    v[2, 1, 5] = torch.inf
    k_pages, v_pages = (torch.zeros(2, 4, 2, 16, dtype=torch.float16) for _ in range(2))
    places = torch.tensor([6, 1, 4], dtype=torch.int32)
    assert prepare_and_write(q, k, v, None, k_pages, v_pages, places) is q
    for pages, written in ((k_pages, k), (v_pages, v)):
        assert torch.equal(pages.flatten(0, 1)[places].nan_to_num(), written.nan_to_num())
        assert int((pages != 0).any(-1).sum()) == 6


def test_a_token_that_is_not_finite_changes_no_other() -> None:
    q, k, v = (numbers(5, 2, 16, dtype=torch.float32, seed=seed) for seed in range(3))
    chosen = preparation(16, 16, norms=torch.float32, interleaved=False)
    sound = GPU.prepare_heads(q, k, chosen)
    for x in (q, k, v):
        x[2] = torch.nan
    broken = GPU.prepare_heads(q, k, chosen)
    rest = [0, 1, 3, 4]
    for got, expected in zip(broken, sound, strict=True):
        assert torch.equal(got[rest], expected[rest]) and got[2].isnan().all()


def test_a_step_without_tokens_is_nothing() -> None:
    none = torch.empty(0, 2, 16)
    pages = torch.zeros(1, 4, 2, 16)
    assert prepare_and_write(none, none, none, None, pages, pages, torch.empty(0, dtype=torch.int64)) is none
    assert GPU.rms_norm(none, torch.ones(16), EPS).shape == (0, 2, 16)
    assert GPU.gated("silu")(none[:, 0], none[:, 0]).shape == (0, 16)
