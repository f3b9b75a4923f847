"""A door in front of a node: a host of its own that it advertises, and that can be shut.

A client that comes to a shut door is refused, as by a firewall that lets nobody through.
Connections that are open when it shuts are cut off. The node itself reaches everybody all the time,
and the brokers too.

A node has two kinds of ports, that of clients and those of links, and is told about both by the
host that it advertises. So the door is that host, 127.0.0.N, with the ports of the node, which
listens at 127.0.0.1.

Cost: a copy of what goes through. Threads: one of its own for each door, which its event loop has.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from functools import partial

from tests.waiting import turns

READ_BYTES = 1 << 16


class Door:
    """Open from the beginning."""

    def __init__(self, host: str, *ports: int) -> None:
        """A client that comes to a port of this host gets to the same port of 127.0.0.1."""
        self._host = host
        self._ports = ports
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.open()

    def open(self) -> None:
        """Let everybody through from now on."""
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()

    def shut(self) -> None:
        """Let nobody through from now on."""
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()

    def end(self) -> None:
        """It is gone."""
        self.shut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> None:
        for port in self._ports:
            come = partial(self._come, port)
            self._servers.append(await asyncio.start_server(come, self._host, port))

    async def _shut(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()
        for writer in self._writers:
            writer.transport.abort()
        await turns()  # They are told.

    async def _come(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            onwards, back = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(reader, back))
                both.create_task(self._pass(onwards, writer))
        writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(READ_BYTES):
                    writer.write(data)
                    await writer.drain()
            writer.close()
        finally:
            self._writers.discard(writer)


@contextlib.contextmanager
def doors(*places: tuple[str, int, int]) -> Iterator[list[Door]]:
    """Doors of these hosts, for two ports each."""
    made = [Door(*place) for place in places]
    try:
        yield made
    finally:
        for door in made:
            door.end()
