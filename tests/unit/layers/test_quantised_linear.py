"""int8 and int4 as they are made at load: within the error that is stated, on weights of every shape and size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minisgl_backend.layers.quant.int4 import GROUP, Int4Rows
from minisgl_backend.layers.quant.int8 import Int8Rows
from minisgl_backend.layers.quant.stored import StoredLinear

ROWS, COLUMNS = 24, 160


def weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    normal = torch.randn(ROWS, COLUMNS, generator=random)
    outlier = normal.clone()
    outlier[:, 17] *= 50.0
    zeros = normal.clone()
    zeros[3] = 0.0
    return {
        "normal": normal,
        "small": normal * 1e-3,
        "an outlier in each row": outlier,
        "a row of zeros": zeros,
        "all positive": normal.abs() + 3.0,
        "constant": torch.full((ROWS, COLUMNS), 0.37),
        "bf16": normal.bfloat16(),
    }


def int8_bound(weight: torch.Tensor) -> torch.Tensor:
    """Half a step of each row."""
    return (weight.abs().amax(1, keepdim=True) / 127 / 2).expand_as(weight)


def int4_bound(weight: torch.Tensor) -> torch.Tensor:
    """Half a step of each group, and the rounding of scale and minimum to fp16 (2^-11 of each, the scale 15 times)."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=2, keepdim=True)
    bound = (high - low) / 15 * 0.51 + low.abs() * 2**-11
    return bound.expand_as(groups).flatten(1)


@pytest.mark.parametrize("name", weights())
@pytest.mark.parametrize(("method", "bound"), [(Int8Rows, int8_bound), (Int4Rows, int4_bound)], ids=["int8", "int4"])
def test_stored_weights_and_products_are_within_the_stated_error(method, bound, name: str) -> None:  # type: ignore[no-untyped-def]
    weight = weights()[name]
    stored = method.quantise(weight)
    exact, most = weight.float(), bound(weight.float())
    off = (stored.dense(slice(None), torch.float32) - exact).abs()
    assert (off <= most * (1 + 1e-4) + 1e-7).all(), f"{(off - most).max()} beyond the bound"
    x = torch.randn(6, COLUMNS, generator=torch.Generator().manual_seed(2))
    got = StoredLinear([stored])(x)
    assert ((got - F.linear(x, exact)).abs() <= x.abs() @ most.T * (1 + 1e-4) + 1e-4).all()


@pytest.mark.parametrize(("method", "bits"), [(Int8Rows, 8.0 + 32 / COLUMNS), (Int4Rows, 5.0)], ids=["int8", "int4"])
def test_a_stored_weight_has_the_stated_bits(method, bits: float) -> None:  # type: ignore[no-untyped-def]
    stored = method.quantise(weights()["normal"])
    size = sum(getattr(stored, field).nbytes for field in stored.__slots__)
    assert 8 * size == pytest.approx(bits * ROWS * COLUMNS)
    assert stored.shape == (ROWS, COLUMNS)


@pytest.mark.parametrize("method", [Int8Rows, Int4Rows])
def test_quantising_leaves_the_weight_alone_and_rows_come_by_slice_and_by_ids(method) -> None:  # type: ignore[no-untyped-def]
    weight = weights()["normal"]
    before = weight.clone()
    stored = method.quantise(weight)
    assert torch.equal(weight, before)
    whole = stored.dense(slice(None), torch.float32)
    assert torch.equal(stored.dense(torch.tensor([5, 0]), torch.float32), whole[[5, 0]])
    assert torch.equal(stored.dense(slice(4, 9), torch.bfloat16), whole[4:9].bfloat16())


def test_int4_gives_weights_on_its_grid_back_exactly() -> None:
    """A checkpoint that was made out of 4 bits with a minimum loses nothing more."""
    steps = torch.randint(0, 16, (8, 2, GROUP), generator=torch.Generator().manual_seed(4))
    steps[..., 0], steps[..., 1] = 0, 15
    weight = (steps * 0.25 - 2.0).flatten(1)
    assert torch.equal(Int4Rows.quantise(weight).dense(slice(None), torch.float32), weight)
