"""The model `summarise`: a long text in, the summaries of its parts out, made by the model `minisgl` beside it.

    Triton ── execute ──► Bridge ── Request ──► Summariser ── parts ──► workers ── slices, through Triton ──► minisgl
    Triton ◄── responses ── sender threads ◄── Outputs, in the order of the parts ──┘

Where it stands in the flow: made by `model_repository/summarise/1/model.py`. Reading requests, sending, asking for
cancels and the one FINAL are the bridge's, as for `minisgl`; the Summariser stands in the place of the engine. It
loads no model and no torch.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minisgl_backend.config import nearest
from minisgl_backend.errors import (
    ConfigError,
    InvalidRequest,
    QueueFull,
    RequestError,
    Status,
    UnsupportedFeature,
)
from minisgl_backend.messages.client import Chunk, Failed, Finished, FinishReason, Output, Request
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.serving.bridge import Bridge
from minisgl_backend.serving.calls import Call, Retained, model_call
from minisgl_backend.serving.outputs import Wanted
from minisgl_backend.serving.parts import PartOrder, Slices, split_parts
from minisgl_backend.serving.sender import UNLOADED, Outbox
from minisgl_backend.serving.settings import model_parameters
from minisgl_backend.serving.tensors import read_request
from minisgl_backend.serving.triton import InferenceRequest, Logger, TritonStub, load_error
from minisgl_backend.text.parameters import MAX_PARAMETERS_BYTES
from minisgl_backend.text.values import integer, json_object

NAME = "summarise"

MAX_TEXT_BYTES = 16 << 20
MAX_PARTS = 4096
PART_BYTES = (64, 4000, 1 << 20)  # least, default, most
MAX_TOKENS = (1, 64, 4096)

LOOK_S = 1.0
"""Between two looks for calls that take too long."""

STOP_S = 10.0
"""How long `close` waits for the slices still being computed: nothing can end a call but its answer."""


class Settings(msgspec.Struct, frozen=True):
    """The `parameters` of config.pbtxt."""

    model: str = "minisgl"  # the model that is asked
    parallel_parts: int = 4  # parts of all texts summarised at once; each is a request to `model`, from a thread
    slice_tokens: int = 16  # of one call: an answer comes, and a cancel is heeded, every so many tokens
    max_texts: int = 64  # open at once; one more is refused
    call_s: int = 300  # a call that takes longer fails its text; the model that is asked may have a queue
    drain_s: int = 20  # how long an unload waits for the texts still open


_RANGES = {
    "parallel_parts": (1, 16),
    "slice_tokens": (1, 1024),
    "max_texts": (1, 4096),
    "call_s": (1, 86400),
    "drain_s": (0, 3600),
}
"""parallel_parts: Triton's Python backend makes the calls of a model on 32 threads, which it also sends with.
"""


def start(stub: TritonStub, args: Mapping[str, str]) -> Bridge:
    """The bridge of an instance. `args` are those of `TritonPythonModel.initialize`. Raises TritonModelException."""
    try:
        settings = read_settings(json.loads(args["model_config"]))
    except ConfigError as error:
        raise load_error(stub, error) from None
    retained = Retained()
    outbox = Outbox(stub.Logger, fence=retained)
    summariser = Summariser(model_call(stub, settings.model, retained), outbox.post, settings, stub.Logger)
    outbox.start(summariser.cancel)
    summariser.start()
    bridge = Bridge(stub, summariser, outbox, name=NAME, read=read_text)
    bridge.limit_drain(args, settings.drain_s)
    return bridge


def read_settings(model_config: Mapping[str, Any]) -> Settings:
    """Raises ConfigError, naming the setting."""
    values: dict[str, Any] = dict(model_parameters(model_config))
    for key in values:
        if key not in Settings.__struct_fields__:
            raise ConfigError(f"unknown setting {key!r}{nearest(key, Settings.__struct_fields__)}")
    for key, (low, high) in _RANGES.items():
        try:
            values[key] = integer(key, values.get(key, getattr(Settings(), key)), low, high)
        except InvalidRequest as error:
            raise ConfigError(f"setting {error}") from None
    return Settings(**values)


def read_text(request: InferenceRequest, id: RequestId) -> tuple[Request, Wanted]:
    """As `read_request`, for a model of one input: what the summaries can not tell is refused."""
    message, wanted = read_request(request, id)
    if not isinstance(wanted, Wanted):
        raise UnsupportedFeature("operation", "is not an input of this model")
    for name in ("num_input_tokens", "num_output_tokens", "output_ids", "perf_metrics"):
        if getattr(wanted, name):
            raise UnsupportedFeature(f"return_{name}", "is not told by this model")
    if message.exclude_input_in_output is False:
        raise UnsupportedFeature("exclude_input_in_output", "must not be false: a summary never echoes the text")
    if message.timeout_us:
        raise UnsupportedFeature("timeout", "is not kept by this model; cancel the request instead")
    return message, wanted


@dataclass(eq=False)
class _Text:
    """One request. All of it is guarded by the Summariser's lock, but what never changes."""

    id: RequestId
    parts: tuple[str, ...]
    max_tokens: int  # of each part's summary
    sampling: Mapping[str, Any]  # passed on with every call, unread
    order: PartOrder
    next_part: int = 0
    ended: bool = False  # answered: whoever still works for it stops
    reason: FinishReason = FinishReason.STOP  # LENGTH as soon as one summary reached max_tokens


