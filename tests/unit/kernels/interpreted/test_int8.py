"""The Triton product with weights in int8 beside fp64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fakes.family_cases import FAMILY_CASES
from fakes.forward import load, logits_of
from minisgl_backend.kernels.gpu.int8 import int8_product_triton
from minisgl_backend.kernels.gpu.kernels import TritonKernels
from minisgl_backend.layers.quant.int8 import Int8Linear, Int8Rows
from minisgl_backend.models.load import LoadKernels

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_product(x: Tensor, stored: Int8Rows, bias: Tensor | None, got: Tensor) -> None:
    expected = x.double() @ (stored.values.double() * stored.scales.double()).T
    expected = expected if bias is None else expected + bias.double()
    assert got.dtype == x.dtype and expected.std() > 1
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3}[x.dtype]
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@DTYPES
@pytest.mark.parametrize("tokens", [1, 16, 17, 70])  # of each tile
def test_it_equals_the_product_in_fp64_where_no_size_fills_a_tile(tokens: int, dtype: torch.dtype) -> None:
    stored, bias = Int8Rows.quantise(numbers(75, 270, seed=0) / 8), numbers(75, seed=1).to(dtype)
    x = numbers(tokens, 300, seed=2).to(dtype)[:, :270]  # rows lie apart
    for added in (None, bias):
        assert_product(x, stored, added, int8_product_triton(x, stored.values, stored.scales, added))


def test_parts_lie_side_by_side() -> None:
    parts = [Int8Rows.quantise(numbers(rows, 20, seed=rows)) for rows in (3, 40, 1)]
    x, bias = numbers(5, 20, seed=9), numbers(44, seed=8)
    got = Int8Linear.joined(int8_product_triton, parts, bias)(x)
    expected = torch.cat([x @ part.dense(slice(None), torch.float32).T for part in parts], dim=1) + bias
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_weights_at_the_ends_of_the_range_are_exact_and_a_broken_token_stays_alone() -> None:
    values = torch.tensor([[-127, 127, 0, 1], [-128, 3, 5, -1]], dtype=torch.int8)
    scales = torch.tensor([[0.5], [0.0]])
    x = torch.tensor([[1.0, 1.0, 1.0, 1.0], [torch.nan, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]])
    got = int8_product_triton(x, values, scales, None)
    assert got[0].tolist() == [0.5, 0.0] and got[1].isnan().all() and got[2].tolist() == [127.0, 0.0]
    assert int8_product_triton(x[:0], values, scales, None).shape == (0, 2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, below the interpreter
def test_a_model_in_int8_computes_with_it(tmp_path: Path) -> None:
    folder = FAMILY_CASES["qwen2"].write(tmp_path)  # q, k and v are one product, with a bias
    dtype = torch.float32
    model = load(folder, dtype, quantization="int8", kernels=LoadKernels(TritonKernels()))
    layer = model.layers[0]  # type: ignore[attr-defined]
    ops = (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down)
    assert {type(op) for op in ops} == {Int8Linear}
    expected = logits_of(load(folder, dtype, quantization="int8"), [3, 17], [2], 2, dtype)
    torch.testing.assert_close(logits_of(model, [3, 17], [2], 2, dtype), expected, atol=1e-5, rtol=1e-5)
