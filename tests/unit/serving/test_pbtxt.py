"""The parameters of a config.pbtxt that Triton did not hand to us."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import json_format, text_format

from minisgl_backend.serving.pbtxt import parameters
from minisgl_client.commands.serve import _model_config_messages

REPOSITORY = Path(__file__).resolve().parents[3] / "model_repository"

WRITTEN = r"""
# parameters { key: "comment" value { string_value: "no" } }
name: "x"  max_batch_size: -1, backend: 'python'
instance_group [ { kind: KIND_MODEL, count: 1 } ]
input [ { name: "a", dims: [ -1, 2 ], data_type: TYPE_FP32 }, { name: "}" } ]
parameters { key: "plain" value { string_value: "8" } }
parameters: { key: "colons", value: { string_value: "a # b" } };
parameters < key: 'single' value < string_value: 'it is "so"' > >
parameters [ { key: "listed" value { string_value: "one" " and " 'two' } }, { key: "empty" value { } } ]
parameters { key: "json" value { string_value: "{\"a\": [1, \"\\n\"]}" } }
parameters { key: "plain" value { string_value: "9" } }
version_policy: { specific { versions: [1, 2] } }
"""


def of_protobuf(text: str) -> dict[str, str]:
    config = text_format.Parse(text, _model_config_messages().ModelConfig())
    found = json_format.MessageToDict(config, preserving_proto_field_name=True).get("parameters", {})
    return {key: value.get("string_value", "") for key, value in found.items()}


def test_every_way_to_write_them_means_what_it_means_to_protobuf() -> None:
    assert parameters(WRITTEN) == of_protobuf(WRITTEN)
    assert parameters(WRITTEN)["json"] == '{"a": [1, "\\n"]}'
    assert set(parameters(WRITTEN)) == {"plain", "colons", "single", "listed", "empty", "json"}


@pytest.mark.parametrize("file", sorted(REPOSITORY.glob("*/config.pbtxt")), ids=lambda file: file.parent.name)
def test_those_of_our_own_models_are_read(file: Path) -> None:
    assert parameters(file.read_text()) == of_protobuf(file.read_text())


@pytest.mark.parametrize(
    "text",
    ["parameters {", "parameters { key: }", "input [ {", "}", ': "a"', 'name: "a', "name: [", 'name: "\\x"', "name:"],
)
def test_what_is_no_such_file_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parameters(text)