@dataclass
class _Shared:
    """What submitters, cancellers and workers share; `changed` guards it."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    open: dict[RequestId, _Text] = field(default_factory=dict)
    turns: deque[_Text] = field(default_factory=deque)  # texts with parts nobody has begun: they take turns
    calls: dict[int, tuple[_Text, float]] = field(default_factory=dict)  # under way: worker → for whom, began
    stopped: bool = False


class Summariser:
    """See Link (serving/link.py): it answers every request with exactly one terminal output."""

    def __init__(
        self, call: Call, on_outputs: Callable[[Sequence[Output]], None], settings: Settings, log: Logger
    ) -> None:
        self._call = call
        self._on_outputs = on_outputs  # quick, and called under the lock, so that outputs keep their order
        self._settings = settings
        self._log = log
        self._shared = _Shared()
        self._workers = [
            threading.Thread(target=self._work, args=(index,), name=f"{NAME}-{index}", daemon=True)
            for index in range(settings.parallel_parts)
        ]
        self._stopping = threading.Event()
        self._clock = threading.Thread(target=self._look, name=f"{NAME}-clock", daemon=True)

    def start(self) -> None:
        """Starts the workers."""
        for thread in (*self._workers, self._clock):
            thread.start()

    def submit(self, request: Request) -> None:
        shared = self._shared
        try:
            text = _read(request)
            with shared.changed:
                if len(shared.open) >= self._settings.max_texts:
                    raise QueueFull(f"{len(shared.open)} texts are open, which is the limit; try again later")
                shared.open[text.id] = text
                shared.turns.append(text)
                shared.changed.notify_all()
        except RequestError as error:
            self._on_outputs([Failed(request.id, error.status, str(error))])

    def cancel(self, id: RequestId) -> None:
        self._fail(id, Status.CANCELLED, "the request was cancelled")

    def end_late(self, now: float) -> None:
        """Fails the texts whose calls began more than `call_s` ago; when no worker is left, every text that is open.
        Nothing can end such a call: its worker works again only when it ends by itself.
        """
        shared, limit_s = self._shared, self._settings.call_s
        with shared.changed:
            late = [text for text, began in shared.calls.values() if now > began + limit_s]
            ids = tuple(shared.open) if len(late) == len(self._workers) else tuple(text.id for text in late)
        message = f"the model {self._settings.model!r} did not answer within {limit_s} s"
        if ended := sum([self._fail(id, Status.UNAVAILABLE, message) for id in ids]):
            waiting = f"{len(late)} of {len(self._workers)} workers wait for it"
            texts = f"{ended} text{' was' if ended == 1 else 's were'} ended"
            self._log.log_error(f"{NAME}: {message}: {waiting}, {texts}")

    def close(self) -> None:
        """Fails what is open and waits for the slices being computed, for STOP_S in all."""
        shared = self._shared
        with shared.changed:
            shared.stopped = True
            shared.changed.notify_all()
            left = tuple(shared.open)
        self._stopping.set()
        for id in left:
            self._fail(id, Status.UNAVAILABLE, UNLOADED)
        for worker in self._workers:
            worker.join(STOP_S / len(self._workers))
        if any(worker.is_alive() for worker in self._workers):
            self._log.log_error(f"{NAME}: a call did not end within {STOP_S:g} s")

    def _look(self) -> None:
        while not self._stopping.wait(LOOK_S):
            self.end_late(time.monotonic())

    def _work(self, worker: int) -> None:
        while (turn := self._next_part()) is not None:
            text, part = turn
            try:
                self._summarise(worker, text, part)
            except RequestError as error:
                self._fail(text.id, error.status, str(error))
            except Exception:
                self._log.log_error(f"{NAME}: {traceback.format_exc()}")
                self._fail(text.id, Status.INTERNAL, "the text could not be summarised")

    def _next_part(self) -> tuple[_Text, int] | None:
        """The next part of the text whose turn it is; waits for one. None: stop."""
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: shared.turns or shared.stopped)
            if shared.stopped:
                return None
            text = shared.turns.popleft()
            part = text.next_part
            text.next_part += 1
            if text.next_part < len(text.parts):
                shared.turns.append(text)
            return text, part

    def _summarise(self, worker: int, text: _Text, part: int) -> None:
        slices = Slices(text.max_tokens, self._settings.slice_tokens)
        while slices.reason is None and not text.ended:
            sampling = {**text.sampling, "max_tokens": slices.max_tokens}
            with self._shared.changed:
                self._shared.calls[worker] = (text, time.monotonic())
            try:
                said = self._call(prompt_of(text.parts[part], slices.text), sampling)
            finally:
                with self._shared.changed:
                    del self._shared.calls[worker]
            piece = slices.take(said.text, said.num_tokens, said.reason)
            self._give(text, part, piece, slices.reason)

    def _give(self, text: _Text, part: int, piece: str, ended: FinishReason | None) -> None:
        with self._shared.changed:
            if text.ended:
                return
            if ended is FinishReason.LENGTH:
                text.reason = ended
            ready = text.order.take(part, piece, ended is not None)
            if text.order.done:
                self._forget(text)
                self._on_outputs([Finished(text.id, ready, b"", text.reason, 0, 0)])
            elif ready:
                self._on_outputs([Chunk(text.id, ready, b"")])

    def _fail(self, id: RequestId, status: Status, message: str) -> bool:
        """Ends a text with an error; False: it has ended already. Its other parts stop at the end of their slices."""
        with self._shared.changed:
            text = self._shared.open.get(id)
            if text is None:
                return False
            self._forget(text)
            self._on_outputs([Failed(id, status, message)])
            return True

    def _forget(self, text: _Text) -> None:
        text.ended = True
        del self._shared.open[text.id]
        if text in self._shared.turns:
            self._shared.turns.remove(text)


def prompt_of(part: str, so_far: str) -> str:
    """The prompt of a slice: the part, and what was said of it already."""
    return f"Summarise the text in one or two sentences.\n\nText:\n{part.strip()}\n\nSummary:{so_far}"


def _read(request: Request) -> _Text:
    """Raises RequestError. Parameters that are not ours are passed on to the model that is asked, which knows them."""
    given = json_object(request.parameters or b"{}", "sampling_parameters", MAX_PARAMETERS_BYTES)
    part_bytes = integer("part_bytes", given.pop("part_bytes", PART_BYTES[1]), PART_BYTES[0], PART_BYTES[2])
    max_tokens = integer("max_tokens", given.pop("max_tokens", MAX_TOKENS[1]), MAX_TOKENS[0], MAX_TOKENS[2])
    text = _text(request.text_input)
    _refuse_many(-(-len(request.text_input or b"") // part_bytes))  # at least so many: said before anything is split
    parts = tuple(part for part in split_parts(text, part_bytes) if part.strip())
    if not parts:
        raise InvalidRequest("text_input", "must not be empty")
    _refuse_many(len(parts))
    given.setdefault("temperature", 0)
    return _Text(request.id, parts, max_tokens, given, PartOrder(len(parts)))


def _refuse_many(parts: int) -> None:
    if parts > MAX_PARTS:
        raise InvalidRequest("text_input", f"makes {parts} parts, at most {MAX_PARTS} are taken; raise part_bytes")


def _text(raw: bytes | None) -> str:
    if raw is None:
        raise InvalidRequest("text_input", "is missing")
    if len(raw) > MAX_TEXT_BYTES:
        raise InvalidRequest("text_input", f"must hold at most {MAX_TEXT_BYTES} bytes, got {len(raw)}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("text_input", "is not valid UTF-8") from None
