"""A list of native calls, recorded once and replayed by one call: what a CUDA graph is on a GPU.

    recording = Recording(library)
    with recording:
        logits = model.forward(tokens, positions, attention, sampled)
    tokens.copy_(next_tokens)
    recording.replay()  # logits holds those of the next tokens

Recording also runs what it records. A replay reads and writes the very memory of the recording: what changes from step
to step is written into the tensors that were given, and shapes never change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl_backend.device.graph import NotRecordable
from minisgl_backend.kernels.native.library import Library

_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


Output = TypeVar("Output")


class Recording:
    """Native calls in their order, and what they read and write. Record once, replay as often as wanted, then close.

    Not for two threads at once. Output tensors made while recording lie in memory that is freed with the last of them
    and of the recording; what is given to the calls is held by the recording.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._mode = _OnlyNative(library.level.namespace)
        self._handle = 0
        self._free: Callable[[], object] = lambda: None

    def __enter__(self) -> Self:
        assert not self._handle, "recorded already"
        self._library.record_begin()
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        handle = self._library.record_end()
        self._free = weakref.finalize(self, self._library.free, handle)
        self._handle = handle
        if error is not None:
            self.close()

    @property
    def held_bytes(self) -> int:
        """Of all that was made while recording; what was given to the calls is not a part of it."""
        return sum(self._mode.made_bytes.values())

    @property
    def calls(self) -> int:
        """How many launches a replay makes."""
        return self._library.steps(self._handle)

    def replay(self) -> None:
        """Runs all calls again, in one parallel region. Holds no GIL."""
        assert self._handle, "nothing is recorded, or it is closed"
        self._library.replay(self._handle)

    def close(self) -> None:
        """Frees what only the recording holds. Idempotent."""
        self._free()
        self._handle = 0
        self._mode.held.clear()


def record(library: Library, work: Callable[[], Output]) -> tuple[Recording, Output]:
    """Runs work and records it → the recording, and what work returned, whose tensors each replay writes anew.

    Raises NotRecordable: between two native calls torch computed something, which a replay would leave out. Then
    nothing is kept of the recording.
    """
    recording = Recording(library)
    with recording:
        out = work()
    return recording, out


class NativeRecorder:
    """See Recorder."""

    shares_memory = False

    def __init__(self, library: Library) -> None:
        self._library = library
        self.held_bytes = 0

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Recording, Tensor]:
        """See Recorder."""
        recording, out = record(self._library, work)
        self.held_bytes += recording.held_bytes
        return recording, out


class _OnlyNative(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets through native operators, views and allocations; of anything else it raises NotRecordable.

    `held`: tensors that native calls were given and did not make themselves.
    """

    def __init__(self, namespace: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._namespace = namespace
        self._made: set[int] = set()  # addresses of what native calls made, which the recording's pool holds
        self.made_bytes: dict[int, int] = {}  # by address, of these and of allocations: the most that lay there
        self.held: dict[int, Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing here is compiled, and seeing to that imports torch's compiler, 66 MiB and over a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == self._namespace:
            for tensor in _tensors((*args, *(kwargs or {}).values())):
                self._hold(tensor)
            out = func(*args, **(kwargs or {}))
            for tensor in _tensors((out,)):
                if _address(tensor) not in self.held:
                    self._made.add(_address(tensor))
                    self._count(tensor)
            return out
        if func._schema.is_mutable:
            raise NotRecordable(f"{func} is no native call")
        out = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") in _ALLOCATIONS:
            self._hold(out)
            self._count(out)
        elif not _is_view(out, args):  # by what it did: reshape and contiguous may copy, and then they are none
            raise NotRecordable(f"{func} is no native call")
        return out

    def _hold(self, tensor: Tensor) -> None:
        address = _address(tensor)
        if address not in self._made:
            self.held.setdefault(address, tensor)

    def _count(self, made: Tensor) -> None:
        address, size_bytes = _address(made), made.untyped_storage().nbytes()
        self.made_bytes[address] = max(self.made_bytes.get(address, 0), size_bytes)


def _is_view(out: Any, args: Sequence[Any]) -> bool:
    """Whether out is tensors, all in the memory of args."""
    tensors = list(_tensors((out,)))
    given = {_address(tensor) for tensor in _tensors(args)}
    return bool(tensors) and all(_address(tensor) in given for tensor in tensors)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
