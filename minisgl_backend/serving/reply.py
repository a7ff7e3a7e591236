"""The answer to one Triton request: the only place that touches its response sender.

Where it stands in the flow: the bridge makes a Reply in `execute`, and either refuses the request with it at once or
gives it to a sender thread, which feeds it the engine's outputs. Whatever happens in between, exactly one response
carries FINAL: without it the client hangs and the model can not be unloaded; a second one crashes the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minisgl_backend.errors import Status
from minisgl_backend.messages.client import Answered, Failed, Finished, Output, PromptLogprobs, Started
from minisgl_backend.serving.outputs import NOT_FINISHED, Form, Told, strings
from minisgl_backend.serving.triton import ResponseSender, TritonStub

LARGE_CHARS = 65_536
"""A last response of more (characters of text, bytes of token ids, logprobs and tool calls) goes out ahead of FINAL.
The stub closes a sender before it copies the response to shared memory: a last response that finds no room there would
take FINAL with it."""

ERROR_CODES = {
    Status.INVALID_ARGUMENT: "INVALID_ARG",
    Status.UNSUPPORTED: "UNSUPPORTED",
    Status.UNAVAILABLE: "UNAVAILABLE",
    Status.CANCELLED: "CANCELLED",
    Status.INTERNAL: "INTERNAL",
}


class Reply:
    """Owns one response sender. Used by one thread at a time (see ResponseSender); the owner hands it over whole.

    A streamed answer is one response per call of `give` that brings text (or tokens whose ids are wanted); any other
    answer is one response in all. FINAL travels on the last of them, after a long one by itself. With n answers every
    response has an element for each: a delta that may be empty, and a reason that stays once it is there.
    """

    def __init__(self, stub: TritonStub, sender: ResponseSender, stream: bool, form: Form) -> None:
        self._stub = stub
        self._sender = sender
        self._stream = stream
        self._form = form
        self._told = Told(ids=form.output_ids)
        self._not_finished: Any = None  # one tensor for all responses that do not end the answer, once it is needed
        self._ended = False

    @property
    def ended(self) -> bool:
        """FINAL was sent, or Triton refused every attempt to send it."""
        return self._ended

    def is_cancelled(self) -> bool:
        """Whether the client left. False after FINAL: asking Triton then crashes the server."""
        return not self._ended and bool(self._sender.is_cancelled())

    def give(self, outputs: Sequence[Output]) -> None:
        """Sends outputs, in order, joined into one response. Never raises: an exception ends the answer with an
        error. Text that arrives together with a Failed is not sent: the error ends the answer.
        """
        try:
            for output in outputs:
                self._take(output)
            if self._stream and not self._ended and self._has_news():
                self._sender.send(self._piece())
        except Exception as error:
            self._log(f"a response could not be sent: {error!r}")
            self.fail(Status.INTERNAL, "the answer could not be sent")

    def fail(self, status: Status, message: str) -> None:
        """Ends the answer with an error. Never raises. After the end it is logged and has no effect."""
        if self._ended:
            self._log(f"an answer that has ended was to fail: {status}: {message}")
            return
        self._end(self._error, status, message)

    def _take(self, output: Output) -> None:
        if self._ended:
            self._log(f"an answer that has ended got one more {type(output).__name__}")
        elif isinstance(output, Started):
            self._told.start(output)
        elif isinstance(output, Failed):
            self.fail(output.status, output.message)
        elif isinstance(output, PromptLogprobs):
            self._told.prompt_logprobs = output.logprobs
        elif isinstance(output, Answered):
            self._told.result = output.result
            self._finish()
        else:
            self._told.each[output.index].add(output)
            if isinstance(output, Finished):
                self._finish()

    def _has_news(self) -> bool:
        tells_tokens = self._told.ids or self._form.logprobs
        return any(
            held.text or held.ends or held.reasoning or held.tool_calls or (held.tokens and tells_tokens)
            for held in self._told.each
        )

    def _finish(self) -> None:
        told = self._told
        once = len(told.prompt_logprobs) + len(told.result)
        if sum(held.size(told.ids) for held in told.each) + once > LARGE_CHARS:
            self._sender.send(self._piece())
            self._end(_nothing)
        else:
            self._end(self._piece)

    def _end(self, build: Callable[..., Any], *arguments: Any) -> None:
        """Sends FINAL with the response `build` makes, or else with an error. Marked ended before the first attempt:
        after an exception nobody knows whether FINAL went out, and where it did Triton refuses it the second time.
        """
        self._ended = True
        attempts = ((build, arguments), (self._error, (Status.INTERNAL, "the answer could not be sent")))
        for make, values in attempts:
            try:
                self._sender.send(make(*values), self._stub.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                return
            except Exception as error:
                self._log(f"the last response could not be sent: {error!r}")

    def _piece(self) -> Any:
        """The response of what is held, which is then held no more."""
        arrays = self._form.arrays(self._told)
        tensors = [self._stub.Tensor(name, array) for name, array in arrays.items()]
        if self._form.finish_reason:
            tensors.append(self._reasons())
        self._told.sent()
        return self._stub.InferenceResponse(tensors)

    def _reasons(self) -> Any:
        """Triton only reads a tensor, so one may be in many responses, though of one thread alone."""
        reasons = [held.reason for held in self._told.each]
        if any(reason != NOT_FINISHED for reason in reasons):
            return self._stub.Tensor("finish_reason", strings(reason.encode("ascii") for reason in reasons))
        if self._not_finished is None:
            self._not_finished = self._stub.Tensor(
                "finish_reason", strings([NOT_FINISHED.encode("ascii")] * len(reasons))
            )
        return self._not_finished

    def _error(self, status: Status, message: str) -> Any:
        code = getattr(self._stub.TritonError, ERROR_CODES[status], None)  # old stubs lack some codes, or all
        error = self._stub.TritonError(message) if code is None else self._stub.TritonError(message, code)
        return self._stub.InferenceResponse([], error)

    def _log(self, line: str) -> None:
        self._stub.Logger.log_error(f"minisgl: {line}")


def _nothing() -> None:
    """FINAL alone is no response to the client."""
