"""Which layers attend to a window only, and what else they do differently. Pure, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.models.fields import ConfigFields
from minisgl_backend.models.spec import ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"


def with_windows(fields: ConfigFields, spec: ModelSpec, slides: Callable[[int], bool]) -> ModelSpec:
    """The spec with a window of `sliding_window` positions in the layers that `layer_types` names.

    slides: the family's rule for a layer's index, where config.json has no `layer_types`. Raises ModelUnsupported: a
    list of another length, another type of layer, layers with a window but no `sliding_window`.
    """
    types = fields.strings("layer_types")
    if types is None:
        types = tuple(SLIDING if slides(index) else FULL for index in range(spec.num_layers))
    if len(types) != spec.num_layers:
        raise ModelUnsupported(
            f"{fields.place}: layer_types has {len(types)} entries, num_hidden_layers is {spec.num_layers}"
        )
    for name in types:
        if name not in (FULL, SLIDING):
            raise ModelUnsupported(
                f"{fields.place}: layer_types entry {name!r} is not supported; {FULL}, {SLIDING} are"
            )
    window = fields.positive("sliding_window") if SLIDING in types else 0
    layers = zip(spec.layers, types, strict=True)
    return replace(spec, layers=tuple(replace(layer, window=window * (name == SLIDING)) for layer, name in layers))


def with_local_ropes(spec: ModelSpec) -> ModelSpec:
    """Of the two ropes of `read_ropes`, the second for the layers with a window, the first for the others."""
    layers = tuple(replace(layer, rope=1 if layer.window else 0) for layer in spec.layers)
    return replace(spec, layers=layers)
