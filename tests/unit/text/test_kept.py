"""What one request has the host keep until its answers are sent is bounded, however its fields are combined."""

from __future__ import annotations

import pytest

from fakes.text_requests import validate_request
from minisgl_backend.errors import InvalidRequest
from minisgl_backend.messages.client import Request
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.text.limits import (
    MAX_ECHOED_CHARS,
    MAX_KEPT_LOGPROBS,
    RequestLimits,
    refuse_echoes,
    refuse_kept_logprobs,
)
from minisgl_backend.text.request import Accepted
from minisgl_backend.text.tokenizer import Tokenizer

ROOMY = RequestLimits(context_tokens=1 << 20, pool_tokens=1 << 20)


def accepted(tokenizer: Tokenizer, parameters: str, stream: bool, limits: RequestLimits = ROOMY) -> Accepted:
    request = Request(RequestId(1), None, parameters.encode(), stream, None, input_ids=pack_tokens([5]))
    return validate_request(request, tokenizer, limits, lambda: 0)


@pytest.mark.parametrize("best", [0, 5, 20])
@pytest.mark.parametrize("n", [1, 128])
def test_the_bound_is_that_of_the_tokens_of_all_answers_with_their_best_ones(n: int, best: int) -> None:
    most = MAX_KEPT_LOGPROBS // (n * (1 + best))
    refuse_kept_logprobs(best, n, most)
    with pytest.raises(InvalidRequest, match=r"^logprobs: .* not streamed"):
        refuse_kept_logprobs(best, n, most + 1)
    refuse_kept_logprobs(None, n, 1 << 30)


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        (
            '{"n": 128, "max_tokens": 1000, "logprobs": 20}',
            "must be at most 1 when n * max_tokens = 128000 and the answer is not streamed, got 20",
        ),
        (
            '{"n": 128, "max_tokens": 8000, "logprobs": 0}',
            "are told of at most 262144 tokens of answers that are not streamed, n * max_tokens = 1024000",
        ),
    ],
)
def test_logprobs_that_would_be_kept_in_great_number_are_refused_with_the_range_and_streamed_ones_are_not(
    byte_level: Tokenizer, parameters: str, says: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        accepted(byte_level, parameters, stream=False)
    assert str(caught.value) == f"logprobs: {says}"
    assert accepted(byte_level, parameters, stream=True).num_samples == 128


def test_answers_are_counted_as_long_as_the_context_lets_them_be(byte_level: Tokenizer) -> None:
    limits = RequestLimits(context_tokens=4096, pool_tokens=4096)
    asked = '{"max_tokens": 2147483647, "logprobs": 20}'
    assert accepted(byte_level, asked, stream=False, limits=limits).max_new_tokens == 4095


def test_a_prompt_stands_in_front_of_one_answer_however_long_and_of_several_within_a_bound() -> None:
    refuse_echoes("x" * (MAX_ECHOED_CHARS + 1), 1)
    refuse_echoes("x" * (MAX_ECHOED_CHARS // 128), 128)
    with pytest.raises(InvalidRequest, match=r"^echo: .* in front of each of 128 answers"):
        refuse_echoes("x" * (MAX_ECHOED_CHARS // 128 + 1), 128)


@pytest.mark.parametrize(("stream", "echo"), [(False, ""), (False, ', "echo": true'), (True, ', "echo": true')])
def test_a_prompt_that_would_be_copied_too_often_is_refused_unless_it_is_left_out(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch, stream: bool, echo: str
) -> None:
    monkeypatch.setattr("minisgl_backend.text.limits.MAX_ECHOED_CHARS", 1000)
    parameters = f'{{"n": 2{echo}}}'.encode()

    def ask(chars: int, exclude: bool | None) -> str:
        request = Request(RequestId(1), b"x" * chars, parameters, stream, exclude)
        return validate_request(request, byte_level, ROOMY, lambda: 0).prompt_text

    assert ask(500, None) == "x" * 500
    with pytest.raises(InvalidRequest) as caught:
        ask(501, None)
    assert str(caught.value) == (
        "echo: would put 501 characters in front of each of 2 answers, at most 1000 in all are taken; "
        "exclude_input_in_output without echo puts none there"
    )
    if not echo:
        assert ask(501, True) == ""
