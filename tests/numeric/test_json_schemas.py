"""Whatever a schema that is taken lets through is valid under that schema, as the `jsonschema` package reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import pytest

from fakes.grammar_compiler import grammar_compiler
from fakes.grammar_walk import random_answers
from fakes.json_schemas import schemas
from fakes.tokenizers import byte_level_folder, sentencepiece_folder
from minisgl_backend.messages.sampling import Grammar
from minisgl_backend.text.structured.spec import read_structured
from minisgl_backend.text.tokenizer import Tokenizer

END = 2


@pytest.fixture(scope="module", params=[byte_level_folder, sentencepiece_folder], ids=["byte-level", "sentencepiece"])
def tokenizer(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(request.param(tmp_path_factory.mktemp("tokenizer")))


async def compiled(tokenizer: Tokenizer, schemas: Sequence[Any]) -> list[Grammar]:
    grammars = []
    async with grammar_compiler(tokenizer.shown_bytes) as compiler:
        for schema in schemas:
            spec = read_structured({"guided_json": schema})
            assert spec is not None
            grammars.append(await compiler.compile(spec, [END]))
    return grammars


@pytest.mark.slow
async def test_every_finished_answer_of_two_hundred_schemas_is_valid(tokenizer: Tokenizer) -> None:
    cases = schemas()
    assert len(cases) >= 200
    grammars = await compiled(tokenizer, cases)
    finished = [0] * len(cases)
    for seed in range(2):
        answers = random_answers(tokenizer, grammars, END, seed)
        for place, (schema, answer) in enumerate(zip(cases, answers, strict=True)):
            if answer is not None:
                finished[place] += 1
                for problem in problems(schema, answer):
                    pytest.fail(f"{json.dumps(schema)}\n{answer!r}\n{problem}")
    assert all(finished), [schema for schema, times in zip(cases, finished, strict=True) if not times]


def problems(schema: Any, answer: str) -> Iterator[str]:
    try:
        value = json.loads(answer)
    except ValueError as error:
        yield f"no JSON: {error}"
        return
    for error in jsonschema.Draft202012Validator(schema).iter_errors(value):
        yield error.message


async def test_white_space_between_the_parts_of_a_json_text_is_bounded(tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    (grammar,) = await compiled(tokenizer, [schema])
    answers = [random_answers(tokenizer, [grammar], END, seed)[0] for seed in range(5)]
    assert all(answer is not None and json.loads(answer) == {"a": None} for answer in answers)
