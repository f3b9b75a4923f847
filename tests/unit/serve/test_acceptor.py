"""The acceptor: who counts, who is refused, and what happens where the system has no more."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import uvloop

from delayserver.config import Settings
from delayserver.serve import acceptor as module
from delayserver.serve.acceptor import Acceptor
from tests.waiting import until

CONNECTIONS_MAX = 3


class Protocol(asyncio.Protocol):
    """As much of a connection as the acceptor knows of."""

    transport: Any = None
    on_lost: Callable[[], None]

    made: ClassVar[list[Any]] = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.made.append(transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.on_lost()

    def shutdown(self) -> None:
        self.transport.close()


class Listener(socket.socket):
    """A listening socket whose `accept` may fail."""

    failures: tuple[int, ...] = ()

    def accept(self) -> tuple[socket.socket, Any]:
        if self.failures:
            number, *rest = self.failures
            self.failures = tuple(rest)
            raise OSError(number, os.strerror(number))
        return super().accept()


Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Port:
    """An acceptor at work."""

    def __init__(self, listener: Listener, acceptor: Acceptor) -> None:
        self.listener = listener
        self.acceptor = acceptor
        self.clients: list[Client] = []

    async def connect(self) -> Client:
        client = await asyncio.open_connection(*self.listener.getsockname())
        self.clients.append(client)
        return client

    async def served(self) -> Client:
        """A client that was accepted, and has had an answer."""
        reader, writer = await self.connect()
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        return reader, writer

    async def comes_to(self, count: int) -> None:
        await until(lambda: self.acceptor.count == count)


@asynccontextmanager
async def open_port(tls: ssl.SSLContext | None = None, **settings: int) -> AsyncIterator[Port]:
    with Listener(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        limits = Settings(connections_max=CONNECTIONS_MAX, **settings)  # type: ignore[arg-type]
        certificates = SimpleNamespace(served=tls)
        acceptor = Acceptor([listener], Protocol, limits, certificates)  # type: ignore[arg-type]
        acceptor.begin()
        port = Port(listener, acceptor)
        yield port
        acceptor.close()
        await acceptor.wait_closed()
        for _, writer in port.clients:
            writer.transport.abort()
        await port.comes_to(0)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def waits() -> None:
        async with asyncio.timeout(20):
            await main()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(waits())


def test_one_too_many_is_told_so_and_costs_nobody_anything() -> None:
    async def main() -> None:
        async with open_port() as port:
            first, *_ = [await port.served() for _ in range(CONNECTIONS_MAX)]
            for _ in range(10):
                reader, writer = await port.connect()
                answer = await reader.read()
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"\r\nconnection: close\r\n" in answer
                assert b"retry-after: " in answer
                writer.close()
            assert port.acceptor.count == CONNECTIONS_MAX
            first[1].close()
            await port.comes_to(CONNECTIONS_MAX - 1)
            await port.served()

    run(main)


def test_answers_are_not_kept_back_until_others_are_acknowledged() -> None:
    async def main() -> None:
        async with open_port() as port:
            Protocol.made.clear()
            await port.served()
            accepted = Protocol.made[0].get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(main)


def test_a_handshake_that_is_never_made_counts_and_has_its_time() -> None:
    async def main() -> None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        async with open_port(tls, head_timeout_ms=200) as port:
            silent = [await port.connect() for _ in range(CONNECTIONS_MAX)]
            await port.comes_to(CONNECTIONS_MAX)
            late, _ = await port.connect()
            assert await late.read() == b""
            assert port.acceptor.count == CONNECTIONS_MAX
            for reader, _ in silent:
                assert await reader.read() == b""
            await port.comes_to(0)
            _, broken = await port.connect()
            broken.write(b"this is no handshake\r\n\r\n")
            await port.comes_to(1)
            await port.comes_to(0)

    run(main)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENETDOWN])
def test_it_goes_on_when_the_system_can_again(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)

    async def main() -> None:
        async with open_port() as port:
            port.listener.failures = (number, number)
            await port.served()
            assert not port.listener.failures

    run(main)


def test_nobody_is_accepted_after_the_end() -> None:
    async def main() -> None:
        async with open_port() as port:
            reader, writer = await port.served()
            address = port.listener.getsockname()
            port.acceptor.close()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(*address)
            writer.write(b"y")
            assert await reader.readexactly(1) == b"y"
            port.acceptor.close = lambda: None  # type: ignore[method-assign]

    run(main)


def test_who_is_being_let_in_at_the_end_is_not_forgotten() -> None:
    async def main() -> None:
        async with open_port() as port:
            close = port.acceptor.close

            class Late(Protocol):
                """The server stops after its socket was accepted, and before it is told so."""

                def __init__(self) -> None:
                    asyncio.get_running_loop().call_soon(close)

            port.acceptor._make_protocol = Late  # type: ignore[assignment]
            port.acceptor.close = lambda: None  # type: ignore[method-assign]
            reader, _ = await port.connect()
            assert await reader.read() == b""
            await port.comes_to(0)

    run(main)
