"""The Triton model `summarise`: a long text in, the summaries of its parts out, made by the model `minisgl` beside it.

Where it stands in the flow: loaded by Triton's Python stub, twice (once to complete the configuration, once as the
instance), so everything heavy is imported in `initialize`.
"""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Decoupled: `execute` returns at once, the bridge's threads answer."""

    def initialize(self, args: dict[str, str]) -> None:
        """Needs no other model yet: `minisgl` is asked when a text comes."""
        from minisgl_backend.serving.summarise import start

        self._bridge = start(pb_utils, args)

    def execute(self, requests: list[Any]) -> None:
        """Takes the requests; a decoupled model returns nothing."""
        self._bridge.execute(requests)

    def finalize(self) -> None:
        """Called after the last answer."""
        self._bridge.close()
