"""Connections of clients on their way from one server of a process to its next one.

    server that gives its shard away ──▶ `hold`: the socket, and its bytes that were not served
                                             │ no server reads; new bytes wait in the system
    the next server of this process  ◀── `take`: accepts them as if they had just come

A node goes on to listen when it takes a shard or gives one away, so its clients must not see that.
A connection that is closed between two requests meets the next one: its client cannot know then
whether that was served.

A connection by HTTPS is not held: its keys are in the event loop that ends with its server. Cost:
two system calls a connection. Threads: belongs to the event loop of the moment.
"""

import asyncio
import os
import socket
from typing import Final

GIVE_BACK: Final = "give_back"
"""The key of an ASGI scope for a function that leaves the call to the next server, connection and
all, as if it had never been read. It returns whether it could, and may be called before the call
has had an effect."""


class Moving:
    """The connections that no server has, from the first server of a process to `close`."""

    def __init__(self) -> None:
        self._held: list[tuple[socket.socket, bytes]] = []

    def hold(self, transport: asyncio.Transport, data: bytes) -> bool:
        """Take a connection from its transport, which ends and tells nobody. `data`: the bytes that
        came over it and were not served. Returns False, and has done nothing, where it cannot be
        taken: it has keys, or an answer to be sent."""
        connected = transport.get_extra_info("socket")
        if (
            connected is None
            or transport.get_extra_info("sslcontext") is not None
            or transport.is_closing()
            or transport.get_write_buffer_size()
        ):
            return False
        self._held.append((socket.socket(fileno=os.dup(connected.fileno())), data))
        transport.set_protocol(asyncio.Protocol())
        transport.abort()  # It closes its own descriptor: the connection lives as long as any does.
        return True

    def take(self) -> list[tuple[socket.socket, bytes]]:
        """All that are held, which are the caller's now."""
        held, self._held = self._held, []
        return held

    def close(self) -> None:
        """Close all that are held: no server will take them any more."""
        for connected, _ in self.take():
            connected.close()
