"""The tensors of a Hugging Face folder, by name: safetensors only, mapped into memory, checked before they are read.

A tensor read here is a view of the mapped file: nothing is copied until somebody converts it, and the system can drop
and reread its pages. Pickled weights are refused: unpickling runs code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minisgl_backend.errors import ModelUnsupported

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES = ("F32", "F16", "BF16")


class TensorSource(Protocol):
    """Where a loader gets its weights: a checkpoint's files, or random numbers."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's name and shape, before any is read."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor on the host, in the source's dtype. Not to be written to."""
        ...


class Checkpoint:
    """One folder: `model.safetensors`, or the shards that `model.safetensors.index.json` maps.

    Opening reads the files' headers. Raises ModelUnsupported naming the file or tensor that is wrong.
    """

    def __init__(self, folder: Path) -> None:
        files: dict[str, Any] = {}
        self._file_of: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, file_name in _locate_tensors(folder):
            if file_name not in files:
                files[file_name] = _open(folder / file_name)
            names, handle = files[file_name]
            for tensor in (name,) if name is not None else names:
                if tensor not in names:
                    raise ModelUnsupported(f"{file_name} does not hold tensor {tensor!r}, which {_INDEX} expects there")
                entry = handle.get_slice(tensor)
                if entry.get_dtype() not in _DTYPES:
                    raise ModelUnsupported(
                        f"tensor {tensor!r} in {file_name} has dtype {entry.get_dtype()}; {', '.join(_DTYPES)} are read"
                    )
                self._file_of[tensor] = handle
                self._shapes[tensor] = tuple(entry.get_shape())

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor


class RandomTensors:
    """Weights of a model that was never trained, for smoke tests and benchmarks without files.

    A tensor depends on (seed, its place in `shapes`) only. Matrices are normal with variance 1 / columns, so that
    activations keep their size through the layers; vectors (norms, biases) are normal around 1 with deviation 0.1.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> None:
        self._shapes = dict(shapes)
        self._seed = seed
        self._dtype = dtype

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        place = list(self._shapes).index(name)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + place)
        values = torch.randn(shape, generator=generator)
        values = values.mul_(shape[-1] ** -0.5) if len(shape) > 1 else values.mul_(0.1).add_(1.0)
        return values.to(self._dtype)


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], present: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()
) -> None:
    """Raises ModelUnsupported naming the first tensor that is missing, of another shape, or surplus.

    ignored: names that may be there although nothing reads them.
    """
    for name, shape in expected.items():
        if name not in present:
            raise ModelUnsupported(f"the checkpoint lacks tensor {name!r}")
        if present[name] != shape:
            raise ModelUnsupported(
                f"tensor {name!r} has shape {list(present[name])}, config.json asks for {list(shape)}"
            )
    surplus = sorted(set(present) - set(expected) - set(ignored))
    if surplus:
        raise ModelUnsupported(
            f"the checkpoint holds {len(surplus)} tensor(s) this architecture does not use, the first is {surplus[0]!r}"
        )


def _locate_tensors(folder: Path) -> list[tuple[str | None, str]]:
    """(tensor, file) of the index in its order, or (None, file): all tensors of the only file."""
    if (folder / _SINGLE).is_file():
        return [(None, _SINGLE)]
    index = folder / _INDEX
    if not index.is_file():
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickles:
            raise ModelUnsupported(
                f"the weights are pickled ({pickles[0]}), which can run code and is refused; convert to safetensors"
            )
        raise ModelUnsupported(f"{str(folder)!r} holds no weights: neither {_SINGLE} nor {_INDEX}")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        located = [(str(name), str(file)) for name, file in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelUnsupported(f"{_INDEX} can not be read: {type(error).__name__}: {error}") from None
    for _, file in located:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelUnsupported(f"{_INDEX} names {file!r}, which is no safetensors file of this folder")
    return [*located]


def _open(path: Path) -> tuple[frozenset[str], Any]:
    if not path.is_file():
        raise ModelUnsupported(f"{path.name} is missing from the model's folder, but {_INDEX} names it")
    try:
        handle: Any = safe_open(str(path), framework="pt", device="cpu")
        return frozenset(handle.keys()), handle
    except (SafetensorError, OSError) as error:
        raise ModelUnsupported(f"{path.name} is truncated or no safetensors file: {error}") from None
