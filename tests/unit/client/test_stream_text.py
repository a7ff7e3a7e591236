"""The light client's stream, against a gRPC server in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, deserialize_bytes_tensor, serialize_byte_tensor

from minisgl_client.stream import stream_text


class Server(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers each request with `pieces`, then a last empty response; or with `error`; or, when neither, never."""

    def __init__(self) -> None:
        self.pieces: list[str] | None = ["Paris", " é", ""]
        self.error = ""
        self.requests: list[Any] = []
        self.cancelled = Event()

    def ModelStreamInfer(self, request_iterator: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        context.add_callback(self.cancelled.set)
        for request in request_iterator:
            self.requests.append(request)
            if self.error:
                yield service_pb2.ModelStreamInferResponse(error_message=self.error)
            elif self.pieces is not None:
                yield from map(answer, self.pieces)
                yield answer(None)
            else:
                yield answer("first")
                self.cancelled.wait(30)


def answer(piece: str | None) -> Any:
    response = service_pb2.ModelInferResponse(model_name="minisgl")
    response.parameters["triton_final_response"].bool_param = piece is None
    if piece is not None:
        response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
        response.raw_output_contents.append(serialize_byte_tensor(np.array([piece.encode()], dtype=np.object_)).item())
    return service_pb2.ModelStreamInferResponse(infer_response=response)


@pytest.fixture
def server() -> Iterator[tuple[Server, str]]:
    servicer = Server()
    with ThreadPoolExecutor(2) as threads:
        running = grpc.server(threads)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, running)
        port = running.add_insecure_port("127.0.0.1:0")
        running.start()
        yield servicer, f"127.0.0.1:{port}"
        running.stop(None).wait()


def test_the_pieces_come_in_order_and_the_request_says_what_was_asked(server: tuple[Server, str]) -> None:
    servicer, url = server
    assert list(stream_text(url, "The capital — of France", max_tokens=3, temperature=0.5)) == ["Paris", " é", ""]
    (request,) = servicer.requests
    sent = dict(zip([tensor.name for tensor in request.inputs], request.raw_input_contents, strict=True))
    assert request.model_name == "minisgl"
    assert deserialize_bytes_tensor(sent["text_input"])[0].decode() == "The capital — of France"
    assert sent["stream"] == b"\x01"
    parameters = json.loads(deserialize_bytes_tensor(sent["sampling_parameters"])[0])
    assert parameters == {"max_tokens": 3, "temperature": 0.5}


def test_a_refused_request_raises_with_the_servers_words(server: tuple[Server, str]) -> None:
    servicer, url = server
    servicer.error = "max_tokens: must be at least 1"
    with pytest.raises(InferenceServerException, match="max_tokens: must be at least 1"):
        list(stream_text(url, "x", max_tokens=0))


def test_leaving_early_cancels_the_request(server: tuple[Server, str]) -> None:
    servicer, url = server
    servicer.pieces = None
    pieces = stream_text(url, "x")
    assert next(pieces) == "first"
    pieces.close()
    assert servicer.cancelled.wait(30)


def test_a_server_that_is_not_there_raises() -> None:
    with pytest.raises(InferenceServerException):
        list(stream_text("127.0.0.1:1", "x"))
