"""The acceptor: takes connections from the listening socket, never more than `connections_max`.

A connection counts from the moment when it is accepted until its socket is closed: during its TLS
handshake, which has the time of a request's head, and while it lingers after its last answer. One
too many is told so (503; with TLS it is just closed) and closed before the next one is accepted, so
that it costs one descriptor, however many come.

The servers of asyncio and uvloop accept as many as there are before they call anybody, and make the
protocol's acquaintance after the handshake: neither can be counted in time.

Cost: 60 µs per connection, none per request. Threads: belongs to the event loop.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

import structlog

from delayserver.api.hot.answers import problem_answer, wire_of
from delayserver.api.hot.connection import Connection
from delayserver.config import Settings
from delayserver.errors import OverloadedError

ACCEPTED_AT_ONCE: Final = 64
"""Then others have their turn on the event loop."""
PAUSE_S: Final = 1.0
"""After an error of the system, which may lack descriptors though this process does not."""
_UNREAD_BYTES: Final = 64 * 1024

log = structlog.get_logger()


class Serving(Protocol):
    """See `delayserver.serve.certificates.Certificates`."""

    @property
    def served(self) -> ssl.SSLContext | None: ...


class Acceptor:
    """Accepts for listening sockets, from `begin` to `close`."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        make_protocol: Callable[[], Connection],
        settings: Settings,
        certificates: Serving,
    ) -> None:
        """`certificates`: asked at each connection, since they may be renewed."""
        self.count = 0
        """Connections that are open, or being opened."""
        self._listeners = listeners
        self._make_protocol = make_protocol
        self._connections_max = settings.connections_max
        self._certificates = certificates
        self._is_https = certificates.served is not None
        self._handshake_s = settings.head_timeout_ms / 1000 if self._is_https else None
        error = OverloadedError(f"there are {self._connections_max} connections (connections_max)")
        wire = wire_of(problem_answer(error))
        self._refusal = wire.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._emptied: asyncio.Future[None] | None = None

    def begin(self, moved: Sequence[tuple[socket.socket, bytes]] = ()) -> None:
        """Accept from now on. `moved`: connections of the server before, each with the bytes that
        were not served. These are let in, however many they are."""
        for listener in self._listeners:
            listener.setblocking(False)
        for client, unserved in moved:
            self._let_in(client, unserved)
        self._go_on()

    def _go_on(self) -> None:
        self._pause = None
        for listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                client, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("no connection can be accepted for now", error=str(error))
                self._remove_readers()
                self._pause = self._loop.call_later(PAUSE_S, self._go_on)
                return
            client.setblocking(False)
            # Else the system keeps an answer back until the client has acknowledged the one before
            # it, 40 ms later. (The servers of asyncio and uvloop do this by themselves.)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.count >= self._connections_max:
                self._refuse(client)
                continue
            self._let_in(client)

    def _let_in(self, client: socket.socket, unserved: bytes = b"") -> None:
        self.count += 1
        task = self._loop.create_task(self._open(client, unserved))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _refuse(self, client: socket.socket) -> None:
        if not self._is_https:
            with contextlib.suppress(OSError):
                client.send(self._refusal)
                # A request that nobody has read would have the system take the answer back.
                client.recv(_UNREAD_BYTES)
        client.close()

    async def _open(self, client: socket.socket, unserved: bytes) -> None:
        protocol = self._make_protocol()
        protocol.unserved = unserved
        protocol.on_lost = self._lose
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                client,
                ssl=self._certificates.served,
                ssl_handshake_timeout=self._handshake_s,
            )
        except (OSError, asyncio.CancelledError):
            # The client has not shaken hands, or it is too late.
            client.close()
            if cast("asyncio.Transport | None", protocol.transport) is None:
                self._lose()  # nobody else will
        else:
            if self._is_closed:
                protocol.shutdown()  # as those were told that were open before

    def adopt(self) -> Connection:
        """The protocol of a tunnel, which counts as one of these. One that comes after the end is
        told so: its other end believes that it may be used. Raises OverloadedError."""
        if self.count >= self._connections_max:
            raise OverloadedError(f"there are {self._connections_max} connections")
        self.count += 1
        protocol = self._make_protocol()
        protocol.is_tunnel, protocol.comes_late = True, self._is_closed
        protocol.on_lost = self._lose
        return protocol

    def _lose(self) -> None:
        self.count -= 1
        if not self.count and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def close(self) -> None:
        """Accept nothing more. Open connections stay; one that is being opened is shut down."""
        self._is_closed = True
        if self._pause is not None:
            self._pause.cancel()
        else:
            self._remove_readers()
        for listener in self._listeners:
            listener.close()
        # Without a handshake they are open in a moment. To cancel them then would have uvloop close
        # the socket and tell the protocol nothing, which would be waited for.
        if self._is_https:
            for task in self._opening:
                task.cancel()

    def _remove_readers(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener)

    async def wait_closed(self) -> None:
        """Until nothing is being opened any more."""
        if self._opening:
            await asyncio.wait(self._opening)

    async def wait_empty(self) -> None:
        """Until no connection is open, or being opened. One may wait at a time."""
        if self.count:
            self._emptied = self._loop.create_future()
            await self._emptied
