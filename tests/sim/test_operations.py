"""Tokenising and detokenising through all actors: beside the loop where it takes long, refused, cancelled, once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fakes.engine import fake_engine
from minisgl_backend.errors import Status
from minisgl_backend.messages.client import Failed
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.text import operations
from minisgl_backend.text.prompt import LONG_PROMPT
from minisgl_backend.text.tokenizer import Tokenizer

LONG = "the cat " * LONG_PROMPT


@contextmanager
def held_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What runs in threads waits until the event is set; set in any case at the end."""
    goes_on = threading.Event()
    work = operations.result_of

    def held(operation: operations.Operation, *others: object) -> bytes:
        if threading.current_thread() is not threading.main_thread():
            goes_on.wait()
        return work(operation, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(operations, "result_of", held)
    try:
        yield goes_on
    finally:
        goes_on.set()


async def test_texts_chats_and_tokens_of_any_length_are_answered_once(tiny_llama: Path, overlap: bool) -> None:
    tokenizer = Tokenizer.load(tiny_llama)
    chat = [{"role": "user", "content": "the cat"}]
    async with fake_engine(tiny_llama, overlap=overlap) as engine:
        holder = engine.holder()
        for text in ("the cat", LONG):
            told = await holder.result(holder.ask("tokenize", text_input=text.encode()))
            assert told["tokens"] == tokenizer.encode(text) and told["count"] == len(told["tokens"])
        told = await holder.result(holder.ask("tokenize", messages=json.dumps(chat).encode()))
        assert told["tokens"] == tokenizer.encode_chat(chat)
        told = await holder.result(holder.ask("detokenize", input_ids=pack_tokens(tokenizer.encode("the cat"))))
        assert told["prompt"].endswith("the cat")
        assert (await holder.idle()).steps == 0, "nothing is computed for them"


async def test_a_refusal_and_an_unknown_operation_fail_alone(tiny_llama: Path, overlap: bool) -> None:
    async with fake_engine(tiny_llama, overlap=overlap) as engine:
        holder = engine.holder()
        bad = [
            holder.ask("tokenize"),
            holder.ask("tokenise", text_input=b"a"),
            holder.ask("detokenize", input_ids=pack_tokens([1 << 30])),
            holder.ask("tokenize", messages=b'[{"role": "user", "content": 5}]' + b" " * LONG_PROMPT),  # in a thread
        ]
        for id, field in zip(bad, ("text_input", "operation", "input_ids", "messages"), strict=True):
            end = await holder.answer(id)
            assert isinstance(end, Failed) and end.status is Status.INVALID_ARGUMENT
            assert end.message.startswith(field)
        assert (await holder.result(holder.ask("tokenize", text_input=b"the")))["count"] >= 1


async def test_long_work_is_beside_the_loop_and_ends_with_who_asked_for_it(
    tiny_llama: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_threads(monkeypatch) as goes_on:
        async with fake_engine(tiny_llama, overlap=overlap) as engine:
            holder = engine.holder()
            cancelled, waits = (holder.ask("tokenize", text_input=LONG.encode()) for _ in range(2))
            await holder.text(holder.request("the cat", max_tokens=8))  # streams go on meanwhile
            assert (await holder.result(holder.ask("tokenize", text_input=b"the")))["count"] >= 1
            holder.cancel(cancelled)
            end = await holder.answer(cancelled)
            assert isinstance(end, Failed) and end.status is Status.CANCELLED
            goes_on.set()
            assert (await holder.result(waits))["count"] > LONG_PROMPT
            await holder.idle()


async def test_they_count_against_the_queue(tiny_llama: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_threads(monkeypatch) as goes_on:
        async with fake_engine(tiny_llama, overlap=overlap, max_running=1, queue_limit=1) as engine:
            holder = engine.holder()
            open_ = [holder.ask("tokenize", text_input=LONG.encode()) for _ in range(2)]
            end = await holder.answer(holder.ask("tokenize", text_input=b"the"))
            assert isinstance(end, Failed) and "queue is full" in end.message
            goes_on.set()
            for id in open_:
                await holder.result(id)
