"""docs/parameters.md says what is so: every parameter with its default, every refusal word for word."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fakes.text_requests import validate_request
from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.messages.client import Request
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.text.limits import MAX_ECHOED_CHARS, MAX_KEPT_LOGPROBS, RequestLimits
from minisgl_backend.text.parameters import _OFF, MAX_LOGPROBS, MAX_PROMPT_LOGPROBS, READERS, SamplingParams
from minisgl_backend.text.tokenizer import Tokenizer

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "parameters.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` \| `(.*?)` \| ?(.*?) \| (.+) \|$", PAGE.split("## Names in the dialects")[0], re.M)
REFUSALS = re.findall(r"^\| `(\{.*\})` \| (.+) \|$", PAGE, re.M)
LIMITS = RequestLimits(context_tokens=64, pool_tokens=1000, sequences=72)


def test_every_parameter_stands_in_a_table_once_with_its_default() -> None:
    assert sorted(name for name, *_ in ROWS) == sorted(SamplingParams.__struct_fields__)
    for name, default, _, meaning in ROWS:
        actual = getattr(SamplingParams(), name)
        assert default == ("()" if actual == () else json.dumps(actual)), name
        assert len(meaning) > 10, name


FORMS = {name for name in READERS if name.startswith("guided_")} | {
    "structured_outputs",
    "response_format",
    "json_schema",
}
"""Kept as they come, and read beside the text actor's loop: their refusals have tests of their own."""


def test_every_parameter_has_a_refusal_on_the_page() -> None:
    named = {answer.split(":")[0] for _, answer in REFUSALS}
    assert set(READERS) - FORMS <= named


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_the_bounds_of_logprobs_are_those_of_the_code(name: str) -> None:
    (meaning,) = (meaning for parameter, *_, meaning in ROWS if parameter == name)
    most = {"logprobs": MAX_KEPT_LOGPROBS, "prompt_logprobs": MAX_PROMPT_LOGPROBS}[name]
    assert f"at most {most:,}" in meaning and f"{most // (MAX_LOGPROBS + 1):,} tokens with {MAX_LOGPROBS}" in meaning


def test_the_bound_of_echoes_is_that_of_the_code() -> None:
    (meaning,) = (meaning for parameter, *_, meaning in ROWS if parameter == "echo")
    assert f"at most {MAX_ECHOED_CHARS:,} characters in all" in meaning


def test_what_is_not_built_is_listed() -> None:
    (section,) = re.findall(r"^## Not built\n(.*?)^## ", PAGE, re.M | re.S)
    assert set(re.findall(r"`([a-z_]+)`", section)) == set(_OFF)


@pytest.mark.parametrize(("sent", "answer"), REFUSALS, ids=[sent for sent, _ in REFUSALS])
def test_a_refusal_reads_as_the_page_says(byte_level: Tokenizer, sent: str, answer: str) -> None:
    request = Request(RequestId(1), b"hi", sent.encode(), False, None)
    with pytest.raises((InvalidRequest, UnsupportedFeature)) as caught:
        validate_request(request, byte_level, LIMITS, lambda: 0)
    assert str(caught.value) == answer
    assert byte_level.vocab_size >= 384
