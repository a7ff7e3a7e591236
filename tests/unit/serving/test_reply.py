"""One request's answer: exactly one FINAL, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.engine_link import chunk, failed, finished, started
from fakes.triton_stub import Answer, FakeSender, FakeStub, Tensor, TritonError
from minisgl_backend.errors import Status
from minisgl_backend.messages.client import FinishReason
from minisgl_backend.serving.outputs import Wanted
from minisgl_backend.serving.reply import LARGE_CHARS, Reply


def make(stream: bool = True, wanted: Wanted | None = None) -> tuple[FakeStub, FakeSender, Reply]:
    stub = FakeStub()
    sender = FakeSender(stub)
    return stub, sender, Reply(stub, sender, stream, wanted or Wanted())


def test_a_stream_is_deltas_and_a_last_response_with_the_reason_and_final() -> None:
    stub, sender, reply = make()
    reply.give([chunk(1, "Hel")])
    reply.give([chunk(1, "lo")])
    reply.give([finished(1, "!", FinishReason.LENGTH)])
    assert sender.answers == [
        Answer("Hel", "None", None, None, False),
        Answer("lo", "None", None, None, False),
        Answer("!", "length", None, None, True),
    ]
    assert reply.ended
    assert not stub.violations


def test_what_says_that_an_answer_goes_on_is_built_once_for_the_answer() -> None:
    stub, sender, reply = make()
    built: list[str] = []

    def tensor(name: str, array: Any) -> Tensor:
        built.append(name)
        return Tensor(name, array)

    stub.Tensor = tensor  # type: ignore[assignment, misc]
    for piece in "abc":
        reply.give([chunk(1, piece)])
    reply.give([finished(1, "d")])
    assert [answer.reason for answer in sender.answers] == ["None", "None", "None", "stop"]
    assert (built.count("text_output"), built.count("finish_reason")) == (4, 2)


def test_outputs_given_together_go_out_as_one_response() -> None:
    _, sender, reply = make()
    reply.give([chunk(1, "a"), chunk(1, "b")])
    reply.give([chunk(1, "c"), chunk(1, "d"), finished(1, "e")])
    assert [(answer.text, answer.final) for answer in sender.answers] == [("ab", False), ("cde", True)]


def test_an_empty_delta_is_not_sent() -> None:
    _, sender, reply = make()
    reply.give([chunk(1, "")])
    assert sender.answers == []


def test_an_answer_that_does_not_stream_is_one_response_even_when_pieces_arrive() -> None:
    _, sender, reply = make(stream=False)
    reply.give([chunk(1, "a")])
    reply.give([chunk(1, "b")])
    assert sender.answers == []
    reply.give([finished(1, "c")])
    assert sender.answers == [Answer("abc", "stop", None, None, True)]


def test_an_empty_answer_still_is_a_response() -> None:
    _, sender, reply = make(stream=False)
    reply.give([finished(1)])
    assert sender.answers == [Answer("", "stop", None, None, True)]


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (Status.INVALID_ARGUMENT, TritonError.INVALID_ARG),
        (Status.UNSUPPORTED, TritonError.UNSUPPORTED),
        (Status.UNAVAILABLE, TritonError.UNAVAILABLE),
        (Status.CANCELLED, TritonError.CANCELLED),
        (Status.INTERNAL, TritonError.INTERNAL),
    ],
)
def test_each_status_has_tritons_code(status: Status, code: int) -> None:
    _, sender, reply = make()
    reply.give([failed(1, status, "because")])
    assert sender.answers == [Answer(None, None, "because", code, True)]


def test_a_stub_without_the_code_still_carries_the_message() -> None:
    class OldError:
        def __init__(self, message: str) -> None:
            self.message = message
            self.code = None

    stub, sender, reply = make()
    stub.TritonError = OldError
    reply.fail(Status.CANCELLED, "gone")
    assert sender.answers == [Answer(None, None, "gone", None, True)]


def test_after_the_end_everything_is_swallowed_and_logged() -> None:
    stub, sender, reply = make()
    reply.give([finished(1, "x"), chunk(1, "late"), finished(1)])
    reply.give([chunk(1, "later")])
    reply.fail(Status.INTERNAL, "latest")
    assert len(sender.answers) == sender.finals == 1
    assert len(stub.Logger.with_level("error")) == 4
    assert not stub.violations


def test_the_first_end_wins() -> None:
    _, sender, reply = make()
    reply.give([failed(1, Status.CANCELLED, "gone"), finished(1, "x")])
    assert [answer.code for answer in sender.answers] == [TritonError.CANCELLED]


def test_text_that_can_not_be_encoded_ends_the_answer_with_an_error() -> None:
    stub, sender, reply = make()
    reply.give([chunk(1, "\ud83d")])
    assert [(answer.code, answer.final) for answer in sender.answers] == [(TritonError.INTERNAL, True)]
    assert reply.ended
    assert stub.Logger.with_level("error")


def test_a_last_response_that_can_not_be_built_becomes_an_error_with_final() -> None:
    _, sender, reply = make(stream=False)
    reply.give([finished(1, "\ud83d")])
    assert [(answer.code, answer.final) for answer in sender.answers] == [(TritonError.INTERNAL, True)]


def test_a_send_that_raises_becomes_an_error_with_final() -> None:
    stub, sender, reply = make()
    sender.refuse_next = 1
    reply.give([chunk(1, "x")])
    assert [(answer.code, answer.final) for answer in sender.answers] == [(TritonError.INTERNAL, True)]
    assert reply.ended
    assert not stub.violations


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_answer_without_room_in_shared_memory_becomes_an_error_with_final(stream: bool) -> None:
    """The stub closes the sender before it copies: FINAL on that response would be lost, and the client hang."""
    stub, sender, reply = make(stream)
    sender.room_chars = LARGE_CHARS
    reply.give([finished(1, "x" * (LARGE_CHARS + 1))])
    assert [(answer.code, answer.final) for answer in sender.answers] == [(TritonError.INTERNAL, True)]
    assert not stub.violations


def test_a_long_answer_is_one_response_and_final_by_itself() -> None:
    _, sender, reply = make(stream=False)
    text = "x" * (LARGE_CHARS + 1)
    reply.give([finished(1, text)])
    assert sender.answers == [Answer(text, "stop", None, None, False), Answer(None, None, None, None, True)]


def test_when_triton_refuses_final_the_reply_gives_up_and_says_so_in_the_log() -> None:
    stub, sender, reply = make()
    sender.refuse_next = 1
    reply.give([finished(1, "x")])
    assert reply.ended
    assert sender.finals == 0
    assert len(stub.Logger.with_level("error")) == 2


def test_the_server_is_not_asked_for_a_cancel_after_final() -> None:
    stub, sender, reply = make()
    sender.cancelled = True
    assert reply.is_cancelled()
    reply.give([finished(1)])
    assert not reply.is_cancelled()
    assert not stub.violations


def test_tokens_without_text_wait_for_it_unless_their_ids_are_wanted() -> None:
    _, sender, reply = make(wanted=Wanted(num_output_tokens=True))
    reply.give([started(1), chunk(1, "", 7)])
    assert sender.answers == []
    reply.give([chunk(1, "é", 8)])
    assert sender.answers == [Answer("é", "None", None, None, False, {"num_output_tokens": [2]})]

    _, sender, reply = make(wanted=Wanted(output_ids=True))
    reply.give([started(1), chunk(1, "", 7)])
    assert sender.answers == [Answer("", "None", None, None, False, {"output_ids": [7]})]


def test_every_token_is_in_exactly_one_response_however_they_are_merged() -> None:
    stub, sender, reply = make(wanted=Wanted(num_output_tokens=True, output_ids=True))
    reply.give([started(1), chunk(1, "a", 1), chunk(1, "b", 2, 3)])
    reply.give([chunk(1, "c", 4), finished(1, "d", tokens=[5, 6])])
    assert [answer.more["output_ids"] for answer in sender.answers] == [[1, 2, 3], [4, 5, 6]]
    assert [answer.more["num_output_tokens"] for answer in sender.answers] == [[3], [3]]
    assert not stub.violations


def test_the_start_alone_is_no_response_and_an_error_carries_no_outputs() -> None:
    _, sender, reply = make(wanted=Wanted(num_input_tokens=True, perf_metrics=True))
    reply.give([started(1)])
    assert sender.answers == []
    reply.give([failed(1, Status.UNAVAILABLE, "gone")])
    assert sender.answers == [Answer(None, None, "gone", TritonError.UNAVAILABLE, True)]


def test_a_long_list_of_ids_goes_out_before_final_as_a_long_text_does() -> None:
    _, sender, reply = make(stream=False, wanted=Wanted(output_ids=True))
    ids = list(range(LARGE_CHARS // 4 + 1))
    reply.give([started(1), finished(1, "short", tokens=ids)])
    assert sender.answers == [
        Answer("short", "stop", None, None, False, {"output_ids": ids}),
        Answer(None, None, None, None, True),
    ]
