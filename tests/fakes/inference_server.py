"""A gRPC server in this process that answers as Triton does, with what a test tells it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event, Semaphore
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

Script = Callable[[Any, grpc.ServicerContext, "InferenceServer"], Iterator[Any]]


class InferenceServer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers each request as `script(request, context, self)` yields."""

    def __init__(self) -> None:
        self.script: Script = pieces("Paris", " é", "")
        self.requests: list[Any] = []
        self.metadata: dict[str, str] = {}
        self.cancelled = Semaphore(0)  # released by each call of `then_waits` that its client ended
        self.answers_probes = True
        self.probes = 0  # all, and of them
        self.refused_probes = 0
        self.sent = 0  # by scripts that count
        self.stopping = Event()
        self.url = ""

    def ModelStreamInfer(self, request_iterator: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        self.metadata = dict(context.invocation_metadata())
        for request in request_iterator:
            self.requests.append(request)
            yield from self.script(request, context, self)

    def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.probes += 1
        if not self.answers_probes:
            self.refused_probes += 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "no")
        return service_pb2.ServerLiveResponse(live=True)


@contextmanager
def inference_server() -> Iterator[InferenceServer]:
    """On a free port of the loopback."""
    servicer = InferenceServer()
    with ThreadPoolExecutor(16) as threads:
        server = grpc.server(threads)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
        servicer.url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield servicer
        finally:
            servicer.stopping.set()
            server.stop(None).wait()


def pieces(*texts: str, reason: str = "length") -> Script:
    """One response a text, the last one final."""

    def script(request: Any, context: Any, server: InferenceServer) -> Iterator[Any]:
        for index, text in enumerate(texts):
            last = index == len(texts) - 1
            yield response(final=last, text_output=[text], finish_reason=[reason if last else "None"])

    return script


def then_waits(*texts: str, answers_probes: bool = True) -> Script:
    """Some pieces, and no end: waits until its client has gone. answers_probes: of the server, from then on."""

    def script(request: Any, context: Any, server: InferenceServer) -> Iterator[Any]:
        gone = Event()
        for told in (gone.set, server.cancelled.release):  # not after the wait: grpc may drop the generator before
            if not context.add_callback(told):  # its client has gone already
                told()
        for text in texts:
            yield response(final=False, text_output=[text], finish_reason=["None"])
        server.answers_probes = answers_probes
        while not (gone.wait(0.05) or server.stopping.is_set()):
            pass

    return script


def aborts(status: grpc.StatusCode, words: str, *texts: str) -> Script:
    """Some pieces, then a status, as a model's error arrives with the header `triton_grpc_error`."""

    def script(request: Any, context: Any, server: InferenceServer) -> Iterator[Any]:
        for text in texts:
            yield response(final=False, text_output=[text], finish_reason=["None"])
        context.abort(status, words)

    return script


def says(*responses: Any) -> Script:
    """These very responses."""
    return lambda request, context, server: iter(responses)


def words(message: str) -> Any:
    """An error in words, as Triton itself gives it."""
    return service_pb2.ModelStreamInferResponse(error_message=message)


def response(*, final: bool, **outputs: list[Any]) -> Any:
    """One response: strings are BYTES, floats FP32, numbers of output_ids INT32 and others UINT32."""
    made = service_pb2.ModelInferResponse(model_name="minisgl")
    made.parameters["triton_final_response"].bool_param = final
    for name, values in outputs.items():
        datatype, raw = _tensor(name, values)
        made.outputs.add(name=name, datatype=datatype, shape=[len(values)])
        made.raw_output_contents.append(raw)
    return service_pb2.ModelStreamInferResponse(infer_response=made)


def inputs_of(request: Any) -> dict[str, Any]:
    """The tensors of a request, by name: a string, a bool, or a list of integers."""
    values: dict[str, Any] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            assert list(tensor.shape) == [1] and struct.unpack_from("<I", raw) == (len(raw) - 4,)
            values[tensor.name] = raw[4:].decode()
        elif tensor.datatype == "BOOL":
            assert list(tensor.shape) == [1]
            values[tensor.name] = raw == b"\x01"
        else:
            assert tensor.datatype == "INT32"
            values[tensor.name] = list(struct.unpack(f"<{tensor.shape[0]}i", raw))
    return values


def _tensor(name: str, values: list[Any]) -> tuple[str, bytes]:
    if all(isinstance(value, str | bytes) for value in values):
        encoded = [value.encode() if isinstance(value, str) else value for value in values]
        return "BYTES", b"".join(struct.pack("<I", len(value)) + value for value in encoded)
    if any(isinstance(value, float) for value in values):
        return "FP32", struct.pack(f"<{len(values)}f", *values)
    code, datatype = ("i", "INT32") if name == "output_ids" else ("I", "UINT32")
    return datatype, struct.pack(f"<{len(values)}{code}", *values)
