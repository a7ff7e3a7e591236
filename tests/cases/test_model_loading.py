"""Cases of class 8, model loading, that need a whole runner; the others are where docs/cases.md says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fakes.family_cases import FAMILY_CASES, WINDOW
from fakes.forward import load, logits_of
from fakes.plans import Planner
from fakes.tiny_model import make_tiny_llama
from minisgl_backend.config import resolve_config
from minisgl_backend.distributed.seat import ALONE
from minisgl_backend.messages.plan import NO_TOKEN
from minisgl_backend.worker.build import build_runner

PROMPT = [5, 9, 70, 12]
SETTINGS = {"device": "cpu", "max_running": 4, "context_tokens": 64, "threads": 1}


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A bf16 model that adds more than 65504 to its hidden state, which is nothing to bf16."""
    folder = make_tiny_llama(tmp_path, dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] *= 3e5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def first_token(folder: Path, dtype: str) -> tuple[int, list[str]]:
    """Of the greedy answer to PROMPT, and what the operator was told."""
    told: list[str] = []
    runner = build_runner(resolve_config({**SETTINGS, "dtype": dtype}), folder, ALONE, told.append)
    planner = Planner(16, runner.num_pages)
    planner.admit(0, PROMPT)
    (token,) = runner.run(planner.plan([(0, len(PROMPT))])).tokens
    runner.close()
    return token, told


def test_a_bf16_model_that_is_forced_into_fp16_is_warned_of_and_its_requests_fail(wide: Path) -> None:
    """ML-04: it answered "!" for ever, token 0."""
    token, told = first_token(wide, "fp16")
    assert token == NO_TOKEN
    assert [line for line in told if line.startswith("warning:")] == [
        "warning: a bf16 model in fp16 can overflow, and requests then fail; dtype auto or bf16 does not"
    ]


@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp32"])
def test_a_bf16_model_is_not_put_into_fp16_unasked(wide: Path, dtype: str) -> None:
    """ML-04."""
    token, told = first_token(wide, dtype)
    assert token != NO_TOKEN
    assert not any(line.startswith("warning") for line in told)
    assert "float16" not in told[0].replace("bfloat16", "")


def test_an_fp16_model_in_fp16_is_no_reason_for_a_warning(tmp_path: Path) -> None:
    _, told = first_token(make_tiny_llama(tmp_path, dtype="float16"), "fp16")
    assert not any(line.startswith("warning") for line in told)


def test_a_second_file_with_the_same_names_beside_an_index_changes_nothing(tmp_path: Path) -> None:
    """ML-07."""
    import json

    folder = make_tiny_llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    before, _ = first_token(folder, "fp32")
    others = {name: torch.full_like(tensor, 7.0) for name, tensor in tensors.items()}
    save_file(others, folder / "consolidated.safetensors", {"format": "pt"})
    after, _ = first_token(folder, "fp32")
    assert before == after != NO_TOKEN


@pytest.mark.parametrize("name", ["qwen2_with_windows", "qwen2_with_unused_windows"])
def test_a_window_hides_what_the_config_says_and_nothing_when_it_is_off(name: str, tmp_path: Path) -> None:
    """ML-08: it was ignored, one token too long, or there although `use_sliding_window` is false."""
    from transformers import AutoModelForCausalLM

    folder = FAMILY_CASES[name].write(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(0, 320, (100,), generator=torch.Generator().manual_seed(8)).tolist()
    model = load(folder)
    for length in (WINDOW - 1, WINDOW, WINDOW + 1, 100):
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens[:length]])).logits[0]
        for cut in ([length], [WINDOW - 2, length - WINDOW + 2]):  # the second: behind a cached prefix
            got = logits_of(model, tokens[:length], cut, 16, torch.float32)
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
