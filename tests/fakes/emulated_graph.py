"""A recorder of torch's operators on a CPU that keeps the contract of CUDA graphs to the letter.

It notes every operator with the tensors it was given, and replays them over the very same memory. What a graph can not
hold is refused while it is recorded: a value that the host reads, data that the host gives, shapes that depend on
values. What a graph does not keep is spoilt: all that was made in a recording, but what it returned, is broken numbers
before a replay and after it. So an input that was not refreshed, something the host did while recording, and somebody
who reads from inside a graph all show in the tokens. What a graph reads it does not hold: a replay fails when somebody
has let go of a tensor that was there before the recording.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from minisgl_backend.device.graph import Graph, NotRecordable

_ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty.memory_format"}
)

_BY_VALUE = frozenset(
    {"item", "_local_scalar_dense", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "masked_select"}
    | {"unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "repeat_interleave", "lift_fresh"}
)
"""Operators that read values on the host, or bring some from it, or make as many elements as values say."""

_HOST = frozenset(
    {"item", "tolist", "numpy", "cpu", "from_numpy", "tensor", "as_tensor", "frombuffer"}
    | {f"__{name}__" for name in ("bool", "int", "float", "index", "array", "contains")}
)
"""Of torch's functions those that never reach an operator, or do so only with values."""


class EmulatedRecorder:
    """See Recorder. `graphs`: all that were recorded, in their order."""

    shares_memory = True

    def __init__(self) -> None:
        self.graphs: list[EmulatedGraph] = []
        self.held_bytes = 0

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        work()  # as the recorder of CUDA graphs does
        tape = _Tape()
        with _NoHost(), tape:
            out = work()
        graph = EmulatedGraph(tape, out)
        self.graphs.append(graph)
        self.held_bytes += sum(made.nbytes for made in tape.made)
        graph.replay()
        return graph, out


class EmulatedGraph:
    """See Graph. `replays`: how often it ran."""

    def __init__(self, tape: _Tape, out: Tensor) -> None:
        self._calls, self._given = tape.calls, tape.given
        kept = out.untyped_storage().data_ptr()
        self._inner = [made for made in tape.made if made.untyped_storage().data_ptr() != kept]
        self._all = tape.made
        self.closed = False
        self.replays = 0
        _spoil(self._all)  # recording computes nothing that anybody may read

    @torch.inference_mode()
    def replay(self) -> None:
        assert not self.closed, "a closed recording"
        assert all(given() is not None for given in self._given), "memory that a recording reads was given back"
        self.replays += 1
        _spoil(self._all)
        for func, args, kwargs, outs in self._calls:
            args, kwargs, outs = tree_map_only(weakref.ref, lambda given: given(), (args, kwargs, outs))
            for made, kept in zip(_tensors(func(*args, **kwargs)), outs, strict=True):
                if made.data_ptr() != kept.data_ptr():
                    kept.copy_(made)
        _spoil(self._inner)

    def close(self) -> None:
        self.closed = True
        self._calls = []


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """calls: what a replay does. made: every tensor that did not lie in the memory of another one when it was made.
    given: those that were there before; not held, in `calls` neither.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, ...]] = []  # operator, its arguments, by position and by name, and what it gave
        self.made: list[Tensor] = []
        self.given: list[weakref.ref[Tensor]] = []
        self._own: dict[int, Tensor] = {}  # that came out of an operator, views among them

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        masked = name.startswith("index") and any(tensor.dtype == torch.bool for tensor in _tensors(args[1:2]))
        if name in _BY_VALUE or masked:
            raise NotRecordable(f"{func} depends on values, which the host would have to read")
        out = func(*args, **kwargs)
        outs = list(_tensors(out))
        strangers = {id(tensor) for tensor in _tensors((args, kwargs))} - self._own.keys()
        self._own |= {id(tensor): tensor for tensor in outs if id(tensor) not in strangers}
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        fresh = [tensor for tensor in outs if tensor.untyped_storage().data_ptr() not in given]
        self.made += fresh
        noted = tree_map_only(Tensor, self._unheld, (args, kwargs, outs))
        if func._schema.is_mutable or (fresh and name not in _ALLOCATIONS):
            self.calls.append((func, *noted))
        return out

    def _unheld(self, tensor: Tensor) -> Tensor | weakref.ref[Tensor]:
        if id(tensor) in self._own:
            return tensor
        self.given.append(weakref.ref(tensor))
        return self.given[-1]


class _NoHost(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _HOST:
            raise NotRecordable(f"{func.__name__} reads a value on the host, or brings one from it")
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


@torch.inference_mode()
def _spoil(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
        elif tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max // 3)
        else:
            tensor.fill_(True)
