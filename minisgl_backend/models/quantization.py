"""Which models the setting `quantization` fits. Asked before any weight is read."""

from __future__ import annotations

from minisgl_backend.config import Quantization
from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.layers.quant.int4 import GROUP
from minisgl_backend.models.registry import FAMILIES
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensors import expected_tensors


def check_quantization(quantization: Quantization, spec: ModelSpec, *, gguf: bool) -> None:
    """gguf: the weights lie in a GGUF file. Raises ModelUnsupported."""
    if quantization == "none":
        return
    if quantization == "gguf" and not gguf:
        raise ModelUnsupported("setting 'quantization' is \"gguf\", but the model is no GGUF file")
    if spec.moe is not None:
        raise ModelUnsupported(
            f"setting 'quantization' is {quantization!r}, but {spec.architecture} has experts, "
            "which are not quantised by this version; leave it at 'none'"
        )
    if quantization == "int4":
        shapes = expected_tensors(spec)
        for name in quantised_tensors(spec):
            columns = shapes[name][-1]
            if columns % GROUP:
                raise ModelUnsupported(
                    f"quantization int4 needs rows that are multiples of {GROUP}, those of {name!r} are {columns} long"
                )


def quantised_tensors(spec: ModelSpec) -> tuple[str, ...]:
    """The matrices that int8 and int4 take: the products of the layers, but for routers."""
    names = FAMILIES[spec.architecture].names
    layers, router = names.layer.partition("{")[0], f".{names.router}."
    return tuple(
        name
        for name, shape in expected_tensors(spec).items()
        if len(shape) == 2 and name.startswith(layers) and router not in name
    )
