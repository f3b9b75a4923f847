"""One HTTP/1.1 connection that this process opened, for requests and answers that pass through.

    begin(head) ──► transport ◄── write(part) waits while the other side does not take more
                        │ data_received ──► parser ──► answered(): status and headers
                        │                          └─► read(): the parts of the body, as they come
                        └─ reading pauses while HELD_MAX_BYTES of the answer wait for `read`

`HttpConnection` holds a whole request and its whole answer in memory. This suits callers that build
the request and use the answer. A proxy only passes both on, and must not hold an upload of 64 MiB
in memory: here it holds only the bytes that are under way. So both directions are streams with
back-pressure, and they run at the same time. An answer may come before the request has ended; the
connection is then not used again.

An answer must say where it ends, by its length or in chunks. An answer that ends with its
connection counts as broken, because a server that dies looks the same. Trailers are passed over.

Cost: a future for each wait; a request and an answer in one piece need one wait. Threads: belongs
to the event loop; one task writes, and one reads.
"""

import asyncio
from typing import Final, cast

import httptools

HELD_MAX_BYTES: Final = 64 * 1024
"""Bytes of an answer that may wait; one read may exceed it before the other side is paused."""


class HttpStream(asyncio.Protocol):
    """The protocol of one connection, and its own parser's other half (the `on_…` methods)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._came: asyncio.Future[None] | None = None
        """Set while the reader waits for more of the answer, …"""
        self._drained: asyncio.Future[None] | None = None
        """… and set while the writer waits until it may write more of the request."""
        self._is_writing_paused = self._is_reading_paused = False
        self._failure: OSError | None = None
        self._parts: list[bytes] = []
        self._held_bytes = 0
        self._is_under_way = False
        self.has_ended = False
        """Whether the answer has arrived to its end, read or not."""
        self._is_head = False
        self._keeps_open = False
        self.is_open = False
        self.active_s = 0.0
        """When something of a request or of its answer last moved, by the loop's time; for an idle
        connection, since when it is idle."""
        self.status: int | None = None
        """The status of the answer, as soon as its head is there."""
        self.headers: list[tuple[bytes, bytes]] = []
        """The headers of that answer, as they came."""

    # ── one request, and its answer ────────────────────────────────────────────────────────────

    def begin(self, data: bytes, *, is_head: bool = False) -> None:
        """Send the head of a request, and the beginning of its body if it is there. `is_head`: the
        answer has no body, whatever its head says. Raises OSError: nothing was sent."""
        assert self._transport is not None and not self._is_under_way
        if not self.is_open or self._transport.is_closing():
            raise ConnectionError("the connection was closed before the request was sent")
        self.status = None
        self.headers.clear()
        self._parts.clear()
        self._held_bytes = 0
        self._is_under_way, self.has_ended, self._is_head = True, False, is_head
        self._keeps_open = False
        self.active_s = self._loop.time()
        self._transport.write(data)

    async def write(self, data: bytes) -> None:
        """Send more of the request, once the other side takes it. Raises OSError."""
        while self._is_writing_paused and self._failure is None:
            self._drained = self._loop.create_future()
            await self._drained
        if self._failure is not None:
            raise self._failure
        assert self._transport is not None
        self.active_s = self._loop.time()
        self._transport.write(data)

    async def answered(self) -> int:
        """Wait for the head of the answer; returns its status. Raises OSError."""
        while self.status is None:
            await self._wait()
        return self.status

    async def read(self) -> bytes:
        """The bytes of the answer's body that have arrived, at least one; empty at its end. Raises
        OSError if the body does not arrive whole."""
        while not self._parts and not self.has_ended:
            await self._wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._held_bytes = 0
        if self._is_reading_paused and self._transport is not None:
            self._is_reading_paused = False
            self.active_s = self._loop.time()
            self._transport.resume_reading()
        return data

    def finish(self) -> bool:
        """End an exchange that was sent and read; returns whether another request may follow."""
        self._is_under_way = False
        self.active_s = self._loop.time()
        return self.has_ended and self._keeps_open and self.is_open

    @property
    def waits_for_other(self) -> bool:
        """Whether nothing moves unless the other side does something."""
        return self._is_under_way and not self._is_reading_paused

    def abort(self) -> None:
        """Close at once, whatever is still to be sent or received."""
        if self._transport is not None:
            self._transport.abort()
        self._fail(ConnectionAbortedError("the call was given up"))

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._came = self._loop.create_future()
        await self._came

    def _wake(self) -> None:
        for waiting in (self._came, self._drained if not self._is_writing_paused else None):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    def _fail(self, failure: OSError) -> None:
        if self._failure is None:
            self._failure = failure
        self._is_writing_paused = False
        self._wake()

    # ── called by the event loop ───────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if not self._is_under_way or self.has_ended:
            self.abort()  # an answer without a request
        else:
            self._take(data)

    def _take(self, data: bytes) -> None:
        self.active_s = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._keeps_open = False
            if not self.has_ended:
                self._fail(ConnectionError(f"the answer is not HTTP: {error}"))
        if self._is_head and self.has_ended:
            # The parser waits for a body that does not come.
            self._parser = httptools.HttpResponseParser(self)
        if self._held_bytes > HELD_MAX_BYTES and not self.has_ended:
            assert self._transport is not None
            self._is_reading_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        why = f" ({exc})" if exc else ""
        self._fail(ConnectionError(f"the connection was closed without an answer{why}"))

    def pause_writing(self) -> None:
        self._is_writing_paused = True

    def resume_writing(self) -> None:
        self._is_writing_paused = False
        self.active_s = self._loop.time()
        self._wake()

    # ── called by the parser ───────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        if self.has_ended:
            self._keeps_open = False  # more answers than requests: whose would the next one be?
        else:
            self.headers.clear()  # after an answer below 200: that was not the one

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.status is None:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.status is None and status >= 200:  # below: the answer is still to come
            self.status = status
            if self._is_head:
                self._end()

    def on_body(self, body: bytes) -> None:
        if self.status is not None and not self.has_ended:
            self._parts.append(body)
            self._held_bytes += len(body)

    def on_message_complete(self) -> None:
        if self.status is not None and not self.has_ended:
            self._end()

    def _end(self) -> None:
        self.has_ended = True
        self._keeps_open = self._parser.should_keep_alive()
