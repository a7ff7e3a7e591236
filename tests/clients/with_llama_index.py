"""LlamaIndex's connector for Triton, against `ensemble` over gRPC.

It asks greedily unless told otherwise (top_k 1, top_p 0), stops reading one token before `tokens`, joins a chat into a
plain prompt of its own, and has neither asyncio nor a way to leave an answer: who ends its process ends its request.
"""

from __future__ import annotations

from typing import Any

from checks import ENDLESS_TOKENS, MANY_TOKENS, Addresses, raised
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.nvidia_triton import NvidiaTriton
from tritonclient.utils import InferenceServerException


def connector(at: Addresses, **options: Any) -> NvidiaTriton:
    """One token more, which it does not read."""
    return NvidiaTriton(server_url=at.grpc, **{"tokens": at.tokens + 1, **options})


def is_the_answer(text: str, at: Addresses) -> bool:
    """It counts pieces: where tokens came together in one, it reads the last token, too."""
    return at.completion_and_one.startswith(text) and text.startswith(at.completion)


def check_that_a_completion_is_the_engines_answer_whole_and_streamed(at: Addresses) -> None:
    model = connector(at)
    assert is_the_answer(model.complete(at.prompt).text, at)
    pieces = list(model.stream_complete(at.prompt))
    text = "".join(piece.delta for piece in pieces)
    assert text == pieces[-1].text and is_the_answer(text, at) and len(pieces) <= at.tokens
    pieces = list(connector(at, tokens=MANY_TOKENS).stream_complete(at.prompt))
    assert len(pieces) > 1 and pieces[-1].text.startswith(at.completion)
    template = PromptTemplate(at.prompt.replace("France", "{country}"))
    assert is_the_answer(model.predict(template, country="France"), at)


def check_that_a_chat_is_answered_whole_and_streamed(at: Addresses) -> None:
    model, chat = connector(at), [ChatMessage(role="user", content=at.prompt)]
    whole = model.chat(chat).message.content
    text = "".join(piece.delta for piece in model.stream_chat(chat))
    assert text and (whole.startswith(text) or text.startswith(whole)), "one may have read the last token"


def check_that_a_model_is_loaded_first_where_it_is_told_to(at: Addresses) -> None:
    model = connector(at, triton_load_model_call=True, reuse_client=True)
    assert is_the_answer(model.complete(at.prompt).text, at)


def check_that_sampling_parameters_are_heard(at: Addresses) -> None:
    hot = connector(at, temperature=5.0, top_k=50, top_p=1.0, repetition_penalty=1.5)
    assert not is_the_answer(hot.complete(at.prompt).text, at)


def check_that_refusals_are_tritons_exceptions(at: Addresses) -> None:
    raised(InferenceServerException, "beam_width: must be 1, got 2", lambda: connector(at, beam_width=2).complete("x"))
    raised(InferenceServerException, "the prompt is too long: 90", lambda: connector(at).complete("word " * 9000))
    stream = connector(at, temperature=-1.0).stream_complete("x")
    raised(InferenceServerException, "temperature: must be a number in", lambda: list(stream))


def leaves_by_dying(at: Addresses) -> int:
    stream = connector(at, tokens=ENDLESS_TOKENS).stream_complete("One, two, three, one, two, three, one, two,")
    assert next(stream).delta and next(stream).delta
    return ENDLESS_TOKENS
