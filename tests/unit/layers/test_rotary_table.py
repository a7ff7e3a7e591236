"""The table of rotary angles."""

from __future__ import annotations

import math

import torch

from minisgl_backend.layers.rotary import build_rotary_table


def test_the_table_is_exact_to_fp32_at_far_positions() -> None:
    frequencies = (1.0, 0.7305, 3e-5)
    table = build_rotary_table(frequencies, 131_072, torch.device("cpu"))
    position = 131_071
    rotation = table.at(torch.tensor([position, 0]))
    cos, sin = rotation.cos, rotation.sin
    assert cos.shape == (2, 1, 3) and cos.dtype == torch.float32
    for pair, frequency in enumerate(frequencies):
        assert abs(cos[0, 0, pair].item() - math.cos(position * frequency)) < 1e-7
        assert abs(sin[0, 0, pair].item() - math.sin(position * frequency)) < 1e-7
    assert cos[1].flatten().tolist() == [1.0] * 3
