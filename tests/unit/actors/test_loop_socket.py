"""A socket that sends and receives in one loop: nothing is lost, nobody waits for nothing, refusals are told."""

from __future__ import annotations

import asyncio
import select
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from minisgl_backend.actors.loop_socket import LoopSocket
from minisgl_backend.actors.wire import endpoint


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[LoopSocket, LoopSocket]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory(prefix="minisgl-test-") as folder:
        sockets = [context.socket(zmq.DEALER) for _ in range(2)]
        sockets[0].bind(endpoint(Path(folder) / "pair"))
        sockets[1].connect(endpoint(Path(folder) / "pair"))
        ends = [LoopSocket(socket) for socket in sockets]
        try:
            ends[1].send_now([b"hello"])
            assert await ends[0].receive() == [b"hello"]  # from here on the one that is bound has somebody to send to
            yield ends[0], ends[1]
        finally:
            for end in ends:
                end.close(0)
            context.term()


async def test_messages_of_both_directions_arrive_whole_and_in_order_while_both_ends_send() -> None:
    sent = [[b"%d" % number, b"x" * (number % 7)] for number in range(2000)]

    async def talk(end: LoopSocket) -> list[list[bytes]]:
        got = []
        for frames in sent:
            end.send_now(frames)
            if len(got) < len(sent) and (here := end.receive_now()) is not None:
                got.append(here)
        while len(got) < len(sent):
            got.append(await end.receive())
        return got

    async with pair() as (one, other):
        async with asyncio.timeout(60):
            assert await asyncio.gather(talk(one), talk(other)) == [sent, sent]
        assert one.receive_now() is None


async def test_a_send_that_swallows_a_wake_up_wakes_the_reader_itself() -> None:
    """ZeroMQ takes note of what has come in when it sends, but at most once a millisecond: hence the wait."""
    async with pair() as (one, other), asyncio.timeout(60):
        for number in range(5):
            reading = asyncio.create_task(one.receive())
            await asyncio.sleep(0)
            other.send_now([b"%d" % number])
            assert select.select([one.raw.getsockopt(zmq.FD)], [], [], 10)[0], (
                "it has come, and the loop has not looked"
            )
            select.select([], [], [], 0.002)
            one.send_now([b"meanwhile"])
            assert await reading == [b"%d" % number]


async def test_a_wait_can_be_ended_and_begun_again() -> None:
    async with pair() as (one, other):
        async with asyncio.timeout(60):
            asyncio.get_running_loop().call_soon(one.wake)
            await one.changed()
            assert one.receive_now() is None
            other.send_now([b"x"])
            assert await one.receive() == [b"x"]


async def test_a_reader_that_was_cancelled_leaves_its_place_to_the_next() -> None:
    async with pair() as (one, other):
        async with asyncio.timeout(60):
            reading = asyncio.create_task(one.receive())
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            other.send_now([b"x"])
            assert await one.receive() == [b"x"]


async def test_a_peer_that_is_not_there_is_told_at_once() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    end = LoopSocket(router)
    with pytest.raises(zmq.ZMQError) as refused:
        end.send_now([b"nobody", b"x"])
    assert refused.value.errno == zmq.EHOSTUNREACH
    end.close(0)
    assert end.closed
    end.close(0)
    context.term()
