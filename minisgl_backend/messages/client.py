"""Between the holder of a lease (a bridge in Triton's stub, an `LLM`, an inspector) and the engine host.

    holder ── Hello, Request, Cancel, Inspect, Retire, Goodbye ──►  host
    holder ◄── Welcome, Health, Outputs, Stats ──────────────────  host

Every request is answered by exactly one terminal output: `Finished`, `Answered` or `Failed`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from minisgl_backend.errors import Status
from minisgl_backend.messages.ids import RequestId

PROTOCOL = 2
"""Raised whenever a released message of this file changes; a holder with another number is turned away."""


class FinishReason(StrEnum):
    """Why a sequence ended, in the words clients know."""

    STOP = "stop"  # an end-of-sequence token, one of stop_token_ids, or a stop string
    LENGTH = "length"  # max_tokens, or the context or pool is full


class EngineState(StrEnum):
    """What `Health` says of the engine behind the host."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"  # died, is being started again
    FAILED = "failed"  # will not be started again; `detail` says why
    STOPPING = "stopping"


# ── holder → host ────────────────────────────────────────────────────────────────────────────────────────────────


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First message on a connection: takes a lease, unless it only inspects."""

    protocol: int
    pid: int  # the host watches this process: its end, however it comes, ends the lease
    lease: bool  # False: an inspector, which never keeps the engine alive


class Request(msgspec.Struct, frozen=True, array_like=True, tag="request"):
    """One request as the client gave it. Nothing is validated yet: that is the work of `text/`."""

    id: RequestId
    text_input: bytes | None  # the prompt as it came, UTF-8 or not; None: not given, as below
    parameters: bytes  # JSON object of sampling parameters; empty when none were given
    stream: bool  # many Chunks, or everything in the Finished
    exclude_input_in_output: bool | None  # None: not said by the client
    input_ids: bytes | None = None  # the prompt as packed int32, not checked against the vocabulary
    messages: bytes | None = None  # a chat: JSON as it came
    tools: bytes | None = None  # JSON as it came
    timeout_us: int = 0  # from arrival to the end of the answer; 0: none
    return_cumulative_logprob: bool = False  # logprobs of the tokens are computed although no parameter asks for them
    parse_output: bool = False  # of a chat: reasoning and tool calls come apart from the text
    operation: bytes | None = None  # not a generation but this; its name as it came. None: a generation


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """The client left. Harmless for an unknown or ended id, and when sent twice."""

    id: RequestId


class Inspect(msgspec.Struct, frozen=True, array_like=True, tag="inspect"):
    """Asks for one Stats."""


class Retire(msgspec.Struct, frozen=True, array_like=True, tag="retire"):
    """From an inspector: stop now. Answered with a Health when somebody holds a lease, and ignored."""


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="goodbye"):
    """Gives the lease back; what the holder still has in flight is cancelled."""


ToHost = Hello | Request | Cancel | Inspect | Retire | Goodbye

# ── host → holder ────────────────────────────────────────────────────────────────────────────────────────────────


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """The request's first token is here. Comes once, before the first Chunk, and before the Finished."""

    id: RequestId
    num_input_tokens: int
    num_cached_tokens: int  # of them, those whose K/V was found in the cache
    queue_ms: float  # from arrival to the first step
    ttft_ms: float  # from arrival to the first token
    num_samples: int = 1  # answers to the prompt (n)
    prompt_ids: bytes = b""  # packed int32, when the request asks for token ids


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, tag="prompt_logprobs"):
    """Those of the prompt, once, when the request asks for them: before the end, and after Started."""

    id: RequestId
    logprobs: bytes  # JSON: [null, {token id: {"logprob", "rank", "decoded_token"}, …}, …], an entry per prompt token


class Chunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk"):
    """A piece of one of a request's answers, most often the only one. The pieces of an answer joined are its text; a
    piece may be empty. Without streaming each answer is one piece, and all come at the end.
    """

    id: RequestId
    text: str
    tokens: bytes  # packed int32: the output tokens that came since the last piece; text of theirs may be held back
    index: int = 0  # of the answer, 0 … num_samples - 1
    reason: FinishReason | None = None  # set on an answer's last piece, unless that is the Finished
    logprobs: bytes = b""  # JSON, as in PromptLogprobs, an entry per token in `tokens`; empty: nobody asked
    logprob: float = 0.0  # the sum of those of the tokens in `tokens`, where they are computed
    reasoning: str = ""  # with parse_output, as the text: what the model thinks
    tool_calls: bytes = b""  # with parse_output, JSON: streaming [{"index", "name"?, "arguments"}], else whole calls


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """The last piece of the last answer to end: the request ended well. All else is as in Chunk."""

    id: RequestId
    text: str
    tokens: bytes  # an end-of-sequence token that ended the answer is included
    reason: FinishReason
    num_input_tokens: int
    num_output_tokens: int  # all output tokens of the request, end-of-sequence tokens included
    index: int = 0
    logprobs: bytes = b""
    logprob: float = 0.0
    reasoning: str = ""
    tool_calls: bytes = b""


class Answered(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    """The answer of a request that names an operation. Nothing comes before it."""

    id: RequestId
    result: bytes  # JSON


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The answer of a request that ended in an error."""

    id: RequestId
    status: Status
    message: str  # for the client: no path, no traceback


Output = Started | PromptLogprobs | Chunk | Finished | Answered | Failed
TERMINAL = (Finished, Answered, Failed)


class Outputs(msgspec.Struct, frozen=True, array_like=True, tag="outputs"):
    """All that one step has for one holder, in order: one message, one encoding."""

    items: tuple[Output, ...]


class Health(msgspec.Struct, frozen=True, array_like=True, tag="health"):
    """Sent to every holder whenever the state changes, and with progress while starting."""

    state: EngineState
    detail: str  # one line for the operator's log
    exit_code: int = 0  # when FAILED: what a command that waited for the start returns


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Answers Hello."""

    protocol: int
    pid: int  # of the host: its end is the end of every request in flight
    health: Health


class Stats(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """Answers Inspect: what the engine holds at this moment."""

    state: EngineState
    open_requests: int  # records of the text actor that have no terminal answer yet
    waiting: int  # sequences not yet admitted
    running: int  # sequences that hold a slot
    free_slots: int
    total_slots: int
    free_pages: int  # pages that nobody uses, whether they hold a cached prefix or not
    total_pages: int
    steps: int  # plans run by the present engine group
    restarts: int  # times the engine group was started again
    pids: tuple[tuple[str, int], ...]  # ("scheduler", pid), ("worker-0", pid): empty when inline
    cached_pages: int = 0  # that hold a prefix for whoever asks
    matched_pages: int = 0  # found there by requests of the present engine group
    evicted_pages: int = 0  # given up again, for others or because they were not to be trusted
    retractions: int = 0  # times a running sequence had to give its pages back and go on later


ToHolder = Welcome | Health | Outputs | Stats
