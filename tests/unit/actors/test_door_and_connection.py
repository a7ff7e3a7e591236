"""The door and a connection to it: both ends send while they wait to receive."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from fakes.virtual_time import VirtualTimeLoop, run_virtually
from minisgl_backend.actors.connection import Connection
from minisgl_backend.actors.door import Door
from minisgl_backend.actors.internal import FromHolder, HolderGone, HolderId, ToText
from minisgl_backend.actors.launch import Place
from minisgl_backend.actors.mailbox import LocalMailbox
from minisgl_backend.messages.client import (
    PROTOCOL,
    EngineState,
    Goodbye,
    Health,
    Hello,
    Request,
    Retire,
    Welcome,
)
from minisgl_backend.messages.ids import RequestId


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="minisgl-test-") as folder:
        yield Path(folder)


@asynccontextmanager
async def open_door(run_dir: Path, lease_s: float = 30.0) -> AsyncIterator[tuple[Door, LocalMailbox[ToText]]]:
    context = zmq.asyncio.Context()
    inbox: LocalMailbox[ToText] = LocalMailbox(1 << 16)
    door = Door(context, run_dir / "door", inbox, lease_s)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(door.run())
        try:
            yield door, inbox
        finally:
            reading.cancel()
            door.close()
    context.destroy(linger=0)


def request(number: int) -> Request:
    return Request(RequestId(number), b"x", b"", True, None)


async def test_no_message_waits_for_another_one_to_wake_its_reader(run_dir: Path) -> None:
    """A send on a ZeroMQ socket may swallow the wake-up of a message that has come in meanwhile."""
    health = Health(EngineState.READY, "")

    async def answer(door: Door, inbox: LocalMailbox[ToText]) -> None:
        while True:
            message = await inbox.receive()
            if isinstance(message, FromHolder):
                door.deliver(message.holder, Welcome(PROTOCOL, os.getpid(), health))
                await asyncio.sleep(0)
                door.deliver(message.holder, health)

    async with open_door(run_dir) as (door, inbox), asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(answer(door, inbox))
        with Connection(Place(run_dir, os.getpid()), lease=True) as connection:
            expected = 2  # for the Hello
            for number in range(1500):
                connection.put(request(number))
                expected += 2
                if number % 3 == 0:
                    await asyncio.sleep(0)
            more = 1500
            async for _ in connection.messages():
                expected -= 1
                if more and expected % 2:
                    connection.put(request(0))
                    more, expected = more - 1, expected + 2
                if expected == 0:
                    break
        answering.cancel()


async def test_a_goodbye_ends_the_lease_and_the_door_is_deserted(run_dir: Path) -> None:
    async with open_door(run_dir, lease_s=0.0) as (door, inbox):
        with Connection(Place(run_dir, os.getpid()), lease=True) as connection:
            hello = await inbox.receive()
            assert isinstance(hello, FromHolder) and isinstance(hello.message, Hello)
            connection.put(Goodbye())
            assert await inbox.receive() == HolderGone(hello.holder)
            await door.deserted.wait()


@pytest.mark.parametrize(("lease_s", "expected_s"), [(0.0, 30.0), (10.0, 30.0), (600.0, 600.0)])
def test_a_door_that_nobody_ever_comes_to_is_deserted_after_half_a_minute_or_a_longer_lease(
    run_dir: Path, lease_s: float, expected_s: float
) -> None:
    loop = VirtualTimeLoop()

    async def deserted_at() -> float:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        door = Door(context, run_dir / "door", LocalMailbox(1), lease_s)
        await door.deserted.wait()
        door.close()
        context.term()
        return loop.time()

    assert run_virtually(loop, deserted_at()) == expected_s


async def test_a_door_in_use_does_not_retire_and_an_unused_one_does(run_dir: Path) -> None:
    async with open_door(run_dir) as (door, inbox):
        with Connection(Place(run_dir, os.getpid()), lease=True) as holder:
            await inbox.receive()
            with Connection(Place(run_dir, os.getpid()), lease=False) as visitor:
                visitor.put(Retire())
                async for message in visitor.messages():
                    assert isinstance(message, Health)
                    break
            assert not door.deserted.is_set()
            holder.put(Goodbye())
            while not isinstance(await inbox.receive(), HolderGone):
                pass
            holder.put(Retire())
            await door.deserted.wait()


async def test_a_holder_whose_lease_has_ended_is_told_to_take_a_new_one(run_dir: Path) -> None:
    async with open_door(run_dir) as (_, inbox):
        with Connection(Place(run_dir, os.getpid()), lease=True) as connection:
            await inbox.receive()
            connection.put(Goodbye())
            connection.put(request(1))
            async for message in connection.messages():
                assert isinstance(message, Health) and message.state is EngineState.STOPPING
                break
            assert isinstance(await inbox.receive(), HolderGone)
            assert inbox.receive_nowait() is None


async def test_a_holder_that_does_not_read_loses_its_lease_and_is_told_when_it_reads_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl_backend.actors.door._TELL_AGAIN_S", 0.01)
    told = asyncio.Event()
    refusals: list[bytes] = []
    sent: list[bytes] = []

    def send(socket: object, frames: tuple[bytes, ...]) -> None:
        if len(refusals) < 13:  # ten outputs, and three times the news of the lease
            refusals.append(frames[1])
            raise zmq.Again
        sent.append(frames[1])
        told.set()

    async with open_door(run_dir) as (door, inbox):
        with Connection(Place(run_dir, os.getpid()), lease=True):
            hello = await inbox.receive()
            assert isinstance(hello, FromHolder)
            monkeypatch.setattr("minisgl_backend.actors.door.LoopSocket.send_now", send)
            for _ in range(10):
                door.deliver(hello.holder, Health(EngineState.READY, ""))
            assert await inbox.receive() == HolderGone(hello.holder)
            await told.wait()
            assert len(sent) == 1 and b"this lease has ended" in sent[0]
            assert not door._untold


async def test_a_message_to_a_holder_that_is_gone_is_no_error(run_dir: Path) -> None:
    async with open_door(run_dir) as (door, _):
        door.deliver(HolderId(b"nobody"), Health(EngineState.READY, ""))
