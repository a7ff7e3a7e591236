"""The record of one request: its tokens in, its outputs out, and exactly one terminal output.

Where it stands in the flow: made by the text actor when a request is accepted, fed from the scheduler's Progress,
emptied by the actor into Outputs for the holder. A plain state machine, without a loop, a clock or a lock:

    open ── the last answer ends / fail (the first wins) ──► ended ── take_outputs gives the terminal output ──► closed

A request has n answers (`text/sample.py`), each a sequence of the scheduler's; what goes wrong with one of them ends
all. Time is an argument. Tokens pile up until `take_outputs` is called; one call turns those of an answer into one
output, however many they are.
"""

from __future__ import annotations

from copy import copy

from minisgl_backend.errors import DeadlineExceeded, RequestCancelled, RequestError, SequenceFailed
from minisgl_backend.messages import engine
from minisgl_backend.messages.client import Chunk, Failed, Finished, FinishReason, Output, PromptLogprobs, Started
from minisgl_backend.messages.engine import EndReason
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.messages.plan import Logprobs
from minisgl_backend.messages.tokens import unpack_tokens
from minisgl_backend.text.detokenizer import Detokenizer
from minisgl_backend.text.parsing import OutputReader
from minisgl_backend.text.prompt_logprobs import PromptWriter
from minisgl_backend.text.request import Accepted
from minisgl_backend.text.sample import Sample
from minisgl_backend.text.stops import StopFinder, StopStrings
from minisgl_backend.text.tokenizer import Tokenizer


