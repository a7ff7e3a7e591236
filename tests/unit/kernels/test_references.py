"""The torch references, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from minisgl_backend.kernels.activation import silu_mul
from minisgl_backend.kernels.norm import rms_norm
from minisgl_backend.kernels.paged_kv import gather_pages, write_kv
from minisgl_backend.kernels.rotary import apply_rotary


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_rms_norm_divides_by_the_root_mean_square(dtype: torch.dtype, tolerance: float) -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=dtype)
    weight = torch.tensor([2.0, 1.0], dtype=dtype)
    rms = math.sqrt(12.5 + 1e-5)
    expected = torch.tensor([[6.0 / rms, 4.0 / rms], [0.0, 0.0]])
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).float(), expected, atol=tolerance, rtol=0)


def test_rms_norm_in_fp16_takes_values_whose_square_would_overflow() -> None:
    x = torch.full((1, 4), 3e4, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(4, dtype=torch.float16), 1e-6), torch.ones(1, 4, dtype=torch.float16))


def test_rotary_turns_each_pair_by_its_angle() -> None:
    angles = torch.tensor([0.5, 2.0])
    x = torch.tensor([[[1.0, 0.0, 0.0, 1.0]]])  # pair 0 is (1, 0), pair 1 is (0, 1)
    turned = apply_rotary(x, angles.cos()[None, None], angles.sin()[None, None])
    expected = torch.tensor([[[math.cos(0.5), -math.sin(2.0), math.sin(0.5), math.cos(2.0)]]])
    torch.testing.assert_close(turned, expected)


def test_interleaved_rotary_turns_neighbours_and_leaves_what_is_beyond_the_angles() -> None:
    angles = torch.tensor([0.5, 2.0])
    x = torch.tensor([[[1.0, 0.0, 0.0, 1.0, 7.0, -7.0]]])
    turned = apply_rotary(x, angles.cos()[None, None], angles.sin()[None, None], interleaved=True)
    expected = torch.tensor([[[math.cos(0.5), math.sin(0.5), -math.sin(2.0), math.cos(2.0), 7.0, -7.0]]])
    torch.testing.assert_close(turned, expected)


def test_silu_mul_gates_and_keeps_its_arguments() -> None:
    gate, up = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 5.0]])
    expected = torch.tensor([[3.0 / (1 + math.exp(-1)), -10.0 / (1 + math.exp(2))]])
    torch.testing.assert_close(silu_mul(gate, up), expected)
    assert up.tolist() == [[3.0, 5.0]] and gate.tolist() == [[1.0, -2.0]]


def test_written_keys_come_back_in_table_order() -> None:
    k_pages, v_pages = torch.zeros(3, 2, 1, 2), torch.zeros(3, 2, 1, 2)
    k = torch.arange(6.0).view(3, 1, 2)
    write_kv(k_pages, v_pages, k, k + 100, torch.tensor([4, 5, 0]))  # page 2, then the first place of page 0
    gathered = gather_pages(k_pages, torch.tensor([[2, 0]]))
    assert gathered[0, :3].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert gather_pages(v_pages, torch.tensor([[2, 0]]))[0, 0].flatten().tolist() == [100, 101]


def test_numbers_that_are_not_finite_are_stored_as_they_are() -> None:
    k_pages, v_pages = torch.ones(1, 3, 1, 1), torch.ones(1, 3, 1, 1)
    bad = torch.tensor([float("nan"), float("inf"), float("-inf")]).view(3, 1, 1)
    write_kv(k_pages, v_pages, bad, bad, torch.tensor([0, 1, 2]))
    for pages in (k_pages, v_pages):
        torch.testing.assert_close(pages.flatten(), bad.flatten(), equal_nan=True)
