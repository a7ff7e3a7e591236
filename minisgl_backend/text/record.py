"""The record of one request: its tokens in, its outputs out, and exactly one terminal output.

Where it stands in the flow: made by the text actor when a request is accepted, fed from the scheduler's Progress,
emptied by the actor into Outputs for the holder. A plain state machine, without a loop, a clock or a lock:

    open ── on_end / fail (the first wins) ──► ended ── take_output gives the terminal output ──► closed

Time is an argument. Tokens pile up until `take_output` is called; one call turns them into one output, however many
they are.
"""

from __future__ import annotations

from array import array

from minisgl_backend.errors import DeadlineExceeded, RequestCancelled, RequestError, SequenceFailed
from minisgl_backend.messages import engine
from minisgl_backend.messages.client import Chunk, Failed, Finished, FinishReason, Output, Started
from minisgl_backend.messages.engine import EndReason
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.messages.tokens import pack_tokens, unpack_tokens
from minisgl_backend.text.detokenizer import Detokenizer
from minisgl_backend.text.request import Accepted
from minisgl_backend.text.tokenizer import Tokenizer


class Record:
    """One accepted request that has no terminal output yet. Owned by one actor."""

    __slots__ = (
        "_arrived_s",
        "_detokenizer",
        "_end",
        "_fresh",
        "_input_tokens",
        "_output_tokens",
        "_prefix",
        "_started",
        "_stops",
        "_stream",
        "closed",
        "request_id",
    )

    def __init__(self, request_id: RequestId, accepted: Accepted, tokenizer: Tokenizer, arrived_s: float) -> None:
        """arrived_s: when the request came, on the monotonic clock."""
        self.request_id = request_id
        self._arrived_s = arrived_s
        self.closed = False  # the terminal output was taken
        self._stream = accepted.stream
        self._stops = accepted.stop_token_ids
        self._prefix = accepted.prompt_text
        self._input_tokens = accepted.num_input_tokens
        self._output_tokens = 0
        self._detokenizer = Detokenizer(tokenizer, unpack_tokens(accepted.prompt_ids))
        self._fresh: array[int] = array("i")  # output tokens not yet in any output
        self._started: Started | None = None  # told by the scheduler, and not taken yet
        self._end: FinishReason | RequestError | None = None

    @property
    def ended(self) -> bool:
        """Nothing can change the answer any more."""
        return self._end is not None

    def on_started(self, event: engine.Started, now_s: float) -> None:
        """The first token is here. Ignored once ended, as tokens are."""
        if self._end is None:
            self._started = Started(
                id=self.request_id,
                num_input_tokens=self._input_tokens,
                num_cached_tokens=event.cached_tokens,
                queue_ms=max(0.0, event.planned_s - self._arrived_s) * 1e3,
                ttft_ms=max(0.0, now_s - self._arrived_s) * 1e3,
            )

    def on_token(self, token: int) -> None:
        """One output token. Ignored once ended: a cancel may overtake tokens on their way."""
        if self._end is None:
            self._fresh.append(token)

    def on_end(self, reason: EndReason) -> None:
        """The scheduler let the sequence go. Ignored once ended."""
        match reason:
            case EndReason.STOP:
                self._finish(FinishReason.STOP)
            case EndReason.LENGTH:
                self._finish(FinishReason.LENGTH)
            case EndReason.ABORT:
                self.fail(RequestCancelled("the request was cancelled"))
            case EndReason.FAILED:
                self.fail(SequenceFailed("the model gave no usable token for this request"))
            case EndReason.DEADLINE:
                self.fail(DeadlineExceeded("the deadline of this request passed before its answer was complete"))

    def fail(self, error: RequestError) -> None:
        """Ends the request with an error, from wherever it comes. Ignored once ended."""
        if self._end is None:
            self._end = error

    def take_started(self) -> Started | None:
        """What is known with the first token, once; to be sent before `take_output`. None before and after."""
        started, self._started = self._started, None
        return None if self.closed else started

    def take_output(self) -> Output | None:
        """What there is to send now, or None. After the terminal output always None.

        Streaming: a Chunk with all that piled up; its text may be empty while bytes wait for their character.
        """
        if self.closed:
            return None
        if isinstance(self._end, RequestError):
            self.closed = True
            return Failed(self.request_id, self._end.status, str(self._end))
        if self._end is not None:
            return self._last_output(self._end)
        if not self._stream or not self._fresh:
            return None
        tokens = self._take_fresh()
        return Chunk(self.request_id, self._text_of(tokens), pack_tokens(tokens))

    def _finish(self, reason: FinishReason) -> None:
        if self._end is None:
            self._end = reason

    def _last_output(self, reason: FinishReason) -> Finished:
        self.closed = True
        tokens = self._take_fresh()
        return Finished(
            id=self.request_id,
            text=self._prefix + self._text_of(tokens) + self._detokenizer.finish(),
            tokens=pack_tokens(tokens),
            reason=reason,
            num_input_tokens=self._input_tokens,
            num_output_tokens=self._output_tokens,
        )

    def _take_fresh(self) -> array[int]:
        tokens, self._fresh = self._fresh, array("i")
        self._output_tokens += len(tokens)
        return tokens

    def _text_of(self, tokens: array[int]) -> str:
        """A stop token ends the sequence, so it can only be the last; it counts, but is not shown."""
        stopped = bool(tokens) and tokens[-1] in self._stops
        return self._detokenizer.push(tokens[:-1] if stopped else tokens)
