"""Reported faults of other servers, class "structured output".

SO-01 sgl-project/sglang#37707, vllm-project/vllm#45592; SO-02 vllm-project/vllm#38696, sgl-project/sglang#8250;
SO-05 sgl-project/sglang#3724, vllm-project/vllm PR #44441; SO-07 mlc-ai/xgrammar#104; SO-08 Blaizzy/mlx-vlm#1917;
TP-06 mirage-project/mirage#751, vllm-project/vllm#13175.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.tiny_model import make_tiny_llama
from minisgl_backend.config import resolve_config
from minisgl_backend.errors import ConfigError, InvalidRequest, UnsupportedFeature
from minisgl_backend.llm import LLM
from minisgl_backend.sampling.white_space import MAX_WHITE_SPACE
from minisgl_backend.text.parameters import SamplingParams, parse_parameters
from minisgl_backend.text.structured.spec import read_structured
from minisgl_backend.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

KNOWN_IDS = 300
"""Ids that the tokenizer has at most; the model's vocabulary is padded far beyond."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("padded"), vocab=413)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), device="cpu", executor="inline", max_running=32, threads=1) as found:
        yield found


def test_so_01_a_length_beside_a_pattern_is_refused_by_its_name() -> None:
    schema = {"type": "string", "pattern": "^[a-z]+$", "minLength": 3, "maxLength": 5}
    with pytest.raises(UnsupportedFeature, match="'maxLength' beside pattern"):
        read_structured({"guided_json": schema})


def test_so_02_a_model_that_prefers_white_space_still_ends_its_json(llm: LLM, folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    spaces = [i for i, data in enumerate(tokenizer.shown_bytes) if data and not data.strip()]
    assert len(spaces) >= 4
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    params = SamplingParams(
        max_tokens=200, temperature=1.0, seed=3, logit_bias=dict.fromkeys(spaces, 20.0), guided_json=schema
    )
    answer = llm.generate(["hello"], params)[0]
    assert answer.finish_reason == "stop" and json.loads(answer.text).keys() == {"a"}
    assert max(map(len, re.findall(r"\s+", answer.text))) <= 2 * MAX_WHITE_SPACE


@pytest.mark.parametrize("name", ["speculative_algorithm", "speculative_config", "num_speculative_tokens"])
def test_so_05_drafted_tokens_are_refused_by_name_until_they_are_built(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'"):
        resolve_config({name: 4})
    with pytest.raises(InvalidRequest, match=f"unknown parameter '{name}'"):
        parse_parameters(f'{{"{name}": 4}}'.encode())


@pytest.mark.parametrize(
    ("schema", "holds"),
    [
        ({"type": "object", "required": ["a"]}, lambda value: "a" in value),
        ({"type": "array", "minItems": 2, "items": {"type": "null"}}, lambda value: len(value) >= 2),
        ({}, lambda value: True),
    ],
)
def test_so_07_what_a_schema_leaves_open_is_not_taken_for_nothing(llm: LLM, schema: object, holds: object) -> None:
    assert callable(holds)
    params = [SamplingParams(max_tokens=300, temperature=1.0, seed=i, guided_json=schema) for i in range(12)]
    answers = [answer for answer in llm.generate(["hello"] * 12, params) if answer.finish_reason == "stop"]
    assert answers
    assert all(holds(json.loads(answer.text)) for answer in answers)


def test_so_08_and_tp_06_a_padded_vocabulary_is_masked_to_its_end_from_the_first_token_on(llm: LLM) -> None:
    schema = {"enum": ["ä", "日本", "😀"]}
    params = SamplingParams(max_tokens=40, temperature=1.5, seed=1, n=100, guided_json=schema)
    (answer,) = llm.generate(["hello"], params)
    assert {json.loads(sample.text) for sample in answer.samples} == {"ä", "日本", "😀"}
    assert all(token < KNOWN_IDS for sample in answer.samples for token in sample.token_ids)
    greedy = SamplingParams(max_tokens=40, temperature=0.0, guided_json=schema)
    assert json.loads(llm.generate(["hello"], greedy)[0].text) in schema["enum"]
