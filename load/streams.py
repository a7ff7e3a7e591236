"""Streams over tritonclient's asyncio gRPC, with every rule of a stream checked."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

MODEL = "minisgl"


@dataclass
class Answer:
    """What one request got."""

    pieces: list[str] = field(default_factory=list)
    reason: str = "None"
    times_s: list[float] = field(default_factory=list)  # of the pieces, by time.perf_counter
    finals: int = 0
    error: InferenceServerException | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def inputs(text: str | bytes, **fields: Any) -> list[triton.InferInput]:
    """Tensors of one request. fields: stream, exclude_input_in_output (bool), sampling_parameters (dict or str)."""
    made = [_string("text_input", text)]
    for name, value in fields.items():
        if name == "sampling_parameters":
            made.append(_string(name, value if isinstance(value, str | bytes) else json.dumps(value)))
        else:
            tensor = triton.InferInput(name, [1], "BOOL")
            tensor.set_data_from_numpy(np.array([value], dtype=bool))
            made.append(tensor)
    return made


async def ask(url: str, text: str, *, cancel_after: int | None = None, **parameters: Any) -> Answer:
    """One streamed request on a connection of its own. cancel_after: leave after so many pieces."""
    async with triton.InferenceServerClient(url) as client:
        return await ask_on(client, text, cancel_after=cancel_after, **parameters)


def connection(url: str) -> triton.InferenceServerClient:
    """A client with a TCP connection of its own: gRPC lets all channels to one address share one."""
    return triton.InferenceServerClient(url, channel_args=[("grpc.use_local_subchannel_pool", 1)])


async def ask_many_on(
    client: triton.InferenceServerClient, requests: Mapping[str, tuple[str | bytes, Mapping[str, Any]]]
) -> dict[str, Answer]:
    """Many requests on ONE stream: request id → (prompt, sampling parameters), answers by id.

    Triton names no request with an error (an error ends in the Answer of its id only when Triton says it), so every
    request here must be a good one.
    """

    async def all_of_them() -> AsyncIterator[dict[str, Any]]:
        for id, (text, parameters) in requests.items():
            yield {
                "model_name": MODEL,
                "inputs": inputs(text, stream=True, sampling_parameters=dict(parameters)),
                "request_id": id,
            }

    answers = {id: Answer() for id in requests}
    async for result, error in client.stream_infer(all_of_them()):
        assert error is None, error
        take(answers[result.get_response().id], result)
    return answers


async def ask_on(
    client: triton.InferenceServerClient,
    text: str | bytes,
    *,
    cancel_after: int | None = None,
    status: bool = False,
    **parameters: Any,
) -> Answer:
    """As `ask`, on an open connection. status: errors as gRPC statuses, which then end the connection's stream."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": MODEL,
            "inputs": inputs(text, stream=True, sampling_parameters=parameters),
            "enable_empty_final_response": True,
        }

    answer = Answer()
    responses = client.stream_infer(requests(), headers={"triton_grpc_error": str(status).lower()})
    try:
        async for result, error in responses:  # to its very end: leaving at the error would be a cancel
            assert answer.finals == 0 and answer.error is None, "a response after the final one"
            if error is not None:
                answer.error = error
                continue
            take(answer, result)
            if cancel_after is not None and len(answer.pieces) >= cancel_after:
                responses.cancel()
                break
    except grpc.aio.AioRpcError as error:
        if not status:
            raise
        answer.error = InferenceServerException(error.details(), status=str(error.code()))
    return answer


def take(answer: Answer, result: Any) -> None:
    """One response into the answer."""
    response = result.get_response()
    text, reason = result.as_numpy("text_output"), result.as_numpy("finish_reason")
    if text is not None:
        assert answer.reason == "None", "text after the end"
        answer.times_s.append(time.perf_counter())
        answer.pieces.append(b"".join(text.reshape(-1)).decode("utf-8"))
        answer.reason = reason.reshape(-1)[0].decode()
    answer.finals += response.parameters["triton_final_response"].bool_param


def _string(name: str, value: str | bytes) -> triton.InferInput:
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode() if isinstance(value, str) else value], dtype=np.object_))
    return tensor
