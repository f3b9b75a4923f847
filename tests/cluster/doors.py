"""A door in front of a node: the address that it advertises, and that can be shut.

Who comes to a shut door is refused, as by a firewall that lets nobody through; what is open then is
cut off. The node itself reaches everybody all the time, and the brokers too.

Cost: a copy of what goes through. Threads: one of its own for each door, which its event loop has.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from tests.waiting import turns

READ_BYTES = 1 << 16


class Door:
    """Open from the beginning."""

    def __init__(self, port: int, behind: int) -> None:
        """Who comes to `port` of the loopback gets to `behind`."""
        self.port = port
        self._behind = behind
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.open()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

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
        self._server = await asyncio.start_server(self._come, "127.0.0.1", self.port)

    async def _shut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()
        await turns()  # They are told.

    async def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            onwards, back = await asyncio.open_connection("127.0.0.1", self._behind)
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
def doors(*pairs: tuple[int, int]) -> Iterator[list[Door]]:
    """Doors at the first ports of these, to the second ones."""
    made = [Door(port, behind) for port, behind in pairs]
    try:
        yield made
    finally:
        for door in made:
            door.end()