class Record:
    """One accepted request that has no terminal output yet. Owned by one actor."""

    __slots__ = (
        "_arrived_s",
        "_error",
        "_input_tokens",
        "_live",
        "_prompt_ids",
        "_prompt_logprobs",
        "_samples",
        "_started",
        "_stream",
        "closed",
        "request_id",
    )

    def __init__(self, request_id: RequestId, accepted: Accepted, tokenizer: Tokenizer, arrived_s: float) -> None:
        """arrived_s: when the request came, on the monotonic clock."""
        self.request_id = request_id
        self._arrived_s: float | None = arrived_s  # None: told with the Started
        self.closed = False  # the terminal output was taken
        self._stream = accepted.stream
        self._input_tokens = accepted.num_input_tokens
        self._prompt_ids = accepted.prompt_ids if accepted.return_token_ids else b""
        self._samples = _samples(accepted, tokenizer)
        self._live = dict.fromkeys(range(accepted.num_samples))  # answers that the scheduler has not let go
        self._started: Started | None = None  # told by the scheduler, and not taken yet
        tells_prompt = accepted.tell_prompt_logprobs
        self._prompt_logprobs = PromptWriter(self._input_tokens, tokenizer) if tells_prompt else None  # None: or told
        self._error: RequestError | None = None

    @property
    def ended(self) -> bool:
        """Nothing can change the answer any more."""
        return self._error is not None or all(sample.reason is not None for sample in self._samples)

    @property
    def unended(self) -> list[int]:
        """The answers that need more tokens."""
        return [index for index, sample in enumerate(self._samples) if sample.reason is None]

    @property
    def is_behind(self) -> bool:
        """There is something to write (`write_some`). The pieces of the answers wait for it."""
        return self._error is None and self._prompt_logprobs is not None and self._prompt_logprobs.is_behind

    def on_started(self, event: engine.Started, now_s: float) -> None:
        """The first token is here, of one of the answers. Ignored once ended, as tokens are."""
        if self._error is None and self._arrived_s is not None:
            arrived_s, self._arrived_s = self._arrived_s, None
            self._started = Started(
                id=self.request_id,
                num_input_tokens=self._input_tokens,
                num_cached_tokens=event.cached_tokens,
                queue_ms=max(0.0, event.planned_s - arrived_s) * 1e3,
                ttft_ms=max(0.0, now_s - arrived_s) * 1e3,
                num_samples=len(self._samples),
                prompt_ids=self._prompt_ids,
            )

    def on_prompt_logprobs(self, told: Logprobs) -> None:
        """Of some of the prompt's tokens; after a retraction they may come again. Before the first token."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs.add(told)

    def write_some(self) -> None:
        """Two milliseconds of work, while it is behind."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs.write_some()

    def on_logprobs(self, told: Logprobs, index: int = 0) -> None:
        """Of the tokens of an answer that come next."""
        self._samples[index].on_logprobs(told)

    def on_token(self, token: int, index: int = 0) -> None:
        """One output token. Ignored once ended: a cancel may overtake tokens on their way."""
        if self._error is None:
            self._samples[index].on_token(token)

    def on_end(self, reason: EndReason, index: int = 0) -> None:
        """The scheduler let the sequence of an answer go. Ignored once ended."""
        self._live.pop(index, None)
        if self._samples[index].reason is not None:
            return
        match reason:
            case EndReason.STOP:
                self._samples[index].on_end(FinishReason.STOP)
            case EndReason.LENGTH:
                self._samples[index].on_end(FinishReason.LENGTH)
            case EndReason.ABORT:
                self.fail(RequestCancelled("the request was cancelled"))
            case EndReason.FAILED:
                self.fail(SequenceFailed("the model gave no usable token for this request"))
            case EndReason.DEADLINE:
                self.fail(DeadlineExceeded("the deadline of this request passed before its answer was complete"))

    def fail(self, error: RequestError) -> None:
        """Ends the request with an error, from wherever it comes. Ignored once ended."""
        if not self.ended:
            self._error = error

    def take_aborts(self) -> list[int]:
        """Answers that have ended here while the scheduler still works on them: it has to be told, once."""
        if self._error is not None:
            over = list(self._live)
        else:
            over = [index for index in self._live if self._samples[index].reason is not None]
        for index in over:
            del self._live[index]
        return over

    def take_outputs(self) -> list[Output]:
        """What there is to send now, in order. After the terminal output always nothing.

        Streaming: a Chunk of each answer with all that piled up; its text may be empty while bytes wait for their
        character, or characters for the end of a stop string.
        """
        if self.closed:
            return []
        outputs: list[Output] = []
        if self._started is not None:
            outputs.append(self._started)
            self._started = None
        if self._error is not None:
            self.closed = True
            return [*outputs, Failed(self.request_id, self._error.status, str(self._error))]
        if self.is_behind:
            return outputs
        if self._prompt_logprobs is not None and self._prompt_logprobs.is_complete and self._samples[0].num_tokens:
            outputs.append(PromptLogprobs(self.request_id, self._prompt_logprobs.take()))
            self._prompt_logprobs = None
        if self._stream or self.ended:
            outputs += [self._output(index) for index, sample in enumerate(self._samples) if sample.has_news]
        return outputs

    def _output(self, index: int) -> Chunk | Finished:
        chunk = self._samples[index].take(self.request_id, index)
        if chunk.reason is None or not all(sample.taken for sample in self._samples):
            return chunk
        self.closed = True
        return Finished(
            id=self.request_id,
            text=chunk.text,
            tokens=chunk.tokens,
            reason=chunk.reason,
            num_input_tokens=self._input_tokens,
            num_output_tokens=sum(sample.num_tokens for sample in self._samples),
            index=index,
            logprobs=chunk.logprobs,
            logprob=chunk.logprob,
            reasoning=chunk.reasoning,
            tool_calls=chunk.tool_calls,
        )


def _samples(accepted: Accepted, tokenizer: Tokenizer) -> list[Sample]:
    """What they share is made once: the reading of the prompt's end, and the automaton of the stop strings."""
    strings = StopStrings(accepted.stop) if accepted.stop else None
    prompt = unpack_tokens(accepted.prompt_ids)
    parsing = accepted.parsing
    shown = () if parsing is None else parsing.special_tokens
    detokenizer = Detokenizer(tokenizer, prompt, accepted.skip_special_tokens, shown)
    return [
        Sample(
            accepted.reading,
            tokenizer,
            copy(detokenizer),
            None if strings is None else StopFinder(strings, accepted.reading.show_stop),
            accepted.prompt_text,
            None if parsing is None else OutputReader(parsing),
        )
        for _ in range(accepted.num_samples)
    ]
