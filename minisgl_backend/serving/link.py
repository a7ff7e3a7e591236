"""What serving/ needs of the engine: the seam between the bridge and `actors/`.

Where it stands in the flow: `model.py` passes the function that opens the link; the bridge submits requests and
cancels through it, and gets outputs and health on the link's own thread. Tests pass a fake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from minisgl_backend.config import EngineConfig
from minisgl_backend.messages.client import Health, Output, Request
from minisgl_backend.messages.ids import RequestId


class Link(Protocol):
    """A lease on an engine. Every submitted request gets exactly one terminal output, also when the engine dies."""

    def submit(self, request: Request) -> None: ...  # thread-safe, never blocks

    def cancel(self, id: RequestId) -> None: ...  # thread-safe, never blocks; harmless for unknown ids

    def close(self) -> None: ...


class OpenLink(Protocol):
    """Opens a link and blocks until the engine is ready. Raises StartError with a message for the operator."""

    def __call__(
        self,
        config: EngineConfig,
        on_outputs: Callable[[tuple[Output, ...]], None],
        on_health: Callable[[Health], None],
        progress: Callable[[str], None],
    ) -> Link: ...
