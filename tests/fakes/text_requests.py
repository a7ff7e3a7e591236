"""What the text actor does with a request and with tokens, in one call each."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from minisgl_backend.messages.client import Output, Request, Started
from minisgl_backend.text.limits import RequestLimits
from minisgl_backend.text.record import Record
from minisgl_backend.text.request import Accepted, check_request, tokenise
from minisgl_backend.text.tokenizer import Tokenizer


def validate_request(
    request: Request, tokenizer: Tokenizer, limits: RequestLimits, draw_seed: Callable[[], int]
) -> Accepted:
    """As for a prompt short enough to encode on the spot."""
    return tokenise(check_request(request, tokenizer, limits), tokenizer, limits, draw_seed)


def feed(record: Record, tokens: Iterable[int]) -> None:
    """Output tokens, in order."""
    for token in tokens:
        record.on_token(token)


def take_output(record: Record) -> Output | None:
    """The one output there is, or None. Started is taken, too."""
    outputs = [output for output in record.take_outputs() if not isinstance(output, Started)]
    assert len(outputs) <= 1, outputs
    return outputs[0] if outputs else None


def take_started(record: Record) -> Started | None:
    """What is told with the first token, once. What else there is must be nothing but an error."""
    told = [output for output in record.take_outputs() if isinstance(output, Started)]
    return told[0] if told else None
