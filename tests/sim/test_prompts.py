"""Prompts of every kind through all actors, and what a request's first token tells."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fakes.engine import Holder, fake_engine
from minisgl_backend.messages.client import Chunk, Failed, Finished, Request, Started
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.text import tokenizer
from minisgl_backend.text.prompt import LONG_PROMPT
from minisgl_backend.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "the cat"}]
PARAMETERS = b'{"temperature": 0, "max_tokens": 12}'


def submit(holder: Holder, id: int, *, stream: bool = False, **prompt: Any) -> RequestId:
    """A request that the holder's own `request` does not know how to make."""
    fields = {"text_input": None, "parameters": PARAMETERS, **prompt}
    holder.outputs[RequestId(id)] = []
    holder.send(Request(id=RequestId(id), stream=stream, exclude_input_in_output=None, **fields))
    return RequestId(id)


async def test_a_chat_and_its_ids_are_the_same_prompt(tiny_llama: Path, overlap: bool) -> None:
    ids = Tokenizer.load(tiny_llama).encode_chat(CHAT)
    async with fake_engine(tiny_llama, overlap=overlap) as engine:
        holder = engine.holder()
        by_chat = await holder.answer(submit(holder, 101, messages=json.dumps(CHAT).encode()))
        by_ids = await holder.answer(submit(holder, 102, input_ids=pack_tokens(ids)))
        assert isinstance(by_chat, Finished) and isinstance(by_ids, Finished)
        assert (by_chat.tokens, by_chat.num_input_tokens) == (by_ids.tokens, len(ids))
        assert by_chat.text == by_ids.text  # and neither begins with its prompt


async def test_a_long_chat_is_tokenised_beside_the_loop_and_refused_or_answered_as_a_short_one(
    tiny_llama: Path,
    overlap: bool,
) -> None:
    long = [{"role": "user", "content": "the cat " * 40} for _ in range(20)]
    async with fake_engine(tiny_llama, overlap=overlap) as engine:
        holder = engine.holder()
        answered = submit(holder, 101, messages=json.dumps([*CHAT, {"role": "x", "y": "z" * 3000}]).encode())
        refused = submit(holder, 102, messages=json.dumps(long * 50).encode())
        bad = submit(holder, 103, messages=b'[{"role": "user", "content": "\\ud800"}' + b" " * 3000 + b"]")
        assert isinstance(await holder.answer(answered), Finished)
        for id, says in ((refused, "messages: "), (bad, "messages: holds a lone surrogate")):
            end = await holder.answer(id)
            assert isinstance(end, Failed) and end.message.startswith(says)
        await holder.idle()


@contextmanager
def blocked_templates(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Templates of clients that do not end within the body, and the names of those that began."""
    begun: list[str] = []
    gate = threading.Event()

    def render(source: str, variables: Mapping[str, Any]) -> str:
        begun.append(source)
        assert gate.wait(20)
        return "the cat"

    monkeypatch.setattr(tokenizer, "render_client_template", render)
    try:
        yield begun
    finally:
        gate.set()


async def test_templates_of_clients_that_do_not_end_hold_nobody_elses_prompt_up_and_those_given_up_never_run(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chat(id: int, parameters: Mapping[str, Any]) -> RequestId:
        raw = json.dumps([*CHAT, {"role": "x", "y": "z" * LONG_PROMPT}]).encode()
        return submit(holder, id, messages=raw, parameters=json.dumps({"max_tokens": 3, **parameters}).encode())

    async with fake_engine(tiny_llama, allow_client_template=True) as engine:
        holder = engine.holder()
        with blocked_templates(monkeypatch) as begun:
            slow = [chat(100 + n, {"chat_template": str(n)}) for n in range(40)]  # more than the loop has threads
            assert isinstance(await holder.answer(chat(200, {})), Finished)
            for id in slow[2:]:
                holder.cancel(id)
                assert isinstance(await holder.answer(id), Failed)
        for id in slow[:2]:
            assert isinstance(await holder.answer(id), Finished)
        await holder.idle()
        assert sorted(begun) == ["0", "1"]


async def test_twenty_megabytes_of_messages_are_refused_in_one_turn_of_the_loop(
    tiny_llama: Path, overlap: bool
) -> None:
    async with fake_engine(tiny_llama, overlap=overlap) as engine:
        holder = engine.holder()
        huge = submit(holder, 101, messages=b"[" * (20 << 20))
        small = submit(holder, 102, messages=json.dumps(CHAT).encode())
        assert isinstance(await holder.answer(small), Finished)
        end = await holder.answer(huge)
        assert isinstance(end, Failed) and end.message.startswith("messages: must hold at most")


async def test_every_answer_tells_its_start_once_and_first(tiny_llama: Path, overlap: bool) -> None:
    async with fake_engine(tiny_llama, overlap=overlap) as engine:
        holder = engine.holder()
        streams = [submit(holder, 200 + n, stream=n % 2 == 0, text_input=b"the cat" * (1 + n)) for n in range(12)]
        for id in streams:
            assert isinstance(await holder.answer(id), Finished)
            first, *rest = holder.outputs[id]
            assert isinstance(first, Started) and all(isinstance(output, Chunk | Finished) for output in rest)
            last = rest[-1]
            assert isinstance(last, Finished) and first.num_input_tokens == last.num_input_tokens
            assert 0 <= first.queue_ms <= first.ttft_ms and first.num_cached_tokens < first.num_input_tokens


async def test_a_refused_request_tells_no_start(tiny_llama: Path, overlap: bool) -> None:
    async with fake_engine(tiny_llama, overlap=overlap) as engine:
        holder = engine.holder()
        id = submit(holder, 101, input_ids=pack_tokens([-1]))
        end = await holder.answer(id)
        assert isinstance(end, Failed) and end.message.startswith("input_ids: must be from 0 to")
        assert holder.outputs[id] == [end]
