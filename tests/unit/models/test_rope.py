"""What config.json says of rotary embeddings → frequencies, factors and limits: every spelling, every refusal."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.config import resolve_config
from minisgl_backend.errors import ConfigError, ModelUnsupported
from minisgl_backend.models.fields import ConfigFields
from minisgl_backend.models.folder import parse_model_spec
from minisgl_backend.models.limits import context_limit
from minisgl_backend.models.load import rotary_table
from minisgl_backend.models.rope import DynamicNtk, Linear, Llama3, LongRope, RopeSpec, Unscaled, Yarn
from minisgl_backend.models.rope_fields import read_ropes

HEAD_DIM = 64
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.01 * pair for pair in range(HEAD_DIM // 2)],
    "long_factor": [1.0 + pair for pair in range(HEAD_DIM // 2)],
    "original_max_position_embeddings": 4096,
}
GEMMA = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "partial_rotary_factor": 1.0}


def read(defaults: dict[str, Any] | None = None, **values: Any) -> RopeSpec:
    (rope,) = read_ropes(ConfigFields({"max_position_embeddings": 131072, **values}, defaults or {}), HEAD_DIM)
    return rope


def plain(theta: float = 10000.0, rotary_dim: int = HEAD_DIM) -> list[float]:
    return [math.exp(-math.log(theta) * 2 * pair / rotary_dim) for pair in range(rotary_dim // 2)]


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": None, "type": "linear", "factor": 2}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1.0},
        },
    ],
)
def test_a_rope_is_read_from_every_place_it_was_ever_written_to(fields: dict[str, Any]) -> None:
    assert read(**fields) == RopeSpec(5e5, HEAD_DIM, Linear(2.0))


@pytest.mark.parametrize("nothing", [{}, {"rope_scaling": None}, {"rope_parameters": {}}, {"rope_scaling": {}}])
def test_a_config_that_scales_nothing_is_plain(nothing: dict[str, Any]) -> None:
    rope = read(**nothing)
    assert rope == RopeSpec(10000.0, HEAD_DIM, Unscaled()) and rope.attention_factor == 1.0
    assert rope.frequencies(131072) == pytest.approx(plain(), rel=1e-14)


def test_what_config_leaves_out_is_what_the_family_says() -> None:
    defaults = {"rope_theta": 150000.0, "rope_parameters": {**YARN, "truncate": False}}
    assert read(defaults).scaling == Yarn(4.0, 32768, 0.1 * math.log(4.0) + 1.0, truncate=False)
    assert read(defaults).theta == 150000.0
    assert read(defaults, rope_scaling={"type": "linear", "factor": 3.0}) == RopeSpec(150000.0, HEAD_DIM, Linear(3.0))


def test_the_original_length_beside_the_object_counts_before_the_one_inside() -> None:
    assert read(rope_scaling=YARN, original_max_position_embeddings=1024).scaling == replace(
        read(rope_scaling=YARN).scaling,  # type: ignore[type-var]
        original_tokens=1024,
    )


def test_a_stretch_that_is_not_given_is_the_quotient_of_both_lengths() -> None:
    without_factor = {key: value for key, value in YARN.items() if key != "factor"}
    assert read(rope_scaling=without_factor) == read(rope_scaling=YARN)
    sharpness = math.sqrt(1 + math.log(32) / math.log(4096))
    assert read(rope_scaling=LONGROPE).attention_factor == pytest.approx(sharpness, rel=1e-15)
    assert read(rope_scaling={**LONGROPE, "factor": 0.5}).attention_factor == 1.0


def test_linear_turns_every_pair_slower() -> None:
    rope = read(rope_scaling={"type": "linear", "factor": 4.0})
    assert rope.frequencies(131072) == pytest.approx([frequency / 4 for frequency in plain()], rel=1e-14)


def test_llama3_keeps_fast_turns_slows_slow_ones_and_blends_between() -> None:
    rope = read(rope_theta=5e5, rope_scaling=LLAMA3)
    assert rope.scaling == Llama3(8.0, 1.0, 4.0, 8192)
    blended = 0
    for scaled, frequency in zip(rope.frequencies(131072), plain(5e5), strict=True):
        turns = 8192 * frequency / (2 * math.pi)
        if turns > 4:
            assert scaled == pytest.approx(frequency, rel=1e-14)
        elif turns < 1:
            assert scaled == pytest.approx(frequency / 8, rel=1e-14)
        else:
            blended += 1
            assert frequency / 8 < scaled < frequency
    assert blended > 1


def test_yarn_keeps_fast_turns_slows_slow_ones_and_sharpens_the_attention() -> None:
    rope = read(rope_scaling=YARN)
    assert rope.scaling == Yarn(4.0, 32768, 0.1 * math.log(4.0) + 1.0, 32.0, 1.0, truncate=True)
    scaled, turns = rope.frequencies(131072), [32768 * frequency / (2 * math.pi) for frequency in plain()]
    for pair, frequency in enumerate(plain()):
        share = scaled[pair] / frequency
        if turns[pair] > 32 * 1.34:  # the ramp starts at a whole pair, up to 10000 ^ (2 / 64) = 1.33 times sooner
            assert share == pytest.approx(1.0, rel=1e-14)
        elif turns[pair] < 1 / 1.34:
            assert share == pytest.approx(1 / 4, rel=1e-14)
        else:
            assert 1 / 4 - 1e-14 < share < 1.0 + 1e-14
    assert any(0.3 < slow / fast < 0.9 for slow, fast in zip(scaled, plain(), strict=True))


def test_yarn_takes_its_sharpness_from_what_is_given() -> None:
    assert read(rope_scaling={**YARN, "attention_factor": 1.25}).attention_factor == 1.25
    scales = {"mscale": 0.707, "mscale_all_dim": 1.0}
    expected = (0.0707 * math.log(4) + 1) / (0.1 * math.log(4) + 1)
    assert read(rope_scaling={**YARN, **scales}).attention_factor == pytest.approx(expected, rel=1e-15)
    only_one = {"mscale": 0.707, "mscale_all_dim": 0}
    assert read(rope_scaling={**YARN, **only_one}).attention_factor == read(rope_scaling=YARN).attention_factor


def test_dynamic_scales_theta_by_the_context_limit_and_only_beyond_the_original_length() -> None:
    rope = read(rope_scaling={"type": "dynamic", "factor": 4.0}, max_position_embeddings=4096)
    assert rope.scaling == DynamicNtk(4.0, 4096)
    for short in (1, 4095, 4096):
        assert rope.frequencies(short) == pytest.approx(plain(), rel=1e-14)
    stretched = plain(10000.0 * (4.0 * 2 - 3.0) ** (HEAD_DIM / (HEAD_DIM - 2)))
    assert rope.frequencies(8192) == pytest.approx(stretched, rel=1e-13)


def test_longrope_chooses_its_divisors_by_the_context_limit() -> None:
    rope = read(rope_scaling=LONGROPE)
    assert isinstance(rope.scaling, LongRope)
    for limit, divisors in ((4096, LONGROPE["short_factor"]), (4097, LONGROPE["long_factor"])):
        assert isinstance(divisors, list)
        expected = [frequency / divisor for frequency, divisor in zip(plain(), divisors, strict=True)]
        assert rope.frequencies(limit) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_longrope_is_known_by_the_names_of_its_first_checkpoints(name: str) -> None:
    assert read(rope_scaling={**LONGROPE, "rope_type": name}) == read(rope_scaling=LONGROPE)


def test_a_partial_rotary_factor_is_read_from_both_places_where_the_family_has_one() -> None:
    defaults = {"partial_rotary_factor": 0.5}
    assert read(defaults).rotary_dim == 32
    assert read(defaults, partial_rotary_factor=0.75).rotary_dim == 48
    assert read(defaults, rope_parameters={"partial_rotary_factor": 0.25}).rotary_dim == 16
    assert read(defaults, partial_rotary_factor=1).rotary_dim == 64
    assert read(defaults).frequencies(64) == pytest.approx(plain(rotary_dim=32), rel=1e-14)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default"},
                "full_attention": {"rope_type": "linear", "factor": 8.0},
            }
        },
    ],
)
def test_layers_with_a_window_have_a_rope_of_their_own_in_gemma(fields: dict[str, Any]) -> None:
    full, sliding = read_ropes(ConfigFields({"max_position_embeddings": 131072, **fields}, GEMMA), HEAD_DIM)
    assert full == RopeSpec(1e6, HEAD_DIM, Linear(8.0)) and sliding == RopeSpec(1e4, HEAD_DIM)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_scaling": {"type": "bogus"}},
            r"json: rope_scaling: type 'bogus' is not supported; default, linear, dy",
        ),
        (
            {"rope_parameters": {"rope_type": "mrope"}},
            r"json: rope_parameters: rope_type 'mrope' is not supported; def",
        ),
        ({"rope_scaling": {"type": 3}}, "type 3 is not supported"),
        ({"rope_scaling": [1]}, r"rope_scaling must be an object, got \[1\]"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor must be a positive number, got None"),
        (
            {"rope_scaling": {"type": "linear", "factor": "2"}},
            "rope_scaling: factor must be a positive number, got '2'",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 0}}, "rope_scaling: factor must be a positive number"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor must be above low_freq_factor"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: factor must be a positive number, got None"),
        ({"rope_scaling": {**YARN, "beta_fast": 0.5}}, "beta_fast must not be below beta_slow"),
        ({"rope_scaling": {**YARN, "truncate": "no"}}, "rope_scaling: truncate must be true or false"),
        ({"rope_scaling": {**YARN, "attention_factor": -1}}, "attention_factor must be a positive number"),
        ({"rope_scaling": YARN, "rope_theta": 1}, "yarn needs a rope_theta above 1"),
        (
            {"rope_scaling": {**YARN, "original_max_position_embeddings": 0.5}},
            "original_max_position_embeddings must be",
        ),
        ({"original_max_position_embeddings": 1, "rope_scaling": LONGROPE}, "of at least 2"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, "long_factor must have 32 numbers, one a pair, got 1"),
        ({"rope_scaling": {**LONGROPE, "short_factor": None}}, "short_factor must be a list of positive numbers"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [0] * 32}}, "short_factor must be a list of positive numbers"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type is not supported by this"),
        ({"partial_rotary_factor": 0.5}, "json: partial_rotary_factor 0.5 is not supported by this architecture"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "json: rope_parameters: partial_rotary_factor 0.5 is not",
        ),
        ({"rope_theta": -1.0}, "json: rope_theta must be a positive number"),
        ({"rope_parameters": {"rope_theta": True}}, "rope_parameters: rope_theta must be a positive number, got True"),
        ({"rope_interleaved": True}, "rope_interleaved True is not supported"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelUnsupported, match=message):
        read(**fields)


def test_a_share_of_the_head_that_is_no_even_number_is_refused() -> None:
    for share in (1.5, 33 / 64, 0.01):
        with pytest.raises(ModelUnsupported, match="must be an even number of dimensions"):
            read({"partial_rotary_factor": 1.0}, partial_rotary_factor=share)
    with pytest.raises(ModelUnsupported, match="dynamic needs at least 4 dimensions"):
        dynamic = {"type": "dynamic", "factor": 2.0}
        read({"partial_rotary_factor": 1.0}, partial_rotary_factor=2 / 64, rope_scaling=dynamic)


def test_a_gemma_without_a_rope_for_one_of_its_layer_types_is_refused() -> None:
    fields = {"rope_parameters": {"full_attention": {"rope_type": "default"}}}
    with pytest.raises(ModelUnsupported, match=r"rope_parameters\.sliding_attention must be an object, got None"):
        read_ropes(ConfigFields(fields, GEMMA), HEAD_DIM)


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 4 * HEAD_DIM,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("stated", "scaling", "own", "settable"),
    [
        (131072, None, 131072, 131072),
        (131072, LLAMA3, 131072, 131072),
        (131072, LONGROPE, 131072, 131072),
        (131072, YARN, 131072, 131072),  # stated after the stretch
        (32768, YARN, 131072, 131072),  # and before
        (40960, YARN, 131072, 131072),  # or with room for an answer
        (32768, {"type": "yarn", "factor": 4.0}, 131072, 131072),
        (16384, {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384, 16384),
        (4096, {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384, 16384),
        (4096, {"type": "linear", "factor": 4.0}, 4096, 16384),
        (4096, {"type": "dynamic", "factor": 2.0}, 4096, 8192),
    ],
)
def test_a_context_limit_is_never_stretched_twice(
    stated: int, scaling: dict[str, Any] | None, own: int, settable: int, tmp_path: Path
) -> None:
    config = {**CONFIG, "max_position_embeddings": stated, "rope_scaling": scaling}
    assert parse_model_spec(config, {}).context_tokens == own
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_limit(resolve_config(), tmp_path) == own
    assert context_limit(resolve_config({"context_tokens": settable}), tmp_path) == settable
    with pytest.raises(ConfigError, match=f"is {settable + 1}, but the model ends at {settable}"):
        context_limit(resolve_config({"context_tokens": settable + 1}), tmp_path)


@pytest.mark.parametrize("scaling", [YARN, LONGROPE, {"rope_type": "dynamic", "factor": 4.0}])
def test_a_table_is_of_the_engines_limit_and_has_the_attention_factor_in_it(scaling: dict[str, Any]) -> None:
    rope = read(rope_scaling=scaling, max_position_embeddings=8192)
    limit = 8200
    table = rotary_table(rope, limit, torch.device("cpu"))
    assert table.cos.shape == table.sin.shape == (limit, HEAD_DIM // 2)
    position = limit - 1
    for pair, frequency in enumerate(rope.frequencies(limit)):
        for got, exact in ((table.cos, math.cos), (table.sin, math.sin)):
            assert got[position, pair].item() == pytest.approx(
                rope.attention_factor * exact(position * frequency), abs=1e-7
            )
