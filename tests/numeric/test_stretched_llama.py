"""ML-02: a Llama with each kind of stretched rotary embedding, in each spelling, beside transformers.

vllm-project/vllm PR #56446, PR #10293; sgl-project/sglang#2943: a scaling under `type` is ignored, a limit multiplied
twice. The sequences are longer than what the model was trained for, and as long as the engine's context limit; there
transformers, which looks at the length, and we, who look at the limit, must rotate alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.forward import load, logits_of
from fakes.tiny_model import make_tiny_llama

TOLERANCE = 1e-4
ORIGINAL, STRETCHED = 64, 256
HALF_HEAD = 8

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * pair for pair in range(HALF_HEAD)],
    "long_factor": [1.0 + pair for pair in range(HALF_HEAD)],
    "original_max_position_embeddings": ORIGINAL,
}
SCALINGS: Mapping[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn_not_truncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 8.0,
        "truncate": False,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": LONGROPE,
}
SPELLINGS = ("rope_parameters", "rope_scaling.rope_type", "rope_scaling.type")
CUTS = {"prompt": [STRETCHED], "chunks": [40, 1, 62, 153], "decode_after_prefix": [STRETCHED - 3, 1, 1, 1]}


def stated(kind: str) -> int:
    """max_position_embeddings: a dynamic one is stretched beyond it."""
    return ORIGINAL if kind == "dynamic" else STRETCHED


def write(folder: Path, kind: str, spelling: str) -> Path:
    make_tiny_llama(
        folder,
        rope_parameters={"rope_theta": 500.0, **SCALINGS[kind]},
        max_position_embeddings=stated(kind),
    )
    if spelling != "rope_parameters":
        config = json.loads((folder / "config.json").read_text())
        scaling = dict(SCALINGS[kind])
        if spelling == "rope_scaling.type":
            scaling["type"] = scaling.pop("rope_type")
        del config["rope_parameters"]
        (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 500.0, "rope_scaling": scaling}))
    return folder


def reference_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


@cache
def some_tokens() -> list[int]:
    return torch.randint(0, 320, (STRETCHED,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("kind", SCALINGS)
def test_logits_are_those_of_transformers_before_and_after_the_original_length(
    kind: str, spelling: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, kind, spelling)
    expected = reference_logits(folder, some_tokens())
    model = load(folder, context_tokens=STRETCHED)
    for name, cut in CUTS.items():
        got = logits_of(model, some_tokens(), cut, 16, torch.float32)
        for position in (10, ORIGINAL + 5, STRETCHED - 1):
            torch.testing.assert_close(
                got[position],
                expected[position],
                atol=TOLERANCE,
                rtol=0,
                msg=lambda m, n=name, p=position: f"{n} {p}: {m}",
            )
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", SCALINGS)
def test_a_scaling_that_is_ignored_shows_in_these_logits(kind: str, tmp_path: Path) -> None:
    """What the tolerance above is worth."""
    folder = write(tmp_path, kind, "rope_parameters")
    expected = reference_logits(folder, some_tokens())
    config = json.loads((folder / "config.json").read_text())
    plain = {**config, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(plain))
    got = logits_of(load(folder), some_tokens(), [STRETCHED], 16, torch.float32)
    for position in (10, ORIGINAL + 5, STRETCHED - 1):
        assert (got[position] - expected[position]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_limit_of_the_original_length_is_the_unstretched_rope(kind: str, tmp_path: Path) -> None:
    folder = write(tmp_path, kind, "rope_parameters")
    tokens = some_tokens()[:ORIGINAL]
    got = logits_of(load(folder, context_tokens=ORIGINAL), tokens, [40, ORIGINAL - 40], 16, torch.float32)
    torch.testing.assert_close(got, reference_logits(folder, tokens), atol=TOLERANCE, rtol=0)


def test_a_short_sequence_of_a_long_engine_rotates_as_a_long_one(tmp_path: Path) -> None:
    """Its keys stay in the cache, where a longer sequence finds them. transformers does so with two equal sets."""
    folder = write(tmp_path, "longrope", "rope_parameters")
    tokens = some_tokens()[: ORIGINAL // 2]
    got = logits_of(load(folder), tokens, [len(tokens)], 16, torch.float32)
    whole = logits_of(load(folder), some_tokens(), [STRETCHED], 16, torch.float32)
    torch.testing.assert_close(got, whole[: len(tokens)], atol=1e-5, rtol=0)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["short_factor"] = LONGROPE["long_factor"]
    (folder / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(got, reference_logits(folder, tokens), atol=TOLERANCE, rtol=0)
