"""A receiver of webhooks on asyncio streams, as much as the demo and the crash tests need.

Each request is read to its last byte, handed over, and answered with the status that the handler
returns; connections stay open.

Cost: 50 µs per request. Threads: belongs to the event loop.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Self

Handler = Callable[[Mapping[str, str], bytes], Awaitable[int]]
"""Headers and body of a delivery to the status that is answered. The headers also hold the address
of the sender, as PEER, a name that no header can have."""

PEER = ":peer"


class Receiver:
    """A webhook receiver on a free port of this machine, at `host`."""

    port: int

    def __init__(self, handler: Handler, host: str = "127.0.0.1") -> None:
        self._handler = handler
        self._host = host
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where to deliver."""
        return f"http://{self._host}:{self.port}/"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        peer = writer.get_extra_info("peername")[0]
        try:
            # A connection that the server's death cut is no news.
            with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                    fields = (line.partition(":") for line in head[:-4].split("\r\n")[1:])
                    headers = {name.lower(): value.strip() for name, _, value in fields}
                    headers[PEER] = peer
                    body = await reader.readexactly(int(headers.get("content-length", "0")))
                    status = await self._handler(headers, body)
                    answer = f"HTTP/1.1 {status} _\r\ncontent-length: 0\r\n\r\n"
                    writer.write(answer.encode())
        finally:
            self._connections.discard(task)
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
