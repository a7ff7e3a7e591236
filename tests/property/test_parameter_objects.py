"""Any parameter object: accepted with values in their ranges, or refused by name. Never anything else."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.text.parameters import _OFF, SamplingParams, parse_parameters, resolve_sampling

FIELDS = SamplingParams.__struct_fields__
EXAMPLES = max(2000, settings().max_examples)

odd = [2**31, 2**63 - 1, 2**63, 10**400, 1e308, 5e-324, -0.0, float("nan"), float("inf"), True, False, None, "", "nan"]
odd += ["True", "1e400", "0x1", " 1 ", "\ud800", [], {}, [1], ["a", [None]], {"a": {"b": [1, "c"]}}]
numbers = st.integers(-2, 3) | st.integers(-(2**70), 2**70) | st.floats()
values = st.sampled_from(odd) | numbers | numbers.map(str) | st.text(alphabet="0123456789.eE-+ xé", max_size=6)
keys = st.sampled_from([*FIELDS, *FIELDS, *FIELDS, *sorted(_OFF), "temprature", "", "\ud800", "a" * 200])
likely = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 50) | st.integers(1, 50).map(str),
        "temperature": st.floats(0, 100) | st.floats(0, 2).map(str),
        "top_k": st.integers(-1, 500),
        "top_p": st.floats(0, 1, exclude_min=True),
        "seed": st.none() | st.integers(0, 2**63 - 1),
        "ignore_eos": st.booleans() | st.sampled_from(["true", "False"]),
    },
)


def outcome(raw: bytes, vocab_size: int) -> str:
    try:
        params = parse_parameters(raw)
    except (InvalidRequest, UnsupportedFeature) as refused:
        assert refused.field in FIELDS or refused.field in _OFF or refused.field == "sampling_parameters"
        assert str(refused).startswith(f"{refused.field}: ")
        assert str(refused).isascii() and len(str(refused)) < 400
        return "refused"
    assert 0 <= params.temperature <= 100 and 0 < params.top_p <= 1 and -1 <= params.top_k < 2**31
    assert 1 <= params.max_tokens < 2**31 and type(params.max_tokens) is int
    assert type(params.ignore_eos) is bool
    sampling = resolve_sampling(params, vocab_size, seed=0)
    assert sampling.temperature == 0 or 1e-4 <= sampling.temperature <= 100
    assert math.copysign(1, sampling.temperature) == 1 and type(sampling.temperature) is float
    assert 0 <= sampling.top_k < vocab_size and type(sampling.top_k) is int
    assert 1 / vocab_size <= sampling.top_p <= 1 and type(sampling.top_p) is float
    assert 0 <= sampling.seed < 2**63 and type(sampling.seed) is int
    assert parse_parameters(params.to_json()) == params
    return "accepted"


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(given_values=st.lists(st.tuples(keys, values), max_size=4).map(dict), vocab_size=st.integers(2, 2**20))
def test_any_object_is_accepted_in_range_or_refused_by_name(given_values: dict[str, Any], vocab_size: int) -> None:
    outcome(json.dumps(given_values).encode(), vocab_size)


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 4)
@given(given_values=likely, vocab_size=st.integers(2, 2**20))
def test_an_object_of_good_values_is_accepted(given_values: dict[str, Any], vocab_size: int) -> None:
    assert outcome(json.dumps(given_values).encode(), vocab_size) == "accepted"


@settings(max_examples=EXAMPLES // 4)
@given(
    raw=st.binary(max_size=40) | st.text(alphabet='{}[]":,0123456789eE+-.truefalsn \\u', max_size=40).map(str.encode)
)
def test_any_bytes_are_an_object_or_refused(raw: bytes) -> None:
    outcome(raw, 100)
