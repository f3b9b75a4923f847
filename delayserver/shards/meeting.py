"""How shards come together: where each listens, and how it gets to another one.

    Meeting        the handshake that Links use
    UnixMeeting    shards of one machine: sockets in a directory that nobody else may enter
    TcpMeeting     shards of several machines, whose owners move: at the address in the book, behind
                   a proof, sealed

    TCP connection ─▶ a stranger, for 2 s ─▶ both have proved that they know the secret ─▶ a link

A process that passes calls on to the owner of its own shard comes to the same address: behind the
proof its connection is one of a client, in HTTP, and sealed (a tunnel).

Over TCP any program can connect. A stranger has sent at most some hundred bytes, waits for at most
2 s and is one of at most 64: then the oldest one is cut off, so a stranger that holds connections
open does not keep out a shard that proves itself quickly. Bytes from strangers are never logged.

A machine that loses its power cannot say so: a connection ends when its bytes are not
received for 5 s.

Cost: of Unix none; of TCP see `sealed`, and a copy. Threads: belongs to the event loop.
"""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Protocol, cast

import structlog

from delayserver.errors import DelayServerError, InputError, LinkError
from delayserver.shards.book import OwnerBook, split_address
from delayserver.shards.sealed import (
    NONCE_BYTES,
    SECRET_BYTES,
    TUNNEL,
    Handshake,
    Party,
    SealedSession,
)

CONNECT_S: Final = 2.0
HANDSHAKE_S: Final = 2.0
"""For the proofs."""
TUNNEL_S: Final = 10.0
"""Likewise, of an owner that may still recover: it listens from its claim on."""
STRANGERS_MAX: Final = 64
SILENCE_S: Final = 5
"""Sent bytes are acknowledged within that, or the other machine is gone."""
LOG_EVERY_S: Final = 1.0
"""A line about strangers at most so often; all are counted."""
BACKLOG: Final = 128

MakeLink = Callable[[], asyncio.Protocol]

log = structlog.get_logger()


class Meeting(Protocol):
    """How one shard and the others come together."""

    async def listen(self, own: Party, make: MakeLink) -> None:
        """Have the protocol of a link made for each shard that comes from now on."""

    async def connect(self, shard: int, make: MakeLink) -> None:
        """Connect to a shard, where it is now, and have the protocol of the link made. Raises
        OSError: it is not there; LinkError: something else is."""

    def close(self) -> None:
        """Let nobody come any more. Links stay as they are."""


class UnixMeeting:
    """Shards of one machine."""

    def __init__(self, directory: Path | None) -> None:
        """`directory`: of the sockets; the shard believes the bytes that come over them.
        None: of a shard without others."""
        self._directory = directory
        self._server: asyncio.Server | None = None

    def _path(self, shard: int) -> Path:
        assert self._directory is not None
        return self._directory / f"{shard}"

    async def listen(self, own: Party, make: MakeLink) -> None:
        """See Meeting."""
        if self._directory is None:
            return
        path = self._path(own.shard)
        path.unlink(missing_ok=True)  # of the process before
        self._server = await asyncio.get_running_loop().create_unix_server(make, str(path))

    async def connect(self, shard: int, make: MakeLink) -> None:
        """See Meeting."""
        path = str(self._path(shard))
        await asyncio.get_running_loop().create_unix_connection(make, path)

    def take_tunnels(self, make: MakeLink) -> None:
        """No process of this machine is on standby, so none comes as a client."""

    def close(self) -> None:
        """See Meeting."""
        if self._server is not None:
            self._server.close()


