"""What is told of a model without loading it is what loading it takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.random_model import write_random_llama
from minisgl_backend.config import resolve_config
from minisgl_backend.errors import ConfigError, ModelUnsupported
from minisgl_backend.models.folder import read_model_spec
from minisgl_backend.models.load import load_model
from minisgl_backend.models.size import weight_bytes
from minisgl_backend.worker.build import build_runner
from minisgl_backend.worker.inspection import inspect_model


def inspected(folder: Path, **settings: Any) -> Any:
    return inspect_model(resolve_config({"device": "cpu", "model": str(folder), **settings}), folder)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(("setting", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_weights_told_are_the_weights_held(
    quantization: Any, setting: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = write_random_llama(tmp_path, hidden_size=64, intermediate_size=96, tie_word_embeddings=False)
    spec = read_model_spec(folder)
    model = load_model(spec, folder, torch.device("cpu"), dtype, 16, quantization)
    rotary = sum(table.cos.nbytes + table.sin.nbytes for table in model.rotaries)
    found = inspected(folder, dtype=setting, quantization=quantization)
    assert found.faults == ()
    assert found.needs.weight_bytes == weight_bytes(model) - rotary


def test_the_pool_told_is_the_pool_of_the_runner(tmp_path: Path) -> None:
    folder = write_random_llama(tmp_path)
    settings: dict[str, Any] = {"kv_bytes": 1 << 20, "page_size": 4, "dtype": "fp32"}
    runner = build_runner(resolve_config({"device": "cpu", "model": str(folder), **settings}), folder)
    found = inspected(folder, **settings)
    assert found.needs.kv_pool_tokens == runner.num_pages * 4
    assert found.needs.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4  # K and V, layers, heads of K/V, head_dim, bytes
    assert found.needs.context_tokens == 128 and found.parameters == sum(
        tensor.numel() for tensor in _tensors(folder).values()
    )


def test_a_missing_tensor_and_no_room_are_told_together(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = write_random_llama(tmp_path)
    tensors = _tensors(folder)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    faults = inspected(folder, kv_bytes=1).faults
    assert "lacks tensor 'model.norm.weight'" in faults[0] and "no page of the KV pool" in faults[1]


def test_ranks_that_do_not_fit_the_model_are_told_with_those_that_do(tmp_path: Path) -> None:
    (fault,) = inspected(write_random_llama(tmp_path), tensor_parallel=3).faults
    assert fault.startswith("setting 'tensor_parallel' is 3, but 4 query heads") and fault.endswith("takes 1, 2, 4")


def test_a_quantisation_that_does_not_fit_the_model_is_told(tmp_path: Path) -> None:
    folder = write_random_llama(tmp_path, intermediate_size=40)
    assert "no GGUF file" in inspected(folder, quantization="gguf").faults[0]
    assert "multiples of 32" in inspected(folder, quantization="int4").faults[0]


def test_a_context_whose_tables_do_not_fit_is_refused_by_the_inspection_and_by_the_start(tmp_path: Path) -> None:
    folder = write_random_llama(tmp_path, max_position_embeddings=128)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 40}))
    message = "sequences of up to 1,099,511,627,776 tokens take .* lower 'context_tokens'"
    assert any(re.search(message, fault) for fault in inspected(folder).faults)
    with pytest.raises(ConfigError, match=message):
        build_runner(resolve_config({"device": "cpu", "model": str(folder)}), folder)
    assert inspected(folder, context_tokens=128).faults == ()


def test_a_folder_whose_config_can_not_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelUnsupported, match=r"config\.json can not be read"):
        inspected(tmp_path)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
