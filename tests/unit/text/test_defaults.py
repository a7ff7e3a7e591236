"""The model's own generation_config.json as the defaults of sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.text.defaults import sampling_defaults
from minisgl_backend.text.parameters import SamplingParams, parse_parameters

GIVEN = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": None,
    "repetition_penalty": 1.05,
    "do_sample": False,
    "max_new_tokens": 2048,
    "eos_token_id": [1, 2],
}
EXPECTED = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)


def folder(tmp_path: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    return tmp_path


def test_what_the_model_says_stands_where_a_request_says_nothing(tmp_path: Path) -> None:
    defaults = sampling_defaults(folder(tmp_path, GIVEN), "auto")
    assert defaults == EXPECTED
    assert parse_parameters(b"", defaults) == EXPECTED
    said = parse_parameters(b'{"temperature": 1, "top_k": -1, "max_tokens": 3}', defaults)
    assert (said.temperature, said.top_k, said.top_p, said.max_tokens) == (1.0, -1, 0.95, 3)


def test_without_a_file_or_with_none_the_defaults_are_vllms(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path, "auto") == SamplingParams()
    assert sampling_defaults(folder(tmp_path, GIVEN), "none") == SamplingParams()


@pytest.mark.parametrize("given", [{"temperature": -1}, {"top_p": 0}, {"repetition_penalty": "x"}, [1], "{"])
def test_a_value_that_no_request_could_have_is_refused_at_the_start(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ModelUnsupported, match=r"generation_config\.json"):
        sampling_defaults(folder(tmp_path, given), "auto")
