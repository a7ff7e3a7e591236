"""`minisgl_client` against a real tritonserver: what it gives, how it leaves, and what it says when things die."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from fakes.tiny_model import make_tiny_llama
from load.serving import PATIENCE_S, Server, eventually, serving
from minisgl_backend.models.locate import fetched_folder
from minisgl_client.aio import AsyncClient
from minisgl_client.client import Client
from minisgl_client.errors import BrokenOff, ClientError, RequestRefused, TimedOut, Unavailable, Unsupported
from minisgl_client.pieces import Answer

PROMPT = "The capital of France is"
TOKENS = 1000
CHAT = [{"role": "user", "content": "Name a river."}]


def test_pieces_the_whole_answer_and_the_answer_to_token_ids_are_the_same_and_tell_their_cost(server: Server) -> None:
    ids = Tokenizer.from_file(str(fetched_folder("smollm2") / "tokenizer.json")).encode(PROMPT).ids
    with Client(server.grpc) as client:
        pieces = list(client.stream(PROMPT, max_tokens=4, temperature=0, return_output_ids=True))
        whole = client.generate(PROMPT, max_tokens=4, temperature=0, return_output_ids=True)
        by_ids = client.generate(input_ids=ids, max_tokens=4, temperature=0, return_output_ids=True)
    streamed = Answer.of(pieces)
    assert streamed.text == whole.text == by_ids.text and whole.text.startswith(" Paris")
    assert streamed.output_ids == whole.output_ids == by_ids.output_ids and len(whole.output_ids or ()) == 4
    assert {piece.finish_reason for piece in pieces[:-1]} <= {None} and whole.finish_reason == "length"
    for usage in (streamed.usage, whole.usage, by_ids.usage, pieces[0].usage):
        assert usage.input_tokens == len(ids) and usage.cached_tokens is not None
        assert usage.ttft_ms is not None and usage.queue_ms is not None and usage.ttft_ms >= usage.queue_ms >= 0
    assert streamed.usage.output_tokens == whole.usage.output_tokens == by_ids.usage.output_tokens == 4


# ── on the fake device: answers as long as one likes, and cheap ──────────────────────────────────────────────────


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def endless(tiny: Path) -> Iterator[Server]:
    """A token every 20 ms, for 20 seconds."""
    with serving("--model", str(tiny), device="fake", fake_step_ms=20) as server:
        yield server


async def test_many_chats_at_once_on_one_asyncio_client(endless: Server) -> None:
    async with AsyncClient(endless.grpc) as client:
        answers = await asyncio.gather(
            *(client.generate(messages=CHAT, max_tokens=8, ignore_eos=True) for _ in range(200))
        )
    assert {(answer.usage.output_tokens, answer.finish_reason) for answer in answers} == {(8, "length")}
    assert len({answer.usage.input_tokens for answer in answers}) == 1


def test_many_threads_at_once_on_one_client(endless: Server) -> None:
    counts: list[int | None] = []

    def ask() -> None:
        pieces = list(client.stream(PROMPT, max_tokens=8, ignore_eos=True))
        counts.append(Answer.of(pieces).usage.output_tokens)

    with Client(endless.grpc) as client:
        threads = [threading.Thread(target=ask) for _ in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counts == [8] * 32


@pytest.mark.parametrize(
    ("ask", "kind", "named"),
    [
        (lambda client: client.generate(PROMPT, temperature=-1), RequestRefused, "temperature"),
        (lambda client: client.generate(PROMPT, temprature=1), RequestRefused, "temperature"),
        (lambda client: client.generate(PROMPT, best_of=2), Unsupported, "best_of"),
        (lambda client: client.generate(""), RequestRefused, "text_input"),
        (lambda client: client.generate(input_ids=[]), RequestRefused, "input_ids"),
        (lambda client: client.generate(input_ids=[2**31 - 1]), RequestRefused, "input_ids"),
        (lambda client: client.generate(messages=[]), RequestRefused, "messages"),
        (lambda client: client.generate("word " * 20_000), RequestRefused, "text_input"),
        (lambda client: list(client.stream(PROMPT, max_tokens=0)), RequestRefused, "max_tokens"),
    ],
)
def test_what_the_server_refuses_is_an_error_of_its_kind(
    endless: Server, ask: Callable[[Client], object], kind: type[ClientError], named: str
) -> None:
    with Client(endless.grpc) as client:
        with pytest.raises(kind, match=named):
            ask(client)
        assert client.generate(PROMPT, max_tokens=1).usage.output_tokens == 1


def test_an_unknown_model_is_refused(endless: Server) -> None:
    with Client(endless.grpc, model="nobody") as client, pytest.raises(RequestRefused, match="nobody") as refused:
        client.generate(PROMPT)
    assert refused.value.status == "NOT_FOUND"


# ── leaving and dying ────────────────────────────────────────────────────────────────────────────────────────────


def by_cancel(client: Client) -> None:
    stream = client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True)
    next(stream)
    stream.cancel()


def by_break(client: Client) -> None:
    for _ in client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True):
        break


def by_exception(client: Client) -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True):
            raise ZeroDivisionError


def by_timeout(client: Client) -> None:
    with pytest.raises(TimedOut):
        client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, timeout_s=0.5)


def by_deadline(client: Client) -> None:
    with pytest.raises(TimedOut, match="deadline"):
        list(client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True, deadline_ms=500))


def by_ctrl_c(client: Client) -> None:
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True)
    timer.join()


@pytest.mark.parametrize("leave", [by_cancel, by_break, by_exception, by_timeout, by_deadline, by_ctrl_c])
def test_who_leaves_is_noticed_and_costs_nothing_more(endless: Server, leave: Callable[[Client], None]) -> None:
    with Client(endless.grpc) as client:
        with endless.cut_short(TOKENS):
            leave(client)
        assert client.generate(PROMPT, max_tokens=2).finish_reason == "length"


async def test_cancelled_tasks_are_noticed(endless: Server) -> None:
    before = (await asyncio.to_thread(endless.stats)).steps
    async with AsyncClient(endless.grpc) as client:
        tasks = [asyncio.create_task(client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True)) for _ in range(10)]
        await asyncio.to_thread(eventually, lambda: endless.stats().running == 10, PATIENCE_S, lambda: "they never ran")
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        after = await asyncio.to_thread(endless.until_idle)
    assert {type(outcome) for outcome in outcomes} == {asyncio.CancelledError}
    assert after.steps - before < TOKENS, "one of them ran on to its end"


def test_the_close_of_a_client_ends_all_of_its_streams(endless: Server) -> None:
    with endless.cut_short(TOKENS), Client(endless.grpc) as client:
        streams = [client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True) for _ in range(10)]
        for stream in streams:
            next(stream)


def test_each_death_is_told_by_its_kind_in_bounded_time(tiny: Path) -> None:
    with serving("--model", str(tiny), device="fake", fake_step_ms=20) as server, Client(server.grpc) as client:
        stream = client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True)
        next(stream)
        os.kill(dict(server.stats().pids)["worker-0"], signal.SIGKILL)
        with pytest.raises(BrokenOff, match="engine"):
            list(stream)

        def answered() -> Answer | None:
            try:
                return client.generate(PROMPT, max_tokens=2)
            except Unavailable:  # the engine starts again; each of these is an answer at once
                return None

        eventually(answered, PATIENCE_S, lambda: "the engine never came back")

        triton = server.pid_of("tritonserver")
        with Client(server.grpc, silence_s=1) as watchful:
            stream = watchful.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True)
            next(stream)
            server.process.send_signal(signal.SIGSTOP)  # else it would start a stopped tritonserver again
            os.kill(triton, signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(BrokenOff, match="silent"):
                list(stream)
            os.kill(triton, signal.SIGCONT)
            server.process.send_signal(signal.SIGCONT)
        assert time.monotonic() - began < 60

        stream = client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True)
        next(stream)
        os.kill(triton, signal.SIGKILL)
        with pytest.raises(BrokenOff):
            list(stream)
        with pytest.raises(Unavailable):
            client.generate(PROMPT)
