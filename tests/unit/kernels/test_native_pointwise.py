"""The kernels in C++ beside the torch references: odd sizes, gaps between vectors, values at the ends of the range, at
every level of instructions that this machine has.

In fp32 results differ by the order of sums and by the exponential's last bits. In bf16 and fp16 both sides round in the
same places, so what differs is one unit in the last place where a sum fell on the other side of a boundary.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fakes.attention_backends import native_levels, native_library
from minisgl_backend.kernels.interface import HeadPreparation, Kernels, Rotation
from minisgl_backend.kernels.native.kernels import NativeKernels, prepare_and_write
from minisgl_backend.kernels.paged_kv import write_kv
from minisgl_backend.kernels.torch_kernels import TORCH_KERNELS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = ((1, 1), (1, 576), (2, 15), (3, 16), (5, 17), (7, 97), (33, 576), (130, 2050))  # rows, numbers in each
EPS = 1e-5

SLOW_LEVELS = [pytest.param(level, marks=pytest.mark.slow) for level in native_levels()[1:]]  # each is compiled


@pytest.fixture(params=[*native_levels()[:1], *SLOW_LEVELS] or [""])
def native(request: pytest.FixtureRequest) -> NativeKernels:
    return NativeKernels(native_library(request.param))


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_alike(got: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    """Two units in the last place, in fp32 what the order of a sum may do; what is not finite in the same places."""
    assert got.dtype == expected.dtype
    relative = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}[got.dtype]
    torch.testing.assert_close(got, expected, rtol=relative, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_the_references_for_any_size_with_weights_of_either_dtype(
    native: NativeKernels, dtype: torch.dtype
) -> None:
    for rows, size in SIZES:
        x, added = numbers(rows, size, dtype=dtype), numbers(rows, size, dtype=dtype, seed=1)
        for weight in (numbers(size, dtype=dtype, seed=2), numbers(size, dtype=torch.float32, seed=2)):
            assert_alike(native.rms_norm(x, weight, EPS), TORCH_KERNELS.rms_norm(x, weight, EPS))
            total, normed = native.add_rms_norm(x, added, weight, EPS)
            expected_total, expected = TORCH_KERNELS.add_rms_norm(x, added, weight, EPS)
            assert torch.equal(total, expected_total)
            assert_alike(normed, expected)
        assert torch.equal(native.add(x, added), x + added)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_take_heads_out_of_a_wider_projection(native: NativeKernels, dtype: torch.dtype) -> None:
    heads = numbers(5, 6 * 40, dtype=dtype).view(5, 6, 40)[:, 1:4]
    weight = numbers(40, dtype=dtype, seed=1)
    assert not heads.is_contiguous()
    assert_alike(native.rms_norm(heads, weight, EPS), TORCH_KERNELS.rms_norm(heads, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activations_are_the_references_in_both_halves_of_one_projection(
    native: NativeKernels, activation: str, dtype: torch.dtype
) -> None:
    for rows, size in SIZES:
        gate, up = (4 * numbers(rows, 2 * size, dtype=dtype)).chunk(2, dim=-1)
        assert_alike(native.gated(activation)(gate, up), TORCH_KERNELS.gated(activation)(gate, up))


def test_activations_and_caps_in_fp32_are_near_those_in_fp64(native: NativeKernels) -> None:
    x = torch.linspace(-90, 90, 20_001).view(1, -1)
    one = torch.ones_like(x)
    wide = x.double()
    within = {"rtol": 1e-6, "atol": 4e-37}  # less is 0 in both: e^-x is beyond fp32 from x = -88.7 on
    silu = native.gated("silu")(x, one).double()
    torch.testing.assert_close(silu, wide / (1 + torch.exp(-wide)), **within)
    inner = 2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
    gelu = native.gated("gelu_tanh")(x, one).double()
    torch.testing.assert_close(gelu, wide / (1 + torch.exp(-inner)), rtol=2e-5, atol=4e-37)  # e^-90 of an fp32 argument
    torch.testing.assert_close(native.softcap(x, 30.0).double(), torch.tanh(wide / 30) * 30, **within)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_or_at_the_ends_of_the_range_comes_out_as_in_torch(
    native: NativeKernels, dtype: torch.dtype
) -> None:
    limits = torch.finfo(dtype)
    ends = [
        0.0,
        -0.0,
        limits.tiny,
        limits.smallest_normal / 8,
        limits.max,
        -limits.max,
        torch.inf,
        -torch.inf,
        torch.nan,
    ]
    x = torch.tensor(ends * 3, dtype=dtype).view(1, -1)
    one = torch.ones_like(x)
    assert_alike(native.gated("silu")(x, one), TORCH_KERNELS.gated("silu")(x, one))
    assert_alike(native.softcap(x, 50.0), TORCH_KERNELS.softcap(x, 50.0))
    assert torch.equal(native.add(x, one.neg()).nan_to_num(), (x - 1).nan_to_num())
    rows = x.view(-1, 1).expand(-1, 20).contiguous()  # each value in a row of its own
    assert_alike(native.rms_norm(rows, one[0, :20], EPS), TORCH_KERNELS.rms_norm(rows, one[0, :20], EPS))


def test_a_row_that_is_not_finite_changes_no_other_row(native: NativeKernels) -> None:
    x, weight = numbers(40, 97, dtype=torch.bfloat16), numbers(97, dtype=torch.bfloat16, seed=1)
    broken = x.clone()
    broken[7] = torch.nan
    sound = [row for row in range(40) if row != 7]
    assert torch.equal(native.rms_norm(broken, weight, EPS)[sound], native.rms_norm(x, weight, EPS)[sound])
    assert native.rms_norm(broken, weight, EPS)[7].isnan().all()


def preparation(kernels: Kernels, head_dim: int, pairs: int, dtype: torch.dtype, **ways: bool) -> HeadPreparation:
    """Of 11 tokens."""
    cos, sin = (numbers(11, 1, pairs, dtype=torch.float32, seed=seed) for seed in (5, 6))
    rotation = Rotation(cos, sin, ways["interleaved"]) if pairs else None
    norms = [numbers(head_dim, dtype=dtype, seed=seed) if ways["norms"] else None for seed in (7, 8)]
    return HeadPreparation(kernels, rotation, norms[0], norms[1], EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_are_prepared_as_in_the_reference_and_written_to_their_places_as_they_are(
    native: NativeKernels, interleaved: bool, norms: bool, dtype: torch.dtype
) -> None:
    for head_dim, pairs in ((64, 32), (64, 16), (80, 40), (96, 23), (128, 64), (256, 128), (64, 0)):
        qkv = numbers(11, (6 + 2 * 2) * head_dim, dtype=dtype).view(11, 10, head_dim)
        q, k, v = qkv.split([6, 2, 2], dim=1)
        ours, reference = (
            preparation(kernels, head_dim, pairs, dtype, interleaved=interleaved, norms=norms)
            for kernels in (native, TORCH_KERNELS)
        )
        for got, expected in zip(ours(q, k), reference(q, k), strict=True):
            # A norm's last bit is rotated into numbers that may be far smaller.
            assert_alike(got, expected, atol=4 * torch.finfo(dtype).eps if norms else 1e-5)

        pages, expected_pages = ([torch.zeros(4, 8, 2, head_dim, dtype=dtype) for _ in range(2)] for _ in range(2))
        places = torch.tensor([31, 0, 2, 3, 4, 9, 8, 17, 16, 15, 20])
        q_out, k_out = ours(q, k)
        write_kv(expected_pages[0], expected_pages[1], k_out, v, places)
        written = prepare_and_write(native.library.ops, q, k, v, ours, (pages[0], pages[1]), places)
        assert torch.equal(written, q_out)
        assert torch.equal(pages[0], expected_pages[0]) and torch.equal(pages[1], expected_pages[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rows_are_taken_in_any_order_and_as_often_as_asked(
    native: NativeKernels, index_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    table = numbers(50, 37, dtype=dtype)
    for index in ([], [49], [3, 3, 0, 49] * 40):
        rows = torch.tensor(index, dtype=index_dtype)
        assert torch.equal(native.take_rows(table, rows), table[rows])
        assert_alike(native.take_rows(table, rows, 3.3), table[rows] * 3.3)


@pytest.mark.parametrize("row", [-1, 50])
def test_a_row_that_the_table_does_not_have_is_refused(native: NativeKernels, row: int) -> None:
    with pytest.raises(IndexError, match=f"row {row} of 50"):
        native.take_rows(torch.zeros(50, 3), torch.tensor([0, row]))


def test_what_no_kernel_is_built_for_is_refused_by_name(native: NativeKernels) -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(RuntimeError, match="rms_norm: dtype Double"):
        native.rms_norm(x.double(), torch.ones(4, dtype=torch.float64), EPS)
    with pytest.raises(RuntimeError, match=r"rms_norm: weight\[3\] for vectors of 4"):
        native.rms_norm(x, torch.ones(3), EPS)
    with pytest.raises(RuntimeError, match="silu_mul: gaps in the last dimension"):
        native.gated("silu")(x.T, x.T)
    with pytest.raises(RuntimeError, match="add: Float"):
        native.add(x, x[:1])
    with pytest.raises(RuntimeError, match="rotate: head_dim 2048; up to 1024 is built"):
        heads = torch.zeros(1, 1, 2048)
        HeadPreparation(native, None)(heads, heads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_best_of_a_row_is_the_first_of_the_largest_wherever_it_stands(
    native: NativeKernels, dtype: torch.dtype
) -> None:
    """Numbers are coarse, so that many are equal. Sizes around a register and around a block; rows lie apart."""
    for size in (1, 2, 7, 8, 15, 16, 17, 1000, 1024, 1025, 1039, 2050, 49_153):
        rows = (numbers(6, size + 3, dtype=torch.float32, seed=size) * 2).round().to(dtype)[:, :size]
        rows[1] = -torch.inf
        rows[2, ::2] = -torch.inf
        best, places = native.library.ops.best_of_rows.default(rows)
        expected = rows.max(dim=-1)
        assert torch.equal(best, expected.values.float()) and torch.equal(places, expected.indices), size


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_finite_has_no_finite_best(native: NativeKernels, dtype: torch.dtype) -> None:
    for size in (3, 40, 3001):
        rows = numbers(4, size, dtype=dtype)
        rows[0, size - 1], rows[1, size // 2], rows[2] = torch.nan, torch.inf, -torch.inf
        best, _ = native.library.ops.best_of_rows.default(rows)
        assert best.isfinite().tolist() == [False, False, False, True]
        assert best[3] == rows[3].max()
