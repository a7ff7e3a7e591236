"""How much memory the tensors of a model take, however they are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from torch import Tensor


def weight_bytes(model: object) -> int:
    """Of all tensors below the dataclasses of a decoder. One that several layers share (a tied head) counts once."""
    return sum({(tensor.data_ptr(), tensor.nbytes): tensor.nbytes for tensor in _tensors(model)}.values())


def _tensors(part: object) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for inner in part:
            yield from _tensors(inner)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))