class TcpMeeting:
    """Shards of several machines."""

    def __init__(
        self,
        listener: socket.socket,
        book: OwnerBook,
        secret: bytes,
        cluster: str,
        *,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        """`listener`: bound, so that its address can be told before anybody may come. `book`: where
        the others are. `secret`: known to all nodes of the cluster, and to no other machine. Raises
        InputError."""
        if len(secret) != SECRET_BYTES:
            raise InputError(f"the secret of a cluster is {SECRET_BYTES} bytes, not {len(secret)}")
        self._listener = listener
        self._book = book
        self._secret = secret
        self._cluster = cluster
        self._random_bytes = random_bytes
        self._own: Party
        self._server: asyncio.Server | None = None
        self.is_closed = False
        self._strangers: dict[_Gate, None] = {}
        """Connections that have proved nothing, in the order of their coming."""
        self.refused = 0
        """Connections that were cut off, since the other was, or did, something else."""
        self._logged_s = -LOG_EVERY_S
        self._make_tunnel: MakeLink | None = None

    def take_tunnels(self, make: MakeLink) -> None:
        """Have the protocol of a client made for each tunnel that comes from now on."""
        self._make_tunnel = make

    async def tunnel(self, shard: int, make: MakeLink) -> None:
        """Connect to the owner of the shard that this process is on standby for, as a client, and
        have the protocol made. Raises OSError: it is not there; LinkError: something else is."""
        await self._connect(shard, make, Party(shard, TUNNEL), TUNNEL_S)

    async def listen(self, own: Party, make: MakeLink) -> None:
        """See Meeting."""
        self._own = own
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            partial(self._gate, make, None, own, HANDSHAKE_S), sock=self._listener, backlog=BACKLOG
        )

    async def connect(self, shard: int, make: MakeLink) -> None:
        """See Meeting."""
        await self._connect(shard, make, self._own, HANDSHAKE_S)

    async def _connect(self, shard: int, make: MakeLink, own: Party, patience_s: float) -> None:
        owner = self._book.owner(shard)
        if owner is None:
            raise ConnectionRefusedError(f"shard {shard} has no owner now")
        host, port = split_address(owner.link)
        make_gate = partial(self._gate, make, shard, own, patience_s)
        async with asyncio.timeout(CONNECT_S):
            loop = asyncio.get_running_loop()
            _, gate = await loop.create_connection(make_gate, host, port)
        try:
            await gate.passed
        except BaseException:
            gate.abort()
            raise

    def close(self) -> None:
        """See Meeting."""
        self.is_closed = True
        if self._server is None:
            self._listener.close()
        else:
            self._server.close()
        for gate in tuple(self._strangers):
            if not gate.is_believed:
                gate.abort()

    def _gate(self, make: MakeLink, expected: int | None, own: Party, patience_s: float) -> "_Gate":
        nonce = self._random_bytes(NONCE_BYTES)
        connects = expected is not None
        handshake = Handshake(self._secret, self._cluster, own, nonce, connects=connects)
        return _Gate(self, make, handshake, expected, patience_s)

    def maker(self, other: Party, make: MakeLink) -> MakeLink:
        """Returns the maker of the protocol for a party that has come here, and proved who it is.
        Raises LinkError."""
        if other != Party(self._own.shard, TUNNEL):
            if self.is_closed:
                raise LinkError("a link to a shard that has left")
            return make
        if self._make_tunnel is None:
            raise LinkError("a tunnel to a process that takes none now")
        return self._make_tunnel

    # ── reports of gates ───────────────────────────────────────────────────────────────────────

    def come(self, gate: "_Gate") -> None:
        """A stranger has connected."""
        if len(self._strangers) >= STRANGERS_MAX:
            next(iter(self._strangers)).refuse(LinkError("too many at once"))
        self._strangers[gate] = None

    def gone(self, gate: "_Gate") -> None:
        """It is no stranger any more, or not there any more."""
        self._strangers.pop(gate, None)

    def count_refusal(self, error: LinkError, shard: int | None) -> None:
        """A connection was cut off; `shard`: the one that this process wanted to reach."""
        self.refused += 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            log.warning("a link was refused", why=str(error), shard=shard, refused=self.refused)


