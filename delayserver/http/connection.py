"""One HTTP/1.1 connection that this process opened: one request at a time, one answer to each.

    exchange(request, deadline) ──► transport
                                       │ data_received ──► parser ──► on_header, on_body, …
    status, headers, body ◄────────────┘

It carries bytes and does not know what they are for. How a target is found, how many connections
stay open and what an answer means is up to its owner: the sender of webhooks decides by the status
alone, the client library needs the whole answer. Nothing is sent twice, and no redirect followed.

The bytes that the other side can make us hold are bounded by `answer_bytes_max` and by the
deadline. A connection that sends more than we asked for is not used again.

Cost: 21 µs of CPU per request of 4 KB and its answer, on uvloop, building both included. A timer
ends an exchange: `asyncio.timeout` around it took 3 µs more. Threads: belongs to the event loop.
"""

import asyncio
import sys
from typing import cast

import httptools

from delayserver.http.connecting import call_when_over


class HttpConnection(asyncio.Protocol):
    """The protocol of one connection. Its other half is the parser, which calls the `on_…` methods
    from within `feed_data`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        answer_bytes_max: int = sys.maxsize,
        body_bytes_max: int | None = None,
    ) -> None:
        """`answer_bytes_max`: the limit of heads and body together; a longer answer fails.
        `body_bytes_max`: so much of a body is kept, and the rest is passed over; None: all."""
        self._loop = loop
        self._answer_bytes_max = answer_bytes_max
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[None] | None = None
        self._received_bytes = 0
        self._parts: list[bytes] = []
        self._body_bytes_max = body_bytes_max
        if body_bytes_max is None:
            self.on_body = self._parts.append
        elif body_bytes_max:
            self.on_body = self._keep_beginning  # without `on_body` the parser passes over bodies
        self._parser = httptools.HttpResponseParser(self)
        self.address = ""
        """The address that it is connected to. The owner of the connection sets it."""
        self.idle_since_s = 0.0
        """The time since which it is idle, by the clock of its owner, which sets it."""
        self.is_open = False
        self.is_reusable = False
        """Whether the last answer came whole, and the other side keeps the connection."""
        self.status: int | None = None
        """The status of the answer, once its head is there; a later failure does not clear it."""
        self.headers: list[tuple[bytes, bytes]] = []
        """The headers of the answer with that `status`, as they came."""

    @property
    def is_silent(self) -> bool:
        """Whether no byte has come since the last request was sent."""
        return not self._received_bytes

    @property
    def body(self) -> bytes:
        """The body of the answer, as far as it is kept."""
        return b"".join(self._parts)

    async def exchange(self, request: bytes, deadline_s: float) -> None:
        """Send a whole request and wait for the end of its answer.

        Raises OSError when the answer does not come whole, TimeoutError at `deadline_s` of the
        loop's time."""
        assert self._transport is not None
        self._answered = self._loop.create_future()
        self._received_bytes = 0
        self.is_reusable = False
        self.status = None
        self._parts.clear()
        if not self.is_open:
            raise ConnectionError("the connection was closed before the request was sent")
        self._transport.write(request)
        timer = call_when_over(self._loop, deadline_s, _give_up, self._answered)
        try:
            await self._answered
        finally:
            timer.cancel()

    def abort(self) -> None:
        """Close at once, whatever is still to be sent or received."""
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, failure: str) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionError(failure))

    # ── called by the event loop ───────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._answered is None or self._answered.done():
            self.abort()  # an answer without a request
            return
        self._received_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.is_reusable = False
            self._fail(f"the answer is not HTTP: {error}")
        if self._received_bytes > self._answer_bytes_max:
            self._fail(f"the answer is longer than {self._answer_bytes_max} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = self.is_reusable = False
        self._fail(f"the connection was closed without an answer{f' ({exc})' if exc else ''}")

    # ── called by the parser ───────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        if self.status is None:
            self.headers.clear()  # after an answer below 200: that was not the one
        elif self._answered is not None and self._answered.done():
            self.is_reusable = False  # more answers than requests: the next would get the wrong one

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.status is None:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.status is None and status >= 200:  # below: the answer is still to come
            self.status = status

    def _keep_beginning(self, data: bytes) -> None:
        assert self._body_bytes_max is not None
        free = self._body_bytes_max - sum(map(len, self._parts))
        if free > 0 and self.status is not None:
            self._parts.append(data[:free])

    def on_message_complete(self) -> None:
        if self.status is not None and self._answered is not None and not self._answered.done():
            self.is_reusable = self._parser.should_keep_alive()
            self._answered.set_result(None)


def _give_up(answered: asyncio.Future[None]) -> None:
    if not answered.done():
        answered.set_exception(TimeoutError())
