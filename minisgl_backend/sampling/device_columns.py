"""Sampling parameters of a step on their way to the kernels of a GPU: one transfer."""

from __future__ import annotations

import numpy as np

from minisgl_backend.device.staging import Upload
from minisgl_backend.kernels.gpu.sampling import FILTERED, GREEDY, OF_ALL, DrawColumns
from minisgl_backend.sampling.masks import Rows
from minisgl_backend.sampling.parameters import SamplingColumns
from minisgl_backend.sampling.race import row_keys
from minisgl_backend.sampling.sampler import heats, weight_floors


def device_columns(parameters: SamplingColumns, positions: Rows, upload: Upload) -> DrawColumns:
    """parameters, positions [rows] on the host; positions: of the tokens to be drawn."""
    drawn = parameters.temperature > 0.0
    filtered = drawn & ((parameters.top_k > 0) | (parameters.top_p < 1.0))
    arrays = (
        np.where(filtered, FILTERED, np.where(drawn, OF_ALL, GREEDY)).astype(np.int32),
        heats(parameters.temperature),
        weight_floors(parameters.min_p),
        parameters.top_k,
        parameters.top_p,
        row_keys(parameters.seed, parameters.sample_index, positions.astype(np.uint64)),
    )
    return DrawColumns(bool(drawn.any()), bool(filtered.any()), *upload(arrays))
