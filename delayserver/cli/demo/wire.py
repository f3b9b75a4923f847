"""HTTP/1.1 on asyncio streams, as much as the demo and the crash tests need: both ends of it.

    HttpClient   calls the server; an answer that does not come whole is `Unanswered`
    Receiver     is called by the server's webhooks

A general client hides what matters here: whether a request whose connection broke was answered.
Nothing is retried behind the caller's back, and every answer is read to its last byte or counts as
not given.

Cost: 60 µs per call. Threads: belongs to the event loop.
"""

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

IDLE_S = 2.0
"""A connection that was idle for longer is not used again: the server may be closing it."""


class Unanswered(Exception):
    """The connection broke or was never made: what was asked may have been done, or not."""


@dataclass(slots=True)
class _Message:
    """A request or an answer: its first line, header names in lower case, and the body."""

    first_line: str
    headers: dict[str, str]
    body: bytes


async def _read_message(reader: asyncio.StreamReader) -> _Message:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first_line, *lines = head[:-4].split("\r\n")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return _Message(first_line, headers, body)


async def _drop(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


class HttpClient:
    """Calls one server on this machine; as many connections as there are calls at once."""

    def __init__(self, port: int, *, timeout_s: float = 10.0) -> None:
        self._port = port
        self._timeout_s = timeout_s
        self._idle: deque[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = deque()

    async def call(
        self, method: str, path: str, document: object = None, *, timeout_s: float | None = None
    ) -> tuple[int, Any]:
        """Status and document of the answer. Raises Unanswered."""
        body = b"" if document is None else json.dumps(document).encode()
        request = (
            f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{self._port}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(timeout_s or self._timeout_s):
                reader, writer = await self._connection()
                writer.write(request)
                answer = await _read_message(reader)
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            if isinstance(error, OSError | EOFError | TimeoutError | ValueError):
                raise Unanswered(f"{method} {path}: {error!r}") from error
            raise
        self._idle.append((time.monotonic(), reader, writer))
        status = int(answer.first_line.split(" ", 2)[1])
        return status, json.loads(answer.body) if answer.body else None

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            since, reader, writer = self._idle.pop()
            if time.monotonic() - since < IDLE_S and not reader.at_eof():
                return reader, writer
            writer.transport.abort()
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def close(self) -> None:
        """Drop all connections that are idle."""
        while self._idle:
            await _drop(self._idle.pop()[2])


Handler = Callable[[Mapping[str, str], bytes], Awaitable[int]]
"""Headers and body of a delivery to the status that is answered."""


class Receiver:
    """A webhook receiver on a free port of this machine."""

    port: int

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where to deliver."""
        return f"http://127.0.0.1:{self.port}/"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
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
        try:
            # A connection that the server's death cut is no news.
            with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
                while True:
                    request = await _read_message(reader)
                    status = await self._handler(request.headers, request.body)
                    answer = f"HTTP/1.1 {status} _\r\ncontent-length: 0\r\n\r\n"
                    writer.write(answer.encode())
        finally:
            self._connections.discard(task)
            await _drop(writer)
