"""Request parameters: whose is which key, and what happens to a value given in two places."""

from __future__ import annotations

import json

import pytest

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.serving.parameters import (
    merge_option,
    merge_sampling,
    merge_timeout,
    read_parameters,
)
from minisgl_backend.text.parameters import BOOL_OPTIONS


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


@pytest.mark.parametrize(("value", "read"), [(True, True), ("false", False), ("True", True), (1, True), ("0", False)])
@pytest.mark.parametrize("name", BOOL_OPTIONS)
def test_options_of_ours_are_understood_as_parameters(name: str, value: object, read: bool) -> None:
    parameters = read_parameters(json.dumps({name: value}))
    assert parameters.options == {name: read}
    assert parameters.sampling == {}


@pytest.mark.parametrize("value", [2, "yes", 0.5, ""])
def test_an_option_that_is_no_boolean_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidRequest, match=r"^exclude_input_in_output: must be true or false"):
        read_parameters(json.dumps({"exclude_input_in_output": value}))


@pytest.mark.parametrize("key", ["text_input", "input_ids", "messages", "tools", "image", "sampling_parameters"])
def test_inputs_that_must_be_tensors_are_refused_as_parameters(key: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{key}: must be an input tensor"):
        read_parameters(json.dumps({key: "x"}))


@pytest.mark.parametrize(("value", "read"), [(0, 0), ("0", 0), (7, 7), ("7", 7), (7.0, 7)])
def test_a_timeout_is_a_number_however_it_is_written(value: object, read: int) -> None:
    parameters = read_parameters(json.dumps({"timeout": value}))
    assert (parameters.timeout_us, parameters.sampling) == (read, {})


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ('{"timeout": -1}', "timeout: must be an integer from 0 to 9007199254740992, got -1"),
        ('{"timeout": 0.5}', "timeout: must be an integer from 0 to 9007199254740992, got 0.5"),
    ],
)
def test_a_timeout_out_of_range_is_refused(raw: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_parameters(raw)
    assert str(caught.value) == says


def test_the_two_places_of_a_timeout_must_agree() -> None:
    assert (merge_timeout(0, 5), merge_timeout(5, 0), merge_timeout(5, 5), merge_timeout(0, 0)) == (5, 5, 5, 0)
    with pytest.raises(InvalidRequest, match=r"^timeout: "):
        merge_timeout(5, 6)


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


@pytest.mark.parametrize(
    ("tensor", "parameter"),
    [('"5"', 5), ("5", "5"), ("5.0", 5), ("true", True), ("true", "True"), ("[1, 2]", "[1,2]"), ('"x"', "x")],
)
def test_the_same_value_in_both_places_is_accepted_however_it_is_written(tensor: str, parameter: object) -> None:
    raw = f'{{"max_tokens":{tensor}}}'.encode()
    assert json.loads(merge_sampling(raw, {"max_tokens": parameter})) == json.loads(raw)


def test_different_values_in_both_places_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^max_tokens: "):
        merge_sampling(b'{"max_tokens":5}', {"max_tokens": 6})


def test_three_places_make_one_set_and_must_agree() -> None:
    merged = merge_sampling(b'{"top_k": 5}', {"stop_token_ids": [1, 2]}, {"stop_token_ids": "[1,2]", "seed": 1})
    assert json.loads(merged) == {"top_k": 5, "stop_token_ids": [1, 2], "seed": 1}
    with pytest.raises(InvalidRequest, match=r"^stop_token_ids: has different values in two places"):
        merge_sampling(b"", {"stop_token_ids": [1, 2]}, {"stop_token_ids": "[1]"})


def test_a_key_of_the_client_in_a_message_is_short_and_plain() -> None:
    for key in ("\ud800", "k" * 100_000, "a\nb", "é"):
        raw = json.dumps({key: 1}).encode()
        with pytest.raises(InvalidRequest) as caught:
            merge_sampling(raw, {key: 2})
        assert str(caught.value).isascii() and str(caught.value).isprintable() and len(str(caught.value)) < 200


def test_values_nested_as_deep_as_the_parser_takes_are_compared_or_refused() -> None:
    """Reading, comparing and writing each have a limit of their own: an exception of Python is no answer."""
    for depth in range(900, 1000, 3):
        nested = "[" * depth + "]" * depth
        try:
            merge_sampling(f'{{"stop": {nested}}}'.encode(), {"stop": nested})
        except InvalidRequest as refused:
            assert "nested too deeply" in str(refused)


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
