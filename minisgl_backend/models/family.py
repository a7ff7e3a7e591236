"""A family of models: one declaration. Pure, no torch.

docs/add-a-model.md adds one step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minisgl_backend.models.fields import ConfigFields
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.weight_names import WeightNames

MOST_EXPERTS = 1_024
"""Of a layer: far beyond any model, and a bound on the names of tensors that a broken config.json asks for."""


def as_llama(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    """No difference."""
    return spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What one architecture name means: everything by which it differs from Llama.

    architecture: as in `architectures` of config.json.
    model_type: as there. A folder that says both is one of this family, also where it brings code of its own
    (`auto_map`), which then is not needed.
    models: whose it is, for `minisgl models`.
    defaults: fields that config.json may leave out, with the values of transformers' class of this family.
    declare: gets the spec as a Llama of the same fields would have it and returns it with the differences. Raises
    ModelUnsupported for fields it can not honour.
    """

    architecture: str
    model_type: str
    models: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    declare: Callable[[ConfigFields, ModelSpec], ModelSpec] = as_llama
    names: WeightNames = field(default_factory=WeightNames)
