"""Any parameter object: accepted with values in their ranges, or refused by name. Never anything else."""

from __future__ import annotations

import json
import math
import os
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.hostile_json import hostile_object
from fakes.text_fixtures import byte_level
from fakes.text_requests import validate_request
from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.messages.client import Request
from minisgl_backend.messages.codec import Decoder, encode
from minisgl_backend.messages.engine import Samples, Sequence
from minisgl_backend.messages.ids import RequestId, SequenceId
from minisgl_backend.messages.sampling import TokenRules
from minisgl_backend.messages.tokens import count_tokens, pack_tokens, unpack_tokens
from minisgl_backend.sampling.draw import draw_tokens
from minisgl_backend.sampling.parameters import SamplingColumns
from minisgl_backend.sampling.rules import RuleBook
from minisgl_backend.scheduler.samples import sequences_of
from minisgl_backend.serving.parameters import merge_sampling, read_parameters
from minisgl_backend.text.limits import RequestLimits
from minisgl_backend.text.parameters import _OFF, SamplingParams, parse_parameters
from minisgl_backend.text.request import Accepted
from minisgl_backend.text.sampling import resolve_sampling
from minisgl_backend.text.tokenizer import Tokenizer

__all__ = ["byte_level"]

FIELDS = SamplingParams.__struct_fields__
EXAMPLES = max(2000, settings().max_examples)

odd = [2**31, 2**63 - 1, 2**63, 10**400, 1e308, 5e-324, -0.0, float("nan"), float("inf"), True, False, None, "", "nan"]
odd += ["True", "1e400", "0x1", " 1 ", "\ud800", [], {}, [1], ["a", [None]], {"a": {"b": [1, "c"]}}]
numbers = st.integers(-2, 3) | st.integers(-(2**70), 2**70) | st.floats()
values = st.sampled_from(odd) | numbers | numbers.map(str) | st.text(alphabet="0123456789.eE-+ xé", max_size=6)
keys = st.sampled_from([*FIELDS, *FIELDS, *FIELDS, *sorted(_OFF), "stop_words", "temprature", "", "\ud800", "a" * 200])
likely = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 50) | st.integers(1, 50).map(str),
        "temperature": st.floats(0, 100) | st.floats(0, 2).map(str),
        "top_k": st.integers(-1, 500),
        "top_p": st.floats(0, 1, exclude_min=True),
        "seed": st.none() | st.integers(0, 2**63 - 1),
        "ignore_eos": st.booleans() | st.sampled_from(["true", "False"]),
        "min_p": st.floats(0, 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2) | st.floats(-2, 2).map(str),
        "repetition_penalty": st.floats(0.01, 100),
        "logit_bias": st.dictionaries(st.integers(0, 2**31 - 1).map(str), st.floats(-100, 100), max_size=3),
        "stop": st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        "bad_words": st.lists(st.text(alphabet="ab \u00e9", max_size=3), max_size=3),
        "logprobs": st.none() | st.booleans() | st.integers(0, 20),
        "echo": st.booleans(),
    },
)


def outcome(raw: bytes, vocab_size: int) -> str:
    try:
        params = parse_parameters(raw)
    except (InvalidRequest, UnsupportedFeature) as refused:
        assert refused.field in FIELDS or refused.field in (*_OFF, "stop_words", "sampling_parameters")
        assert str(refused).startswith(f"{refused.field}: ")
        assert str(refused).isascii() and len(str(refused)) < 400
        return "refused"
    assert 1 <= params.n <= 128 and 0 <= params.min_tokens <= params.max_tokens
    assert all(number is None or 0 <= number <= 20 for number in (params.logprobs, params.prompt_logprobs))
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


FUZZ_OBJECTS = int(os.environ.get("MINISGL_FUZZ_OBJECTS", "10000"))
LIMITS = RequestLimits(context_tokens=4096, pool_tokens=4096, allow_client_template=True)
CHAT = b'[{"role": "user", "content": "hi"}]'


@pytest.mark.slow
def test_hostile_objects_are_accepted_within_the_workers_ranges_or_refused_by_name(byte_level: Tokenizer) -> None:
    """MINISGL_FUZZ_OBJECTS of them (a million under `make fuzz`), through the stub's half and the engine's."""
    random = Random(20260101)
    accepted = 0
    for number in range(FUZZ_OBJECTS):
        given, also = hostile_object(random), hostile_object(random) if number % 4 == 0 else ""
        try:
            _check_accepted(_through_the_server(given, also, byte_level, chat=number % 4 == 1), byte_level)
            accepted += 1
        except (InvalidRequest, UnsupportedFeature) as refused:
            message = str(refused)
            assert refused.field and message.startswith(f"{refused.field}: "), (given, also)
            assert message.isascii() and message.isprintable() and len(message) < 400, (given, also)
        except Exception as error:
            raise AssertionError(f"object {number}: {given[:500]} with {also[:500]}") from error
    assert FUZZ_OBJECTS * 0.05 < accepted < FUZZ_OBJECTS * 0.95  # the generator reaches both sides


