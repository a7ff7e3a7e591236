"""Whole models on the Triton kernels beside torch's: families that ask for all that the layers' kernels can do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fakes.family_cases import FAMILY_CASES
from fakes.forward import load, logits_of
from minisgl_backend.kernels.gpu.kernels import TritonKernels
from minisgl_backend.models.load import LoadKernels


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, below the interpreter
@pytest.mark.parametrize("name", ["gemma2", "glm4", "olmo2", "qwen2_moe", "gpt_oss"])
def test_logits_of_a_family_equal_those_of_torchs_kernels(name: str, tmp_path: Path) -> None:
    """gemma2: scaled embeddings, caps, norms in fp32; glm4: interleaved partial rotation; olmo2: norms over heads."""
    folder = FAMILY_CASES[name].write(tmp_path)
    tokens, dtype = [3, 17, 5], torch.float32
    expected = logits_of(load(folder, dtype), tokens, [2, 1], 2, dtype)
    got = logits_of(load(folder, dtype, kernels=LoadKernels(TritonKernels())), tokens, [2, 1], 2, dtype)
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
