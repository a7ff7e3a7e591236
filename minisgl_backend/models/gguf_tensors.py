"""The tensors of a GGUF file by the names of a family's checkpoints: mapped, and unpacked when they are read.

See checkpoint.TensorSource; beside it a matrix can be had as it is stored (`stored`), for `quantization` = gguf.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.layers.quant.gguf import GgufRows, unpack
from minisgl_backend.models.gguf_config import gguf_family
from minisgl_backend.models.gguf_file import GgufFile, GgufTensor
from minisgl_backend.models.registry import FAMILIES
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensors import expected_tensors

_PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NOT_WEIGHTS = ("rope_freqs.weight",)  # read into the configuration


class GgufTensors:
    """See TensorSource. Raises ModelUnsupported."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self._file = GgufFile(path)
        self._family = gguf_family(self._file)
        self._spec = spec
        self._data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        self._places = _places(self._file)
        names = FAMILIES[spec.architecture].names
        theirs, ours = expected_tensors(spec, self._family.names), expected_tensors(spec, names)
        self._their = dict(zip(ours, theirs, strict=True))
        self._heads = {}
        if self._family.rotary_pairs:
            for index in range(spec.num_layers):
                layer = names.layer.format(layer=index)
                for name, heads in ((names.q, spec.num_heads), (names.k, spec.num_kv_heads)):
                    for part in ("weight", "bias"):
                        self._heads[f"{layer}.{name}.{part}"] = heads

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """A tensor that no name of ours stands for keeps its own, so that it is named as surplus."""
        known = {their: our for our, their in self._their.items()}
        return {known.get(their, their): place.shape for their, place in self._places.items()}

    @property
    def quantised(self) -> bool:
        """Whether any tensor is."""
        return any(place.type.name not in _PLAIN_TYPES for place in self._places.values())

    def read(self, name: str) -> Tensor:
        place, data = self._bytes(name)
        plain = _PLAIN_TYPES.get(place.type.name)
        values = unpack(place.type, data) if plain is None else data.view(plain).reshape(place.shape)
        shift = self._family.norm_shift
        return values - shift if shift and name.endswith("norm.weight") else values

    def stored(self, name: str, device: torch.device) -> GgufRows | None:
        """A matrix as it lies in the file, its rows in our order; None: it is not quantised."""
        place, data = self._bytes(name)
        return None if place.type.name in _PLAIN_TYPES else GgufRows(place.type, data.to(device), place.shape[-1])

    def _bytes(self, name: str) -> tuple[GgufTensor, Tensor]:
        """→ uint8 [rows, bytes of a row], of a vector [values, bytes of a value]: a view of the mapped file, but for
        rows that have to be put into our order.
        """
        place = self._places[self._their[name]]
        row_bytes = place.size // place.shape[0]
        data = self._data[place.offset : place.offset + place.size].reshape(place.shape[0], row_bytes)
        heads = self._heads.get(name)
        return place, data if heads is None else unpaired(data, heads)


def unpaired(rows: Tensor, heads: int) -> Tensor:
    """Rows of a q or k projection [heads * head_dim, …] from llama.cpp's order to transformers', a new tensor.

    llama.cpp rotates neighbouring rows (2i, 2i+1) of a head, transformers rows (i, i + head_dim/2); its converter
    interleaves the two halves of every head, and this takes them apart again.
    """
    half = len(rows) // heads // 2
    return rows.reshape(heads, half, 2, -1).transpose(1, 2).reshape(rows.shape)


def _places(file: GgufFile) -> dict[str, GgufTensor]:
    """Tensors of three dimensions are experts one after another: `blk.0.ffn_up_exps.weight` →
    `blk.0.ffn_up_exps.7.weight`.
    """
    places = {}
    for name, tensor in file.tensors.items():
        if name in _NOT_WEIGHTS:
            continue
        if len(tensor.shape) == 1 and tensor.type.name not in _PLAIN_TYPES:
            raise ModelUnsupported(f"{file.path.name}: vector {name!r} has type {tensor.type.name}")
        if len(tensor.shape) < 3:
            places[name] = tensor
            continue
        stem, _, part = name.rpartition(".")
        if len(tensor.shape) > 3 or not stem.endswith("_exps"):
            raise ModelUnsupported(f"{file.path.name}: tensor {name!r} has the shape {list(tensor.shape)}")
        size = tensor.size // tensor.shape[0]
        for expert in range(tensor.shape[0]):
            offset = tensor.offset + expert * size
            places[f"{stem}.{expert}.{part}"] = GgufTensor(tensor.type, tensor.shape[1:], offset, size)
    return places