def _through_the_server(given: str, also: str, tokenizer: Tokenizer, chat: bool) -> Accepted:
    """given: the sampling_parameters tensor, also: Triton's request parameters; as the stub and the text actor do."""
    beside = read_parameters(also)
    request = Request(
        id=RequestId(1),
        text_input=None,
        parameters=merge_sampling(given.encode("utf-8", "surrogatepass"), beside.sampling),
        stream=beside.options.get("stream", False),
        exclude_input_in_output=None,
        input_ids=None if chat else pack_tokens([65, 66, 67]),
        messages=CHAT if chat else None,
        timeout_us=beside.timeout_us,
    )
    return validate_request(request, tokenizer, LIMITS, lambda: 5)


def _check_accepted(accepted: Accepted, tokenizer: Tokenizer) -> None:
    """What the worker and the scheduler document of what they take."""
    last = accepted.num_samples - 1
    assert 0 <= last < 128
    sequence = _last(accepted)
    assert Decoder[Sequence](Sequence).decode(encode(sequence)) == sequence  # the wire holds it, types and all
    sampling = sequence.sampling
    assert sampling.temperature == 0 or 1e-4 <= sampling.temperature <= 100
    assert 0 <= sampling.top_k < tokenizer.vocab_size and 1 / tokenizer.vocab_size <= sampling.top_p <= 1
    assert 0 <= sampling.min_p <= 1 and -1 <= sampling.logprobs <= 20 and -1 <= sampling.prompt_logprobs <= 20
    assert 0 <= sampling.seed < 2**63 and sampling.sample_index == last
    if sampling.rules is not None:
        _check_rules(sampling.rules, tokenizer.vocab_size)
    assert 1 <= sequence.max_new_tokens <= LIMITS.sequence_tokens - accepted.num_input_tokens
    assert list(sequence.stop_token_ids) == sorted(set(sequence.stop_token_ids))
    assert all(0 <= token < tokenizer.vocab_size for token in sequence.stop_token_ids)
    assert -(2**31) <= sequence.priority < 2**31
    assert sequence.deadline_s is None or 1.0 < sequence.deadline_s < math.inf


def _last(accepted: Accepted) -> Sequence:
    """That of the last of its answers."""
    told = accepted.sequences(SequenceId(1), arrived_s=1.0)
    return sequences_of(told)[-1] if isinstance(told, Samples) else told


def _check_rules(rules: TokenRules, vocab_size: int) -> None:
    assert -2 <= rules.presence_penalty <= 2 and -2 <= rules.frequency_penalty <= 2
    assert 0.01 <= rules.repetition_penalty <= 100
    assert count_tokens(rules.bias_ids) == len(rules.biases) and all(-100 <= bias <= 100 for bias in rules.biases)
    assert all(rules.bad_words) and bool(rules.min_tokens) == bool(rules.held_ids)
    for packed in (rules.bias_ids, rules.allowed_ids, rules.held_ids, *rules.bad_words):
        assert all(0 <= token < vocab_size for token in unpack_tokens(packed))
    for packed in (rules.bias_ids, rules.allowed_ids, rules.held_ids):
        assert list(unpack_tokens(packed)) == sorted(set(unpack_tokens(packed)))


@pytest.mark.slow
def test_whatever_passes_draws_a_token_that_its_rules_allow(byte_level: Tokenizer) -> None:
    """On the worker's own path from raw logits to a token, with a prompt and an output in which bad words may begin."""
    random, generator = Random(7), torch.Generator().manual_seed(7)
    vocab, drawn = byte_level.vocab_size, 0
    known = torch.tensor([[65, 66, 67, 65, 70, 71, 65, 0]])
    for _ in range(FUZZ_OBJECTS // 5):
        try:
            accepted = _through_the_server(hostile_object(random), "", byte_level, chat=False)
        except (InvalidRequest, UnsupportedFeature):
            continue
        sampling = _last(accepted).sampling
        logits = torch.randn(1, vocab, generator=generator) * random.choice([0.0, 1.0, 30.0, 1e4])
        book = RuleBook(known, np.array([3]), vocab)
        book.put(0, sampling.rules)
        columns = SamplingColumns.greedy(1)
        columns.put(0, sampling)
        slots, positions = np.array([0]), np.array([7])
        rules = book.of(slots, positions)
        (token,) = draw_tokens(logits, columns.take(slots), positions, rules, None).tolist()
        assert 0 <= token < vocab
        if sampling.rules is not None:
            allowed = unpack_tokens(sampling.rules.allowed_ids)
            assert not allowed or token in allowed
            assert sampling.rules.min_tokens <= 4 or token not in unpack_tokens(sampling.rules.held_ids)
            assert pack_tokens([token]) not in sampling.rules.bad_words
        drawn += 1
    assert drawn > FUZZ_OBJECTS // 100
