"""Whether Triton still wants this model: asked of the server itself, because nothing tells a Python model.

Where it stands in the flow: `drain.Watch` asks about once a second while requests are open. An unload and a SIGTERM
reach a Python model only as `finalize`, and that comes after its last answer: without asking, one long stream would
keep a server from stopping.

How it asks: a BLS request to the model itself that Triton must refuse. To a decoupled model it says "not decoupled"; of
one that is not (a decoupled call of it is allowed) it wants an output that no model has. Triton looks the model up and
refuses, all before anything is queued, counted or executed (0.4 ms). When the model is leaving, the lookup fails
instead. `pb_utils.is_model_ready` would be the plain question, but where it has an error to tell, which is so from
SIGTERM on, it kills the stub (2.51, a general protection fault).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import Enum

from minisgl_backend.serving.triton import TritonStub


class Presence(Enum):
    """What the server says of this model."""

    LOADED = "loaded"
    LEAVING = "leaving"  # an unload or the server's stop has begun
    UNKNOWN = "unknown"  # an answer that we can not read


_LOADED = ("decoupled", "unexpected inference output")
_LEAVING = ("is not ready", "server not ready", "no available versions", "unknown model", "is not found")

_NO_OUTPUT = "is_loaded"


def asker(stub: TritonStub, args: Mapping[str, str]) -> Callable[[], str]:
    """A function that asks, and returns the server's words. `args` are those of `initialize`; after it, and before
    `finalize`, the function may be called on any thread. It blocks for a round trip.
    """
    name, version = args["model_name"], int(args["model_version"])
    policy = json.loads(args["model_config"]).get("model_transaction_policy", {})
    outputs = [] if policy.get("decoupled") else [_NO_OUTPUT]

    def ask() -> str:
        request = stub.InferenceRequest(
            model_name=name, model_version=version, requested_output_names=outputs, inputs=[]
        )
        response = request.exec()
        return str(response.error().message()) if response.has_error() else ""

    return ask


def read_presence(answer: str) -> Presence:
    """The server's words → what they mean. Words of another version of Triton are UNKNOWN, and nothing is done."""
    words = answer.lower()
    if any(part in words for part in _LOADED):
        return Presence.LOADED
    return Presence.LEAVING if any(part in words for part in _LEAVING) else Presence.UNKNOWN
