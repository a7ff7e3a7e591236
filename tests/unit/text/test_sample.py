"""What an answer costs while it is read."""

from __future__ import annotations

import tracemalloc

from fakes.text_requests import take_output, validate_request
from fakes.tokenizers import ids_of_bytes
from minisgl_backend.messages.client import Finished, Request
from minisgl_backend.messages.engine import EndReason
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.text.limits import RequestLimits
from minisgl_backend.text.record import Record
from minisgl_backend.text.tokenizer import Tokenizer


def test_a_token_costs_the_same_however_long_the_text_is_that_waits(byte_level: Tokenizer) -> None:
    """Counted in bytes: a text that is copied for each token takes its own length again, every time. The least of some
    windows counts, since a list that grows and threads of other tests take some once in a while.
    """
    limits = RequestLimits(context_tokens=1 << 16, pool_tokens=1 << 16)
    request = Request(RequestId(1), b"Q", b'{"stop": "END", "max_tokens": 60000}', False, True)
    r = Record(request.id, validate_request(request, byte_level, limits, lambda: 0), byte_level, 0.0)
    ids, tokens, taken = ids_of_bytes(byte_level, b"0123456789 "), 22_000, []
    for number in range(tokens - 2_000):
        r.on_token(ids[number % len(ids)])
    tracemalloc.start()
    try:
        for begin in range(tokens - 2_000, tokens, 100):
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            for number in range(begin, begin + 100):
                r.on_token(ids[number % len(ids)])
            taken.append(tracemalloc.get_traced_memory()[1] - held)
    finally:
        tracemalloc.stop()
    r.on_end(EndReason.LENGTH)
    end = take_output(r)
    assert isinstance(end, Finished) and end.text == "0123456789 " * (tokens // 11)
    assert min(taken) < tokens // 2
