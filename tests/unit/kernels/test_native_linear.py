"""The native product over packed weights, at every level of instructions that this machine has, beside torch's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fakes.attention_backends import native_levels, native_library
from minisgl_backend.kernels.native.library import Library
from minisgl_backend.kernels.native.packed import PACKED_DTYPES, pack, packed_shape, unpack
from minisgl_backend.layers.linear import NativeLinear

ROWS = (1, 2, 3, 4, 5, 7, 12, 13, 16, 17, 31, 32, 33, 48, 49, 70)
DEPTHS = (1, 16, 31, 33, 70)
OUTPUTS = (1, 16, 17, 33, 100)

pytestmark = pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)


@pytest.fixture(scope="module", params=native_levels())
def library(request: pytest.FixtureRequest) -> Library:
    return native_library(request.param)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def packed(weight: Tensor) -> Tensor:
    into = torch.full(packed_shape(*weight.shape, weight.dtype), torch.nan, dtype=weight.dtype)
    pack(weight, into)
    return into


def product(library: Library, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
    return NativeLinear(library.ops.linear, packed(weight), len(weight), bias)


def assert_near(linear: NativeLinear, x: Tensor, weight: Tensor, bias: Tensor | None, rows: tuple[int, ...]) -> None:
    """Of so many rows of x: within the rounding of a sum in fp32, whose terms may be far larger than itself, and of the
    result.
    """
    wide = None if bias is None else bias.double()
    exact = F.linear(x.double(), weight.double(), wide)
    terms = F.linear(x.double().abs(), weight.double().abs(), None if wide is None else wide.abs())
    most = terms * x.shape[1] ** 0.5 * 2**-22 + exact.abs() * (2**-8 if x.dtype == torch.bfloat16 else 2**-22)
    for count in rows:
        got = linear(x[:count])
        assert got.dtype == x.dtype and got.shape == exact[:count].shape
        off = (got.double() - exact[:count]).abs() - most[:count]
        assert (off <= 0).all(), f"{count} rows: {off.max()} beyond the bound"


def test_a_packed_weight_comes_back_as_it_was(dtype: torch.dtype) -> None:
    for outputs, depth in itertools.product((*OUTPUTS, 1100), DEPTHS):
        weight = drawn(outputs, depth, dtype=dtype)
        assert torch.equal(unpack(packed(weight), outputs, depth), weight)
        assert not packed(weight).isnan().any(), "the padding is zeros"


def test_products_of_odd_shapes_agree_with_torch(library: Library, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)  # thousands of small products: on a busy machine threads would wait for one another
    for depth, outputs in itertools.product(DEPTHS, OUTPUTS):
        weight, bias, x = (drawn(*shape, dtype=dtype) for shape in ((outputs, depth), (outputs,), (ROWS[-1], depth)))
        assert_near(product(library, weight, bias), x, weight, bias, ROWS)
        assert_near(product(library, weight), x, weight, None, (2, 20))


def test_products_of_a_models_shapes_agree_with_torch(library: Library, dtype: torch.dtype) -> None:
    for depth, outputs in ((576, 960), (1536, 576)):
        weight = drawn(outputs, depth, dtype=dtype)
        assert_near(product(library, weight), drawn(300, depth, dtype=dtype), weight, None, (1, 5, 300))


def test_a_row_has_the_same_numbers_among_any_others(library: Library, dtype: torch.dtype) -> None:
    """Bit for bit: so a request's tokens do not depend on who else is served."""
    weight, bias = drawn(100, 130, dtype=dtype), drawn(100, dtype=dtype)
    linear, x = product(library, weight, bias), drawn(600, 130, dtype=dtype)
    whole = linear(x)
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), whole[:rows]), rows
    assert torch.equal(linear(x[37:38]), whole[37:38])


def test_numbers_do_not_depend_on_the_number_of_threads(library: Library, dtype: torch.dtype) -> None:
    weight = drawn(272, 64, dtype=dtype)
    linear = product(library, weight)
    for rows in (1, 33, 700):
        x = drawn(rows, 64, dtype=dtype)
        torch.set_num_threads(1)
        alone = linear(x)
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(linear(x), alone), (rows, threads)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_what_is_not_finite_stays_in_its_row(library: Library, dtype: torch.dtype, value: float) -> None:
    """Also beside a depth that is padded: the next row's values are not read there."""
    for depth, rows in itertools.product((31, 33, 64), (2, 17, 40)):
        weight = drawn(50, depth, dtype=dtype)
        linear, x = product(library, weight), drawn(rows, depth, dtype=dtype)
        healthy = linear(x)
        x[1, 0] = value
        broken = linear(x)
        assert torch.equal(broken[0], healthy[0]) and torch.equal(broken[2:], healthy[2:])
        expected = F.linear(x[1:2].float(), weight.float())[0]
        assert torch.equal(broken[1].isnan(), expected.isnan())
        assert torch.equal(broken[1].float().nan_to_num(0), expected.nan_to_num(0))


def test_a_weight_that_is_not_finite_stays_in_its_column(library: Library, dtype: torch.dtype) -> None:
    weight, x = drawn(40, 33, dtype=dtype), drawn(3, 33, dtype=dtype)
    healthy = product(library, weight)(x)
    weight[20, 32] = torch.nan
    broken = product(library, weight)(x)
    assert broken[:, 20].isnan().all()
    broken[:, 20] = healthy[:, 20]
    assert torch.equal(broken, healthy)


def test_large_values_overflow_and_small_ones_stay(library: Library, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    x = torch.tensor([[most, most], [most, -most], [1e-30, 1e-30], [0.0, -0.0]]).to(dtype)
    weight = torch.tensor([[1.0, 1.0], [0.5, 0.25], [1e-4, 0.0]]).to(dtype)
    got = product(library, weight)(x)
    expected = F.linear(x.double(), weight.double()).to(dtype)
    assert torch.equal(got, expected)
    assert got[0, 0] == torch.inf and got[1, 0] == 0 and 0 < got[2, 2] < 1e-33


def test_rows_may_have_gaps_between_them(library: Library, dtype: torch.dtype) -> None:
    weight, wide = drawn(40, 64, dtype=dtype), drawn(20, 200, dtype=dtype)
    x = wide[:, 70:134]
    assert torch.equal(product(library, weight)(x), product(library, weight)(x.contiguous()))


def test_no_rows_give_no_rows(library: Library, dtype: torch.dtype) -> None:
    assert product(library, drawn(40, 64, dtype=dtype))(torch.empty(0, 64, dtype=dtype)).shape == (0, 40)


def test_what_does_not_fit_together_is_refused(library: Library, dtype: torch.dtype) -> None:
    weight, x = packed(drawn(40, 64, dtype=dtype)), drawn(3, 64, dtype=dtype)
    linear = library.ops.linear
    with pytest.raises(RuntimeError, match=r"x is (c10::)?Half"):
        linear(x.half(), weight, None, 40)
    with pytest.raises(RuntimeError, match=r"x is not \[rows, depth\]"):
        linear(drawn(64, 3, dtype=dtype).T, weight, None, 40)
    with pytest.raises(RuntimeError, match="weight is"):
        linear(x[:, :31].contiguous(), weight, None, 40)
    with pytest.raises(RuntimeError, match="weight is"):
        linear(x, weight, None, 49)
    with pytest.raises(RuntimeError, match="bias is not"):
        linear(x, weight, drawn(41, dtype=dtype), 40)
