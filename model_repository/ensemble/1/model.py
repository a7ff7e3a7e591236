"""The Triton model `ensemble`: `minisgl` for clients of TensorRT-LLM, on the same engine.

Where it stands in the flow: loaded by Triton's Python stub, twice (once to complete the configuration, once as the
instance), so everything heavy is imported in `initialize`.
"""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Decoupled: `execute` returns at once, the bridge's threads answer."""

    @staticmethod
    def open_link(*args: Any) -> Any:
        """Starts the engine or attaches to the warm one; tests put their own in its place."""
        from minisgl_backend.actors.link import EngineLink

        return EngineLink.open(*args)

    def initialize(self, args: dict[str, str]) -> None:
        """Blocks until the engine is ready."""
        from minisgl_backend.serving.bridge import Bridge
        from minisgl_backend.serving.tensorrt import read_tensorrt

        self._bridge = Bridge.start(pb_utils, args, self.open_link, read_tensorrt)

    def execute(self, requests: list[Any]) -> None:
        """Takes the requests; a decoupled model returns nothing."""
        self._bridge.execute(requests)

    def finalize(self) -> None:
        """Called after the last answer."""
        self._bridge.close()
