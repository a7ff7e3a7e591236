"""What config.json of each family means, against transformers' config classes."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.family_cases import FAMILY_CASES
from fakes.hub_configs import HUB_CONFIGS
from minisgl_backend.models.folder import parse_model_spec
from minisgl_backend.models.registry import FAMILIES


def config_class(architecture: str) -> Any:
    import transformers

    return getattr(transformers, architecture).config_class


def written_by_transformers(architecture: str, **fields: Any) -> dict[str, Any]:
    """Every field that the class has, as transformers 5 writes it: those given, and the defaults of the others."""
    config = config_class(architecture).from_dict(copy.deepcopy(fields))
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {**written, "architectures": [architecture]}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_config_that_leaves_everything_out_means_what_transformers_makes_of_it(architecture: str) -> None:
    """But for the end tokens: a class's default names tokens of one tokenizer, and a folder says its own."""
    bare = parse_model_spec({"architectures": [architecture]}, {})
    full = parse_model_spec(written_by_transformers(architecture), {})
    assert bare == replace(full, eos_token_ids=())


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_default_of_a_family_is_that_of_the_class(architecture: str) -> None:
    """Those of `rope_parameters` by their names in configs of transformers 4."""
    written = written_by_transformers(architecture)
    if not written.get("use_sliding_window", True):
        written.pop("sliding_window")  # the class drops a window that is not used
    rope = written.pop("rope_parameters")
    if "full_attention" in rope:
        local = {"rope_local_base_freq": rope["sliding_attention"]["rope_theta"]}
        rope = {**rope["full_attention"], **local, "sliding_window_pattern": written.get("_sliding_window_pattern")}
    known = {**rope, **written}
    defaults = FAMILIES[architecture].defaults
    assert {key: value for key, value in defaults.items() if key in known and value != known[key]} == {}


def as_transformers_4_wrote_it(config: dict[str, Any]) -> dict[str, Any]:
    """The spelling of most configs on the hub: rope_theta and rope_scaling apart, torch_dtype."""
    config = dict(config)
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:  # Gemma 3
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config.update({key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope})
    scaling = {key: value for key, value in rope.items() if key not in config and key != "rope_theta"}
    config["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
    config["torch_dtype"] = config.pop("dtype")
    return config


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_the_spelling_of_older_configs_means_the_same(name: str, tmp_path: Path) -> None:
    config = json.loads((FAMILY_CASES[name].write(tmp_path) / "config.json").read_text())
    assert parse_model_spec(as_transformers_4_wrote_it(config), {}) == parse_model_spec(config, {})


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_model_type_of_a_family_is_that_of_the_class(architecture: str) -> None:
    assert FAMILIES[architecture].model_type == config_class(architecture).model_type


@pytest.mark.parametrize("name", HUB_CONFIGS)
def test_a_published_config_means_what_transformers_makes_of_it(name: str) -> None:
    """transformers reads the file and writes it anew, in its own spelling and with every default: the same model.

    But for the end tokens, which are left out here, and which transformers then takes from the class.
    """
    published = HUB_CONFIGS[name]
    rewritten = parse_model_spec(written_by_transformers(published["architectures"][0], **published), {})
    assert parse_model_spec(published, {}) == replace(rewritten, eos_token_ids=())
