"""Request parameters: whose is which key, and what happens to a value given in two places."""

from __future__ import annotations

import json

import pytest

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.serving.parameters import merge_option, merge_sampling, read_parameters


def test_sampling_keys_pass_unvalidated_as_numbers_strings_and_booleans() -> None:
    raw = '{"temperature":0.5,"max_tokens":"5","ignore_eos":true,"no_such_key":1}'
    assert read_parameters(raw).sampling == json.loads(raw)


@pytest.mark.parametrize("raw", ["", "{}"])
def test_no_parameters_are_none(raw: str) -> None:
    assert read_parameters(raw).sampling == {}
    assert read_parameters(raw).options == {}


@pytest.mark.parametrize("key", ["id", "binary_data_output", "triton_enable_empty_final_response"])
def test_what_triton_has_consumed_itself_does_not_reach_the_sampler(key: str) -> None:
    assert read_parameters(json.dumps({key: True})).sampling == {}


@pytest.mark.parametrize(("value", "read"), [(True, True), ("false", False), ("True", True)])
def test_options_of_ours_are_understood_as_parameters(value: object, read: bool) -> None:
    parameters = read_parameters(json.dumps({"stream": value}))
    assert parameters.options == {"stream": read}
    assert parameters.sampling == {}


@pytest.mark.parametrize("value", [1, "yes", 0.5])
def test_an_option_that_is_no_boolean_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidRequest, match=r"^exclude_input_in_output: must be true or false"):
        read_parameters(json.dumps({"exclude_input_in_output": value}))


@pytest.mark.parametrize("key", ["text_input", "sampling_parameters"])
def test_inputs_that_must_be_tensors_are_refused_as_parameters(key: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{key}: must be an input tensor"):
        read_parameters(json.dumps({key: "x"}))


@pytest.mark.parametrize("key", ["image", "messages", "return_logprobs", "return_finish_reason", "stop_words"])
def test_inputs_that_are_not_built_yet_are_refused_by_name(key: str) -> None:
    with pytest.raises(UnsupportedFeature, match=f"^{key}: "):
        read_parameters(json.dumps({key: True}))


@pytest.mark.parametrize("key", ["timeout", "priority"])
def test_deadlines_and_priorities_without_effect_are_refused_and_their_zero_is_none(key: str) -> None:
    for value in (0, "0"):
        assert read_parameters(json.dumps({key: value})).sampling == {}
    for value in (1, "1", 2.5):
        with pytest.raises(UnsupportedFeature, match=f"^{key}: "):
            read_parameters(json.dumps({key: value}))


@pytest.mark.parametrize("key", ["sequence_id", "sequence_start", "sequence_end"])
def test_sequences_are_refused(key: str) -> None:
    with pytest.raises(UnsupportedFeature, match=r"^sequence_id: "):
        read_parameters(json.dumps({key: 1}))


@pytest.mark.parametrize("raw", ["{", "[]", "3", '{"a":}', "[" * 100_000])
def test_what_is_no_json_object_is_refused(raw: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^parameters: "):
        read_parameters(raw)


def test_the_tensor_alone_is_passed_on_byte_for_byte() -> None:
    odd = b'{"temperature": 5e-1, "temperature": 1}\xff'
    assert merge_sampling(odd, {}) == odd
    assert merge_sampling(b"", {}) == b""


def test_parameters_alone_become_one_json_object() -> None:
    assert json.loads(merge_sampling(b"", {"temperature": 0.5})) == {"temperature": 0.5}


def test_both_places_together_make_one_set() -> None:
    merged = merge_sampling(b'{"stop":["a"],"top_k":5}', {"temperature": "0.5", "top_k": 5})
    assert json.loads(merged) == {"stop": ["a"], "top_k": 5, "temperature": "0.5"}


@pytest.mark.parametrize(("tensor", "parameter"), [('"5"', 5), ("5", "5"), ("5.0", 5), ("true", True)])
def test_the_same_value_in_both_places_is_accepted_however_it_is_written(tensor: str, parameter: object) -> None:
    raw = f'{{"max_tokens":{tensor}}}'.encode()
    assert json.loads(merge_sampling(raw, {"max_tokens": parameter})) == json.loads(raw)


def test_different_values_in_both_places_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^max_tokens: "):
        merge_sampling(b'{"max_tokens":5}', {"max_tokens": 6})


@pytest.mark.parametrize("raw", [b"{", b"[1]", b"\xff\xfe", b'"x"'])
def test_a_tensor_that_is_no_json_object_is_refused_when_it_must_be_read(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^sampling_parameters: "):
        merge_sampling(raw, {"temperature": 1})


def test_a_key_named_twice_is_refused_in_either_place() -> None:
    with pytest.raises(InvalidRequest, match=r"^sampling_parameters: names 'top_k' twice"):
        merge_sampling(b'{"top_k":1,"top_k":2}', {"temperature": 1})
    with pytest.raises(InvalidRequest, match=r"^parameters: names 'seed' twice"):
        read_parameters('{"seed":1,"seed":1}')


def test_an_oversized_object_is_refused_before_it_is_parsed() -> None:
    no_json = "x" * ((1 << 20) + 1)  # read, it would be refused for another reason
    with pytest.raises(InvalidRequest, match=r"^parameters: must hold at most 1048576 bytes"):
        read_parameters(no_json)
    with pytest.raises(InvalidRequest, match=r"^sampling_parameters: must hold at most 1048576 bytes"):
        merge_sampling(no_json.encode(), {"temperature": 1})


@pytest.mark.parametrize(
    ("tensor", "parameters", "merged"),
    [(None, {}, None), (True, {}, True), (None, {"stream": False}, False), (True, {"stream": True}, True)],
)
def test_an_option_comes_from_where_it_is_given(
    tensor: bool | None, parameters: dict[str, bool], merged: bool | None
) -> None:
    assert merge_option("stream", tensor, parameters) is merged


def test_an_option_with_two_values_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^stream: "):
        merge_option("stream", False, {"stream": True})
