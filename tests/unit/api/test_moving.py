"""Connections that go from one server of a process to the next, over the end of an event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from delayserver.api.moving import Moving
from tests.waiting import until


class Ended(asyncio.Protocol):
    """The first server's side of a connection."""

    def __init__(self) -> None:
        self.is_lost = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


def connected() -> tuple[socket.socket, socket.socket]:
    """A connection over TCP, with its two ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    client.settimeout(20)
    server.setblocking(False)
    return client, server


def run(make_loop: Callable[[], asyncio.AbstractEventLoop], main: Any) -> Any:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(asyncio.wait_for(main, 20))


@pytest.mark.parametrize("make_loop", [uvloop.new_event_loop, asyncio.SelectorEventLoop])
def test_a_connection_outlives_its_server_and_nothing_of_it_is_lost(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    client, server = connected()
    moving = Moving()

    async def first() -> None:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_accepted_socket(Ended, server)
        assert moving.hold(transport, b"ab")
        assert not moving.hold(transport, b"")  # It is not this one's any more.
        await until(transport.is_closing)
        assert not protocol.is_lost

    async def second() -> None:
        [(connected, unserved)] = moving.take()
        assert unserved == b"ab"
        reader, writer = await asyncio.open_connection(sock=connected)
        assert await reader.readexactly(2) == b"cd"
        writer.write(b"answer")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    run(make_loop, first())
    client.sendall(b"cd")
    run(make_loop, second())
    assert client.recv(100) == b"answer"
    assert moving.take() == []
    client.close()


def test_what_has_an_answer_to_be_sent_stays() -> None:
    client, server = connected()
    moving = Moving()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(Ended, server)
        transport.write(bytes(64 * 1024 * 1024))
        assert not moving.hold(transport, b"")
        transport.abort()

    run(uvloop.new_event_loop, main())
    assert moving.take() == []
    client.close()


def test_who_is_held_at_the_end_of_the_process_is_let_go() -> None:
    client, server = connected()
    moving = Moving()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(Ended, server)
        assert moving.hold(transport, b"")

    run(uvloop.new_event_loop, main())
    moving.close()
    assert client.recv(1) == b""
    client.close()
