"""The client, for threads: the pieces of an answer as they come, or the whole of it, over gRPC.

    with Client("127.0.0.1:8001") as client:
        for piece in client.stream("The capital of France is", max_tokens=32):
            print(piece.text, end="", flush=True)

One request is one gRPC call (a ModelStreamInfer that carries one request), all calls of a client share its connection.
So each has its own cancel, its own status and its own flow control; docs/client.md tells why not tritonclient's stream.
Needs no engine in this environment. `aio.py` is the same for asyncio.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from minisgl_client.errors import Cancelled, ServerFault
from minisgl_client.pieces import Answer, Piece
from minisgl_client.reception import HEADERS, PROBE_S, SILENCE_S, Reception, channel_options
from minisgl_client.requests import Request, RequestFields, encode, infer_method


class Client:
    """A connection to one server. Any number of threads may use it, each with streams of its own.

    url: "host:port" of the server's gRPC. credentials: of grpc.ssl_channel_credentials, for TLS. silence_s: when
    nothing has come for so long, the server is asked whether it lives. Close it, or use `with`: what is open is
    cancelled. One that is forgotten is closed with its last reference, at the latest at the interpreter's exit.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "minisgl",
        credentials: grpc.ChannelCredentials | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        if credentials is None:
            self._channel = grpc.insecure_channel(url, channel_options(url))
        else:
            self._channel = grpc.secure_channel(url, credentials, channel_options(url))
        self._model = model
        self._infer = infer_method(self._channel)
        self._watch = _Watch(service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ServerLive, silence_s)
        self._finalizer = weakref.finalize(self, _close, self._channel, self._watch)

    def stream(self, text: str | None = None, *, stream: bool = True, **fields: Unpack[RequestFields]) -> Stream:
        """Sends a request and returns its pieces as they will come. Raises RequestRefused when it is none.

        stream: false asks for the whole answer in one piece.
        """
        return self._start(Request.of(text, stream, **fields))

    def generate(self, text: str | None = None, **fields: Unpack[RequestFields]) -> Answer:
        """The whole answer, in one response. Leaving early (an exception of a signal's handler) cancels it."""
        with self._start(Request.of(text, False, **fields)) as stream:
            return Answer.of(list(stream))

    def ask(self, operation: str, text: str | None = None, **fields: Any) -> Any:
        """What is no generation: the JSON object that the server tells. docs/client.md lists the operations."""
        with self._start(Request.asking(operation, text, fields)) as stream:
            return stream.told()

    def close(self) -> None:
        """Cancels what is open and closes the connection. Any thread may call it, more than once."""
        self._finalizer()

    def _start(self, request: Request) -> Stream:
        message = encode(request, self._model)
        if not self._finalizer.alive:
            raise Cancelled("the client is closed")
        try:
            call = self._infer(message, timeout=request.timeout_s, metadata=HEADERS)
        except ValueError:  # another thread has just closed the channel
            raise Cancelled("the client is closed") from None
        return Stream(self, call, self._watch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


class Stream(Iterator[Piece]):
    """The answer to one request. Iterating raises a ClientError when it is not to be had whole.

    The request is cancelled when its reader leaves before the end: by `cancel`, at the end of `with`, with any
    exception that passes through `next` (Ctrl-C), and with the last reference, which a plain `for` drops as it ends.
    """

    def __init__(self, client: Client, call: Any, watch: _Watch) -> None:
        self._client = client  # so that it is not closed before us
        self._call = call
        self._reception = Reception()
        self.heard_at = time.monotonic()  # of the watch
        watch.add(self)

    @property
    def is_open(self) -> bool:
        """The call has not ended."""
        return bool(self._call.is_active())

    def __next__(self) -> Piece:
        while not self._reception.over:
            piece = self._receive()
            if piece is not None:
                return piece
        self._reception.result()
        raise StopIteration

    def told(self) -> Any:
        """The result of an operation."""
        for _ in self:
            raise ServerFault("the server answers an operation as if it were a generation")
        return self._reception.answer()

    def cancel(self) -> None:
        """Tells the server that nobody waits. Iterating then raises Cancelled, unless the end had come. Any thread may
        call it, and a signal's handler.
        """
        self._reception.cancelled()
        self._call.cancel()

    def fail_silent(self) -> None:
        """The watch found the server silent."""
        self._reception.silent()
        self._call.cancel()

    def _receive(self) -> Piece | None:
        try:
            response = next(self._call)
        except StopIteration:
            self._reception.closed()
        except grpc.RpcError:
            self._reception.failed(self._call.code().name, self._call.details())
        except BaseException:
            self.cancel()
            raise
        else:
            self.heard_at = time.monotonic()
            piece = self._reception.take(response)
            if self._reception.over:
                self._drain()
            return piece
        return None

    def _drain(self) -> None:
        """To the end of the call, which follows at once: then leaving after the last piece is no cancel."""
        try:
            for _ in self._call:
                pass
        except grpc.RpcError:
            pass  # what counts had come
        except BaseException:
            self.cancel()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.cancel()


class _Watch:
    """Notices a server that has fallen silent: a machine without power, a stopped process. Nothing else would tell.

    The thread lives while something is open.
    """

    def __init__(self, ask: Any, silence_s: float) -> None:
        self._ask = ask
        self._silence_s = silence_s
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def add(self, stream: Stream) -> None:
        """From now on until it is over or forgotten."""
        with self._lock:
            self._streams.add(stream)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="minisgl-client-watch", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """For good."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._silence_s / 2) and self._look():
            pass

    def _look(self) -> bool:
        """Ends streams that are silent for good. False when nothing is open; the thread is then given up."""
        with self._lock:
            streams = [stream for stream in self._streams if stream.is_open]
            if not streams:
                self._thread = None
                return False
        now = time.monotonic()
        silent = [stream for stream in streams if now - stream.heard_at >= self._silence_s]
        if silent and not self._lives():
            for stream in silent:
                stream.fail_silent()
        return True

    def _lives(self) -> bool:
        try:
            self._ask(service_pb2.ServerLiveRequest(), timeout=PROBE_S)
        except (grpc.RpcError, ValueError):
            return False
        return True


def _close(channel: Any, watch: _Watch) -> None:
    watch.stop()
    channel.close()
