"""The tensors of a Hugging Face folder, by name: safetensors only, mapped into memory, checked before they are read.

A tensor read here is a view of the mapped file: nothing is copied until somebody converts it, and the system can drop
and reread its pages. One shard is open at a time, and goes with the last tensor that was taken as it is: a load that
converts needs the converted weights and one shard. Pickled weights are refused: unpickling runs code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minisgl_backend.errors import ModelUnsupported

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LONGEST_NAME = 255  # of a file, in bytes, on any file system
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
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._open: tuple[Path, Any] | None = None
        for file_name, expected in _locate_tensors(folder).items():
            self._read_header(folder / file_name, expected)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Tensor:
        file = self._file_of[name]
        if self._open is None or self._open[0] != file:
            self._open = None
            self._open = file, _open(file)
        tensor: Tensor = self._open[1].get_tensor(name)
        return tensor

    def _read_header(self, file: Path, expected: Sequence[str] | None) -> None:
        """expected: the tensors that the index has there; None: there is no index, all are taken."""
        handle = _open(file)
        names = frozenset(handle.keys())
        for tensor in names if expected is None else expected:
            if tensor not in names:
                raise ModelUnsupported(f"{file.name} does not hold tensor {tensor!r}, which {_INDEX} expects there")
            entry = handle.get_slice(tensor)
            if entry.get_dtype() not in _DTYPES:
                raise ModelUnsupported(
                    f"tensor {tensor!r} in {file.name} has dtype {entry.get_dtype()}; {', '.join(_DTYPES)} are read"
                )
            self._file_of[tensor] = file
            self._shapes[tensor] = tuple(entry.get_shape())


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
    """Raises ModelUnsupported naming the first tensor that is missing, of another shape, or surplus, and how many are.

    ignored: names that may be there although nothing reads them.
    """
    missing = [name for name in expected if name not in present]
    if missing:
        more = f" and {len(missing) - 1} more of {len(expected)}" if len(missing) > 1 else ""
        raise ModelUnsupported(f"the checkpoint lacks tensor {missing[0]!r}{more}")
    for name, shape in expected.items():
        if present[name] != shape:
            raise ModelUnsupported(
                f"tensor {name!r} has shape {list(present[name])}, config.json asks for {list(shape)}"
            )
    surplus = sorted(set(present) - set(expected) - set(ignored))
    if surplus:
        raise ModelUnsupported(
            f"the checkpoint holds {len(surplus)} tensor(s) this architecture does not use, the first is {surplus[0]!r}"
        )


def _locate_tensors(folder: Path) -> Mapping[str, Sequence[str] | None]:
    """File → its tensors by the index, or None: all of the only file. Other files of the folder are not read."""
    if (folder / _SINGLE).is_file():
        return {_SINGLE: None}
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelUnsupported(f"{_INDEX} can not be read: {type(error).__name__}: {error}") from None
    for _, file in located:
        if (
            Path(file).name != file
            or not file.endswith(".safetensors")
            or len(file.encode(errors="replace")) > _LONGEST_NAME
        ):
            raise ModelUnsupported(f"{_INDEX} names {file!r}, which is no safetensors file of this folder")
    tensors: dict[str, list[str]] = {}
    for name, file in located:
        tensors.setdefault(file, []).append(name)
    return tensors


def _open(path: Path) -> Any:
    if not path.is_file():
        raise ModelUnsupported(f"{path.name} is missing from the model's folder, but {_INDEX} names it")
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelUnsupported(f"{path.name} is truncated or no safetensors file: {error}") from None
