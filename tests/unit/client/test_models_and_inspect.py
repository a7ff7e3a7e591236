"""`minisgl models` and `minisgl inspect`: what they print and how they end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes.random_model import write_random_llama
from minisgl_backend.models.registry import FAMILIES
from minisgl_client.cli import main


def test_models_lists_every_architecture_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(FAMILIES)]] == sorted(FAMILIES)
    assert main(["models", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["architecture"] for row in told["architectures"]] == sorted(FAMILIES) and "smollm2" in told["fetchable"]


def test_inspect_tells_what_a_folder_holds_and_that_it_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_random_llama(tmp_path)
    arguments = ["inspect", str(folder), "--dtype", "fp32", "--set", "device=cpu", "--kv-bytes", "1048576"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "LlamaForCausalLM" in text and "128 tokens, rotary: default" in text and text.endswith("it will run\n")
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["faults"] == [] and told["needs"]["kv_pool_bytes"] == 1048576 and told["spec"]["num_layers"] == 2


def test_inspect_ends_with_4_for_what_will_not_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_random_llama(tmp_path)
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").unlink()
    assert main(["inspect", str(folder)]) == 4
    text = capsys.readouterr().out
    assert "holds no weights" in text and "tokenizer" in text and text.endswith("it will not run\n")


def test_inspect_names_the_architecture_that_is_not_supported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    assert main(["inspect", str(tmp_path)]) == 4
    assert "architecture 'MambaForCausalLM' is not supported" in capsys.readouterr().err
