"""The front door of the engine host: one ROUTER socket that all holders connect to.

    holder (DEALER) ── ToHost ──►  door ── FromHolder, HolderGone ──►  text actor
    holder (DEALER) ◄── ToHolder ──  door ◄── deliver() ──────────────  text actor

The door owns the leases; the text actor owns the requests.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import zmq

from minisgl_backend.actors.internal import FromHolder, HolderGone, HolderId, ToText
from minisgl_backend.actors.lease import Leases
from minisgl_backend.actors.loop_socket import LoopSocket
from minisgl_backend.actors.mailbox import LocalMailbox
from minisgl_backend.actors.server_guard import ServerGuard
from minisgl_backend.actors.wire import endpoint
from minisgl_backend.messages.client import (
    PROTOCOL,
    Cancel,
    EngineState,
    Goodbye,
    Health,
    Hello,
    Request,
    Retire,
    ToHolder,
    ToHost,
)
from minisgl_backend.messages.codec import Decoder, encode

_FIRST_LEASE_S = 30.0
"""How long a new host waits for its first holder, unless `lease_s` is longer. A link connects within milliseconds of
the start; only `minisgl serve` starts a host before there is a holder, and tritonserver comes to its model after some
two seconds, or more where a GPU's driver or other models come first. Too early an end costs time and nothing else,
since the model then starts a host itself. An unclaimed host (its `minisgl serve` was killed) holds its memory so long.
"""
_TELL_AGAIN_S = 0.5
_LINGER_MS = 500
_LEASE_ENDED = Health(EngineState.STOPPING, "this lease has ended; take a new one")
_log = logging.getLogger(__name__)


class Door:
    """Binds `path`. Sets `deserted` when nobody has held a lease for `lease_s`, or an inspector retires the engine."""

    def __init__(
        self,
        context: zmq.Context[Any],
        path: Path,
        to_text: LocalMailbox[ToText],
        lease_s: float,
        guard: ServerGuard | None = None,
    ) -> None:
        """guard: of the servers whose stubs hold leases; None: nobody's."""
        path.unlink(missing_ok=True)
        socket: zmq.Socket[bytes] = zmq.Socket(context, zmq.ROUTER)  # a plain one, whatever the context makes itself
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket = LoopSocket(socket)
        socket.bind(endpoint(path))
        self._to_text = to_text
        self._lease_s = lease_s
        self._leases = Leases(self._lease_ended)
        self._guard = guard or ServerGuard(enabled=False)
        self._decoder: Decoder[ToHost] = Decoder(ToHost)
        self.deserted = asyncio.Event()  # set when nobody needs the engine any more
        self._had_lease = False
        self._untold: set[HolderId] = set()  # lost their lease for not reading, and do not know it yet
        self._timer: asyncio.TimerHandle | None = None
        self._arm(max(_FIRST_LEASE_S, lease_s))

    async def run(self) -> None:
        """Reads until cancelled."""
        while True:
            frames = await self._socket.receive()
            holder, frame = HolderId(frames[0]), frames[-1]
            try:
                message = self._decoder.decode(frame)
            except msgspec.DecodeError as error:
                _log.error("a holder speaks another protocol than %d: %s", PROTOCOL, error)
                continue
            await self._take(holder, message)
            await asyncio.sleep(0)  # neither end of a busy door waits by itself: the loop must turn all the same

    def give_up(self) -> None:
        """From now on the engine stops as soon as nobody holds a lease: it is of no use to anybody."""
        self._lease_s = 0.0
        if not len(self._leases) and self._had_lease:
            self._arm(0.0)

    def deliver(self, holder: HolderId, message: ToHolder) -> None:
        try:
            self._socket.send_now((holder, encode(message)))
        except zmq.Again:
            if holder in self._leases:
                _log.error("a holder does not read its answers: its lease ends")
                self._leases.end(holder)
            if holder not in self._untold:
                self._untold.add(holder)
                asyncio.get_running_loop().call_later(_TELL_AGAIN_S, self._tell_lease_ended, holder)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._leases.end(holder)

    def _tell_lease_ended(self, holder: HolderId) -> None:
        """A holder must learn that its answers are lost: told again and again until it reads or is gone."""
        self._untold.discard(holder)
        if not self._socket.closed:
            self.deliver(holder, _LEASE_ENDED)

    def close(self) -> None:
        self._leases.close()
        self._guard.close()
        self._disarm()
        self._socket.close(_LINGER_MS)

    async def _take(self, holder: HolderId, message: ToHost) -> None:
        if isinstance(message, Goodbye):
            self._guard.gave_back(holder)
            self._leases.end(holder)
        elif isinstance(message, Retire):
            if len(self._leases):
                self.deliver(holder, Health(EngineState.READY, "somebody holds a lease"))
            else:
                self.deserted.set()
        elif isinstance(message, Request | Cancel) and holder not in self._leases:
            self.deliver(holder, _LEASE_ENDED)
        else:
            await self._to_text.send(FromHolder(holder, message))
            if isinstance(message, Hello) and message.lease and message.protocol == PROTOCOL:
                self._disarm()
                self._had_lease = True
                self._guard.took_lease(holder, message.pid)
                self._leases.take(holder, message.pid)

    def _lease_ended(self, holder: HolderId) -> None:
        self._guard.lease_ended(holder)
        self._to_text.post(HolderGone(holder))
        if not len(self._leases):
            _log.info("nobody holds a lease: stopping in %g s", self._lease_s)
            self._arm(self._lease_s)

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.deserted.set)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
