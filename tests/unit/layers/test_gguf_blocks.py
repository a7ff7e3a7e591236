"""llama.cpp's block types: what we unpack is what the gguf package unpacks, bit for bit, and a product takes it so."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind

from fakes.gguf_model import random_blocks
from minisgl_backend.layers.quant.gguf import GgufRows, unpack
from minisgl_backend.layers.quant.gguf_types import BLOCK_TYPES
from minisgl_backend.layers.quant.stored import DenseRows, StoredEmbedding, StoredLinear

ROWS, COLUMNS = 48, 512
KINDS = [Kind(number) for number in BLOCK_TYPES]
PACKED = [kind for kind in KINDS if kind.name not in ("F32", "F16", "BF16")]


def packed(kind: Kind) -> np.ndarray:
    """Bytes [rows, bytes of a row]."""
    if kind.name.endswith("_K"):
        return random_blocks(kind, ROWS, COLUMNS)
    values = np.random.default_rng(3).standard_normal((ROWS, COLUMNS), np.float32)
    values[5] = 0.0
    data = values.astype(np.float16) if kind is Kind.F16 else gguf.quants.quantize(values, kind)
    return data.view(np.uint8).reshape(ROWS, -1)


def stored(kind: Kind) -> GgufRows:
    return GgufRows(BLOCK_TYPES[kind], torch.from_numpy(packed(kind)), COLUMNS)


def test_sizes_of_blocks_are_those_of_the_gguf_package() -> None:
    assert {number: (block.values, block.bytes) for number, block in BLOCK_TYPES.items()} == {
        kind.value: gguf.GGML_QUANT_SIZES[kind] for kind in KINDS
    }
    assert [kind.name for kind in KINDS] == [block.name for block in BLOCK_TYPES.values()]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_unpacked_values_are_those_of_the_gguf_package_bit_for_bit(kind: Kind) -> None:
    data = packed(kind)
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind).reshape(ROWS, COLUMNS).astype(np.float32))
    got = unpack(BLOCK_TYPES[kind], torch.from_numpy(data))
    assert got.dtype == torch.float32 and expected.abs().max() > 0.01
    assert torch.equal(got, expected)
    got.zero_()
    assert data.any(), "what comes out is no view of the file"


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
def test_some_rows_are_those_of_the_whole_by_slice_and_by_ids(kind: Kind) -> None:
    rows = stored(kind)
    whole = rows.dense(slice(None), torch.float32)
    ids = torch.tensor([7, 0, 47, 7])
    assert rows.shape == (ROWS, COLUMNS)
    assert torch.equal(rows.dense(slice(3, 9), torch.float32), whole[3:9])
    assert torch.equal(rows.dense(ids, torch.bfloat16), whole[ids].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_with_parts_of_several_types_is_that_with_their_values_side_by_side(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl_backend.layers.quant.stored._BLOCK_VALUES", 7 * COLUMNS)  # rows in blocks of seven
    random = torch.Generator().manual_seed(0)
    parts = [stored(Kind.Q4_1), DenseRows(torch.randn(11, COLUMNS, generator=random)), stored(Kind.Q6_K)]
    bias = torch.randn(2 * ROWS + 11, generator=random).to(dtype)
    x = torch.randn(5, COLUMNS, generator=random).to(dtype)
    weight = torch.cat([part.dense(slice(None), dtype) for part in parts])
    got = StoredLinear(parts, bias)(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got, F.linear(x, weight) + bias, atol=1e-4 if dtype == torch.float32 else 0.25, rtol=0)


def test_a_lookup_unpacks_the_rows_of_its_tokens() -> None:
    rows = stored(Kind.Q8_0)
    tokens = torch.tensor([3, 3, 0], dtype=torch.int32)
    got = StoredEmbedding(rows, torch.float32, scale=2.0)(tokens)
    assert torch.equal(got, 2.0 * rows.dense(slice(None), torch.float32)[tokens.long()])
