"""Mailboxes, local and between processes: ordered, bounded, checked against a schema."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from minisgl_backend.actors.mailbox import LocalMailbox, Undeliverable
from minisgl_backend.actors.wire import WireInbox, WireOutlet, endpoint
from minisgl_backend.messages.engine import Abort, Probe, Sequence, TextToScheduler
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.sampling import GREEDY


@pytest.fixture
def socket_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="minisgl-test-") as folder:
        yield Path(folder) / "inbox"


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


async def test_a_full_local_mailbox_refuses_instead_of_dropping() -> None:
    box: LocalMailbox[int] = LocalMailbox(2)
    box.put(1)
    box.put(2)
    with pytest.raises(Undeliverable):
        box.put(3)
    assert [await box.receive(), box.receive_nowait(), box.receive_nowait()] == [1, 2, None]


async def test_messages_between_processes_arrive_whole_and_in_order(
    context: zmq.asyncio.Context, socket_path: Path
) -> None:
    sent: list[TextToScheduler] = [
        Sequence(SequenceId(1), b"\1\0\0\0", GREEDY, 5, (2,)),
        Abort(SequenceId(1)),
        Probe(),
        *(Abort(SequenceId(id)) for id in range(500)),
    ]
    outlet: WireOutlet[TextToScheduler] = WireOutlet(context, socket_path, 1000)
    for message in sent:  # before the inbox is bound: kept, not lost
        outlet.put(message)
    inbox: WireInbox[TextToScheduler] = WireInbox(context, socket_path, TextToScheduler, 1000)
    got = [await inbox.receive()]
    while len(got) < len(sent):
        message = inbox.receive_nowait()
        got.append(message if message is not None else await inbox.receive())
    assert got == sent
    assert inbox.receive_nowait() is None
    inbox.close()
    outlet.close()


async def test_a_full_mailbox_between_processes_refuses(context: zmq.asyncio.Context, socket_path: Path) -> None:
    outlet: WireOutlet[TextToScheduler] = WireOutlet(context, socket_path, 3)  # nobody reads
    with pytest.raises(Undeliverable):
        for _ in range(10):
            outlet.put(Probe())
    outlet.close()


async def test_a_frame_outside_the_schema_is_left_out_and_the_next_one_read(
    context: zmq.asyncio.Context, socket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inbox: WireInbox[TextToScheduler] = WireInbox(context, socket_path, TextToScheduler, 10)
    stranger = context.socket(zmq.PUSH)
    stranger.connect(endpoint(socket_path))
    await stranger.send(b"\x80\x04cos\nsystem\n")  # the start of a pickle
    outlet: WireOutlet[TextToScheduler] = WireOutlet(context, socket_path, 10)
    outlet.put(Probe())
    assert await inbox.receive() == Probe()
    await stranger.send(b"\x91\xa5probe")
    assert await inbox.receive() == Probe()
    assert "does not fit its schema" in caplog.text
    for end in (inbox, outlet, stranger):
        end.close()
