"""The light client: the text of one request, piece by piece, over gRPC. Needs no engine in this environment."""

from __future__ import annotations

import json
from collections.abc import Generator
from queue import SimpleQueue
from typing import Any

import numpy as np
from tritonclient import grpc


def stream_text(url: str, prompt: str, *, model: str = "minisgl", **parameters: Any) -> Generator[str, None, None]:
    """Yields the pieces of the answer as they come; joined they are its text, without the prompt.

    url: "host:port" of the server's gRPC. parameters: sampling parameters, such as max_tokens=32, temperature=0.7.
    Raises tritonclient's InferenceServerException when the server refuses or fails the request. Leaving the loop
    early (or closing the generator) cancels the request.
    """
    answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    client = grpc.InferenceServerClient(url)
    try:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, _inputs(prompt, parameters), enable_empty_final_response=True)
        while True:
            result, error = answers.get()
            if error is not None:
                raise error
            text = result.as_numpy("text_output")
            if text is not None and text.size:
                yield text.reshape(-1)[0].decode()
            if result.get_response().parameters["triton_final_response"].bool_param:
                return
    finally:
        client.stop_stream(cancel_requests=True)
        client.close()


def _inputs(prompt: str, parameters: dict[str, Any]) -> list[Any]:
    values = {
        "text_input": np.array([prompt.encode()], dtype=np.object_),
        "stream": np.array([True]),
        "sampling_parameters": np.array([json.dumps(parameters).encode()], dtype=np.object_),
    }
    inputs = []
    for name, value in values.items():
        tensor = grpc.InferInput(name, [1], "BOOL" if value.dtype == np.bool_ else "BYTES")
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)
    return inputs