class _Gate(asyncio.Protocol):
    """One connection: before the proofs to a stranger, behind them the way of a link.

    `expected`: the shard that was connected to; None: the other has come here."""

    def __init__(
        self,
        meeting: TcpMeeting,
        make: MakeLink,
        handshake: Handshake,
        expected: int | None,
        patience_s: float,
    ) -> None:
        """`patience_s`: for the proofs."""
        self._patience_s = patience_s
        self._meeting = meeting
        self._make = make
        self._handshake = handshake
        self._expected = expected
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._too_late: asyncio.TimerHandle
        self._session: SealedSession | None = None
        self._link: asyncio.Protocol
        """From the session on."""
        self.passed: asyncio.Future[None] = self._loop.create_future()
        """The link is made; or LinkError, ConnectionError. Only who connects looks at it."""

    @property
    def is_believed(self) -> bool:
        """Whether the other may have our proof already, and may use the connection as soon as it
        has sent its own: it is to have an answer."""
        return self._expected is None and self._handshake.has_proved

    def abort(self) -> None:
        """End the connection."""
        self._transport.abort()

    def refuse(self, error: LinkError) -> None:
        """Cut the other off."""
        if not self._transport.is_closing():
            self._meeting.count_refusal(error, self._expected)
        self._fail(error)
        self._leave()
        self._transport.abort()

    def _leave(self) -> None:
        self._too_late.cancel()
        self._meeting.gone(self)

    # ── the connection ─────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._meeting.is_closed and self._expected is None:
            self._transport.abort()  # It was accepted just before.
        _notice_silence(transport.get_extra_info("socket"))
        error = LinkError(f"nothing was proved within {self._patience_s:g} s")
        self._too_late = self._loop.call_later(self._patience_s, self.refuse, error)
        if self._expected is None:
            self._meeting.come(self)
        else:
            self._transport.write(self._handshake.first)

    def data_received(self, data: bytes) -> None:
        try:
            if self._session is None:
                data = self._prove(data)
            if data and self._session is not None:
                for opened in self._session.opener.open(data):
                    self._link.data_received(opened)
                    if self._transport.is_closing():
                        return
        except LinkError as error:
            self.refuse(error)

    def _prove(self, data: bytes) -> bytes:
        """Go on with the proofs; returns the bytes behind them."""
        said, rest = self._handshake.take(data)
        session = self._handshake.session
        if session is not None and self._expected not in (None, session.other.shard):
            raise LinkError(f"shard {session.other.shard}, and not the one that was asked for")
        make = self._make
        if session is not None and self._expected is None:
            make = self._meeting.maker(session.other, make)
        if said:
            self._transport.write(said)
        if session is not None:
            try:
                self._link = make()
            except DelayServerError as error:
                raise LinkError(str(error)) from error
            self._leave()
            self._session = session
            self._link.connection_made(_SealedTransport(self._transport, session))
            if not self.passed.done():
                self.passed.set_result(None)
        return rest

    def pause_writing(self) -> None:
        if self._session is not None:
            self._link.pause_writing()

    def resume_writing(self) -> None:
        if self._session is not None:
            self._link.resume_writing()

    def eof_received(self) -> bool | None:
        return self._link.eof_received() if self._session is not None else None

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        if self._session is not None:
            self._link.connection_lost(exc)
        else:
            self._fail(ConnectionResetError("it has hung up"))

    def _fail(self, error: Exception) -> None:
        if not self.passed.done():
            self.passed.set_exception(error)
            self.passed.exception()  # It need not be looked at.


class _SealedTransport(asyncio.Transport):
    """As much of a transport as a link or a connection in HTTP needs; it seals each write."""

    def __init__(self, transport: asyncio.Transport, session: SealedSession) -> None:
        super().__init__()
        self._transport = transport
        self._seal = session.sealer.seal
        self.abort = transport.abort  # type: ignore[method-assign]
        self.is_closing = transport.is_closing  # type: ignore[method-assign]
        self.get_write_buffer_size = transport.get_write_buffer_size  # type: ignore[method-assign]
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]
        self.close = transport.close  # type: ignore[method-assign]
        self.pause_reading = transport.pause_reading  # type: ignore[method-assign]
        self.resume_reading = transport.resume_reading  # type: ignore[method-assign]

    def can_write_eof(self) -> bool:
        """Its end is that of the connection, in both directions, as with TLS."""
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(self._seal(data))


def _notice_silence(connected: socket.socket) -> None:
    """Have the system end a connection whose other machine is not there any more."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not all systems have all of them; then it takes longer.
    with contextlib.suppress(AttributeError, OSError):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
