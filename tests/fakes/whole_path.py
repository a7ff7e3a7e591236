"""The gateway on the whole path of a request but tritonserver itself, in this process: the real app, the real client
over gRPC, the real Triton model between a strict fake of the stub and the actors of a real engine.

    httpx ─► app ─► AsyncClient ─► gRPC ─► model.py (fake stub) ─► text, scheduler, worker
"""

from __future__ import annotations

import asyncio
import json
import queue
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import np_to_triton_dtype

from fakes.engine import FakeEngine, fake_engine
from fakes.inference_server import InferenceServer, inference_server
from fakes.scripted_model import Scripts, write_scripted_model
from fakes.triton_model import Rig, initialize_args, loaded_module
from fakes.triton_stub import WAIT_S, FakeRequest, FakeSender, FakeStub, strings
from minisgl_backend.messages.client import Cancel, Outputs, Request, ToHolder
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.worker.build import build_runner
from minisgl_client.aio import AsyncClient
from minisgl_client.gateway.app import build_app
from minisgl_client.gateway.backends import Backend, Backends
from minisgl_client.gateway.settings import GatewaySettings

CODES = {"INVALID_ARG": "INVALID_ARGUMENT", "UNSUPPORTED": "UNIMPLEMENTED"}
"""What Triton calls an error → gRPC's name of it, where they differ."""


@asynccontextmanager
async def whole_path(
    model: Path,
    build: Callable[[FakeEngine], Any] | None = None,
    on_sent: Callable[[], None] = lambda: None,
    **settings: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """Asks the gateway in front of an engine of this model. build, settings: of `fake_engine`. on_sent: called in the
    loop when a response has left the Triton model.
    """
    async with fake_engine(model, build=build, **settings) as engine:
        stub = FakeStub()
        with loaded_module(stub) as module, inference_server() as server:
            rig = Rig(module, stub, initialize_args(parameters={"model": str(model)}))
            rig.model.open_link = EngineLink(engine).open
            rig.start()
            loop = asyncio.get_running_loop()
            server.script = answers_of(rig, lambda: loop.call_soon_threadsafe(on_sent))
            try:
                async with asking(server) as http:
                    yield http
            finally:
                await asyncio.to_thread(rig.finalize)  # waits for what the engine, in this loop, has to answer
        assert not stub.violations


@asynccontextmanager
async def asking(server: InferenceServer, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The app in front of this server."""
    async with AsyncClient(server.url) as client:
        app = build_app(GatewaySettings(**settings), Backends(Backend(client)))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=WAIT_S * 4) as http:
            yield http


@asynccontextmanager
async def scripted(scripts: Scripts, **files: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The same for a model that follows scripts, on the real worker. files: of `write_scripted_model`."""
    with tempfile.TemporaryDirectory(prefix="msg-") as place:
        folder = write_scripted_model(Path(place) / "model", scripts, **files)
        small: dict[str, Any] = {"device": "cpu", "threads": 1, "kv_bytes": 4 << 20}
        async with whole_path(folder, lambda engine: build_runner(engine.config, folder), **small) as http:
            yield http


def events(answer: httpx.Response) -> list[Any]:
    """Of a stream: JSON, and the word [DONE]."""
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


class EngineLink:
    """A holder of the engine as the bridge's link: submits from any thread, outputs in the engine's loop."""

    def __init__(self, engine: FakeEngine) -> None:
        self.id = b"bridge"
        self._loop = asyncio.get_running_loop()
        self._holder: Any = engine.holder(self.id)
        self._on_outputs: Any = None

    def open(self, config: Any, on_outputs: Any, on_health: Any, progress: Any) -> EngineLink:
        self._on_outputs = on_outputs
        self._holder.take = self._take
        return self

    def submit(self, request: Request) -> None:
        self._loop.call_soon_threadsafe(self._holder.send, request)

    def cancel(self, id: RequestId) -> None:
        self._loop.call_soon_threadsafe(self._holder.send, Cancel(id))

    def close(self) -> None:
        pass

    def _take(self, message: ToHolder) -> None:
        if isinstance(message, Outputs):
            self._on_outputs(message.items)


class GrpcSender(FakeSender):
    """Hands its responses to the thread of the call, too."""

    def __init__(self, stub: FakeStub, on_sent: Callable[[], object]) -> None:
        super().__init__(stub)
        self._on_sent = on_sent
        self.sent: queue.SimpleQueue[tuple[Any, bool] | None] = queue.SimpleQueue()  # None: the client has gone

    def send(self, response: Any = None, flags: int = 0) -> None:
        super().send(response, flags)
        self.sent.put((response, bool(flags)))
        self._on_sent()

    def leave(self) -> None:
        self.cancelled = True
        self.sent.put(None)


def answers_of(rig: Rig, on_sent: Callable[[], object]) -> Callable[[Any, Any, InferenceServer], Iterator[Any]]:
    """A script of `InferenceServer`: Triton's part, from a request's protobuf to `execute`, and back."""
    one_at_a_time = threading.Lock()

    def script(asked: Any, context: Any, server: InferenceServer) -> Iterator[Any]:
        sender = GrpcSender(rig.stub, on_sent)
        context.add_callback(sender.leave)
        with one_at_a_time:
            rig.execute(_request(asked, sender))
        while (sent := sender.sent.get(timeout=WAIT_S * 4)) is not None:
            response, final = sent
            if response is not None and response.error is not None:
                name = next(name for name in rig.stub.TritonError.__dict__ if _is_code(rig, name, response.error.code))
                context.abort(grpc.StatusCode[CODES.get(name, name)], response.error.message)
            yield _message(response, final)
            if final:
                return

    return script


def _is_code(rig: Rig, name: str, code: int) -> bool:
    return name.isupper() and getattr(rig.stub.TritonError, name) == code


def _request(asked: Any, sender: GrpcSender) -> FakeRequest:
    tensors = {}
    for tensor, raw in zip(asked.inputs, asked.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            assert list(tensor.shape) == [1], "the gateway sends no lists of strings"
            tensors[tensor.name] = strings(raw[4:])
        else:
            dtype = np.dtype("<i4") if tensor.datatype == "INT32" else np.dtype(bool)
            tensors[tensor.name] = np.frombuffer(raw, dtype).reshape(list(tensor.shape))
    own = {name: None for name in asked.parameters if not name.startswith("triton_")}
    assert not own, f"the gateway sends its parameters as JSON, not {own}"
    return FakeRequest(sender, tensors, json.dumps({}), asked.id)


def _message(response: Any, final: bool) -> Any:
    made = service_pb2.ModelInferResponse(model_name="minisgl")
    made.parameters["triton_final_response"].bool_param = final
    for name, array in ({} if response is None else response.tensors).items():
        made.outputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
        if array.dtype == np.object_:
            made.raw_output_contents.append(b"".join(len(one).to_bytes(4, "little") + one for one in array))
        else:
            made.raw_output_contents.append(array.tobytes())
    return service_pb2.ModelStreamInferResponse(infer_response=made)
