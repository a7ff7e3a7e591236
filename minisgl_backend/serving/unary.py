"""Requests of `minisgl_unary`, the model for clients that can not stream: `/infer`, unary gRPC.

Where it stands in the flow: the bridge of that model calls `read_unary` instead of `tensors.read_request`. Inputs,
outputs and all else are those of `minisgl`; Triton allows such a model one response to a request, which a sender
thread gives when the answer is whole, so any number of requests are in flight.
"""

from __future__ import annotations

from minisgl_backend.errors import UnsupportedFeature
from minisgl_backend.messages.client import Request
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.serving.outputs import Form
from minisgl_backend.serving.tensors import read_request
from minisgl_backend.serving.triton import InferenceRequest


def read_unary(request: InferenceRequest, id: RequestId) -> tuple[Request, Form]:
    """As `read_request`; a stream is refused by name."""
    message, form = read_request(request, id)
    if message.stream:
        raise UnsupportedFeature("stream", "this model answers once; ask the model 'minisgl' for a stream")
    return message, form
