"""One request through each of Triton's doors, and all that comes back: for tests that compare the doors.

A request is written once, as an `Ask`; each function takes it through one door and gives an `Outcome`. The doors are
tritonclient's synchronous and asyncio gRPC streams, and HTTP's /generate and /generate_stream.
"""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc as grpc_core
import httpx
import numpy as np
import tritonclient.grpc as sync_triton
import tritonclient.grpc.aio as aio_triton
from tritonclient.utils import np_to_triton_dtype

from load.streams import MODEL

PATIENCE_S = 60.0

_HEADERS = {"triton_grpc_error": "true"}  # errors as gRPC statuses, which end the stream


@dataclass(frozen=True)
class Ask:
    """A request. inputs: bool → BOOL[1]; str, bytes → BYTES[1]; dict → BYTES[1] of its JSON; a list of strings or
    integers → BYTES[n], INT32[n]; an array → its own type and shape.
    """

    inputs: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)  # request parameters; over HTTP members of the body
    timeout_us: int | None = None  # Triton's own; gRPC only
    outputs: tuple[str, ...] | None = None  # None: all; gRPC only


@dataclass
class Outcome:
    """What came back."""

    responses: list[dict[str, list[Any]]] = field(default_factory=list)  # output → its elements, text as str
    error: str | None = None
    status: str = ""  # of an error: the name of the gRPC status (none when Triton refused it), or HTTP's number

    def joined(self, output: str) -> list[Any]:
        """The elements of an output in all responses that have it, in order."""
        return [element for response in self.responses for element in response.get(output, [])]

    @property
    def text(self) -> str:
        return "".join(self.joined("text_output"))


def sync_grpc(url: str, ask: Ask) -> Outcome:
    """tritonclient's stream with a callback."""
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    outcome = Outcome()
    with sync_triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)), headers=_HEADERS)
        client.async_stream_infer(
            MODEL,
            _tensors(ask),
            outputs=_outputs(ask),
            enable_empty_final_response=True,
            timeout=ask.timeout_us,
            parameters=dict(ask.parameters) or None,
        )
        last = False
        while not last:
            result, error = answers.get(timeout=PATIENCE_S)
            if error is not None:
                outcome.error, outcome.status = error.message(), (error.status() or "").removeprefix("StatusCode.")
                break
            last = _take(outcome, result)
        client.stop_stream()
    return outcome


async def aio_grpc(url: str, ask: Ask) -> Outcome:
    """tritonclient's asyncio stream."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": MODEL,
            "inputs": _tensors(ask),
            "outputs": _outputs(ask),
            "timeout": ask.timeout_us,
            "parameters": dict(ask.parameters) or None,
        }

    outcome = Outcome()
    async with aio_triton.InferenceServerClient(url) as client:
        try:
            async with asyncio.timeout(PATIENCE_S):
                async for result, error in client.stream_infer(requests(), headers=_HEADERS):
                    if error is not None:  # Triton's own, from before the model
                        outcome.error = error.message()
                        break
                    _take(outcome, result)
        except grpc_core.aio.AioRpcError as error:
            outcome.error, outcome.status = error.details(), error.code().name
    return outcome


def generate(url: str, ask: Ask) -> Outcome:
    """HTTP's /generate: one answer."""
    answer = _post(f"{url}/v2/models/{MODEL}/generate", ask)
    return _of_events([answer.content], answer.status_code)


def generate_stream(url: str, ask: Ask) -> Outcome:
    """HTTP's /generate_stream: server-sent events. A request that never became one is refused with a plain body."""
    answer = _post(f"{url}/v2/models/{MODEL}/generate_stream", ask)
    events = [part.removeprefix(b"data: ") for part in answer.content.split(b"\n\n") if part.strip()]
    return _of_events(events, answer.status_code)


def _post(url: str, ask: Ask) -> httpx.Response:
    """verify: loading the certificates of the world takes longer than an answer, and these are not asked for."""
    return httpx.post(url, content=_body(ask), timeout=PATIENCE_S, verify=False)


def _body(ask: Ask) -> bytes:
    return json.dumps({name: _as_json(value) for name, value in ask.inputs.items()} | dict(ask.parameters)).encode()


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, np.ndarray):
        return _as_json(value.tolist())
    if isinstance(value, list):
        return [_as_json(element) for element in value]
    return value.decode("utf-8", "surrogatepass") if isinstance(value, bytes) else value


def _of_events(events: list[bytes], status: int) -> Outcome:
    outcome = Outcome()
    for event in events:
        body = json.loads(event)
        if "error" in body:
            outcome.error, outcome.status = body["error"], str(status)
        else:
            outcome.responses.append(
                {
                    name: value if isinstance(value, list) else [value]
                    for name, value in body.items()
                    if name not in ("model_name", "model_version", "id")
                }
            )
    return outcome


def _take(outcome: Outcome, result: Any) -> bool:
    """One response into the outcome; whether it was the last."""
    response = result.get_response()
    if response.outputs:
        arrays = {output.name: result.as_numpy(output.name).reshape(-1) for output in response.outputs}
        outcome.responses.append(
            {
                name: [element.decode() for element in array] if array.dtype == object else array.tolist()
                for name, array in arrays.items()
            }
        )
    return bool(response.parameters["triton_final_response"].bool_param)


def _tensors(ask: Ask) -> list[Any]:
    tensors = []
    for name, value in ask.inputs.items():
        array = _array(value)
        tensors.append(sync_triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        tensors[-1].set_data_from_numpy(array)
    return tensors


def _outputs(ask: Ask) -> list[Any] | None:
    return None if ask.outputs is None else [sync_triton.InferRequestedOutput(name) for name in ask.outputs]


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
    if isinstance(values[0], bool):
        return np.array(values, dtype=bool)
    if isinstance(values[0], int):
        return np.array(values, dtype=np.int32)
    raw = [text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text for text in values]
    return np.array(raw, dtype=np.object_)
