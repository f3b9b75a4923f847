"""HTTP/1.1 as this client needs it: one request, one answer, over connections that stay open.

    Transport       what producers and consumers ask through; a test has one that never leaves the
                    process
    HttpTransport   the real one, on asyncio and the parser that the server uses too

No redirects, proxies, cookies or compression: the other end is one known server. Whether a request
whose connection broke may have been served is never hidden: `UnreachableError` says that nothing
was sent, `UnansweredError` that something was. Nothing is retried here.

Cost: 25 µs of CPU per request of 4 KB and its answer, on uvloop; in the same run aiohttp took 95 µs
and httpx 750 µs, which is why there is no library here. Threads: belongs to the event loop.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import quote, urlsplit

import httptools
import msgspec

from delayserver.client.errors import (
    ClientError,
    NotADelayServerError,
    Problem,
    UnansweredError,
    UnreachableError,
    refusal,
)

TIMEOUT_S = 30.0
CONNECT_S = 5.0
IDLE_S = 30.0
"""A connection that was idle for longer is not used again: the server, or something on the way, may
be closing it just then. The server closes its own after 75 s."""
IDLE_CONNECTIONS_MAX = 16
NO_HEADERS: Mapping[str, str] = {}

T = TypeVar("T")


@dataclass(slots=True)
class Answer:
    """What came back."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def error(self) -> ClientError:
        """What an answer that is no success means."""
        try:
            problem = msgspec.json.decode(self.body, type=Problem)
        except (msgspec.DecodeError, UnicodeDecodeError):
            if self.status in (HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT):
                # Something stands in front of the server and cannot reach it.
                problem = Problem(HTTPStatus(self.status).phrase, self.status)
            else:
                kind = self.headers.get("content-type", "no content type")
                return NotADelayServerError(
                    f"what answers there is not a delay server (status {self.status}, {kind})"
                )
        return refusal(problem, self.retry_after_s)

    @property
    def retry_after_s(self) -> float | None:
        """What the server asked to wait."""
        text = self.headers.get("retry-after", "")
        # The server writes seconds. A date, as others may write it, only costs the usual backoff.
        return float(text) if text.isascii() and text.isdigit() and len(text) < 9 else None


class Transport(Protocol):
    """Asks one server."""

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float = TIMEOUT_S,
    ) -> Answer:
        """One request, its body JSON. Raises UnreachableError, UnansweredError."""
        ...

    async def close(self) -> None:
        """Close all connections; requests under way are unanswered."""
        ...


async def ask(
    transport: Transport,
    method: str,
    path: str,
    document: object = None,
    *,
    answer_type: type[T],
    timeout_s: float = TIMEOUT_S,
) -> T:
    """One call with JSON; the answer's document. Raises ClientError."""
    body = None if document is None else msgspec.json.encode(document)
    answer = await transport.request(method, path, body, timeout_s=timeout_s)
    if not answer.is_success:
        raise answer.error()
    return decoded(answer.body or b"null", answer_type)


def decoded(body: bytes, answer_type: type[T]) -> T:
    """A document of the server. Raises NotADelayServerError when it is another one."""
    try:
        return msgspec.json.decode(body, type=answer_type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotADelayServerError(f"an answer that this client cannot read: {error}") from error


def path_of(*parts: str) -> str:
    """A path below /v1; names and keys may hold anything."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


class HttpTransport:
    """Connections to one server, as many as there are requests at once.

    `url` is `http://host[:port]` or `https://…`; `tls` replaces the system's certificates."""

    def __init__(
        self, url: str, *, token: str | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an address such as http://127.0.0.1:8080")
        if parts.path not in ("", "/") or parts.query or parts.username:
            raise ValueError(f"{url!r}: give scheme, host and port only, and the token by itself")
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ValueError("a token is visible ASCII")
        self.url = url
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = tls
        self._wants_tls = parts.scheme == "https"
        head = f"host: {parts.netloc}\r\n"
        if token is not None:
            head += f"authorization: Bearer {token}\r\n"
        self._head = head.encode("latin-1")
        self._idle: deque[_Connection] = deque()
        self._open: set[_Connection] = set()
        self._closed = False

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float = TIMEOUT_S,
    ) -> Answer:
        """See Transport."""
        head = b"%b %b HTTP/1.1\r\n%b" % (method.encode(), path.encode(), self._head)
        for name, value in headers.items():
            head += f"{name}: {value}\r\n".encode("latin-1")
        if body is None:
            data = head + (b"\r\n" if method == "GET" else b"content-length: 0\r\n\r\n")
        else:
            data = b"%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
                *(head, len(body), body),
            )
        connection = await self._connection()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await connection.exchange(data)
        except BaseException as error:
            connection.abort()
            if isinstance(error, TimeoutError):
                raise UnansweredError(
                    f"{self.url} did not answer {method} {path} within {timeout_s:g} s"
                ) from error
            if isinstance(error, OSError):
                raise UnansweredError(f"{method} {path} at {self.url}: {error}") from error
            raise
        self._release(connection)
        return answer

    async def close(self) -> None:
        """See Transport."""
        self._closed = True
        for connection in tuple(self._open):
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # in which the transports close their sockets

    async def _connection(self) -> "_Connection":
        """One that is open: idle, or new. Raises UnreachableError."""
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and loop.time() - connection.idle_since_s < IDLE_S:
                return connection
            connection.abort()
        if self._closed:
            raise UnreachableError(f"the connections to {self.url} are closed")
        if self._wants_tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    partial(_Connection, loop, self._open),
                    self._host,
                    self._port,
                    ssl=self._tls if self._wants_tls else None,
                )
        except TimeoutError as error:
            raise UnreachableError(f"{self.url} took no connection in {CONNECT_S:g} s") from error
        except OSError as error:
            raise UnreachableError(f"no server can be reached at {self.url}: {error}") from error
        return connection

    def _release(self, connection: "_Connection") -> None:
        if connection.is_reusable and len(self._idle) < IDLE_CONNECTIONS_MAX and not self._closed:
            connection.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()


class _Connection(asyncio.Protocol):
    """One connection, which carries one request at a time. Its other half is the parser, which
    calls the `on_…` methods from within `feed_data`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connections: "set[_Connection]") -> None:
        self._loop = loop
        self._connections = connections
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._answered: asyncio.Future[Answer] | None = None
        self._parts: list[bytes] = []
        self._headers: dict[str, str] = {}
        self.idle_since_s = 0.0
        self.is_open = False
        self.is_reusable = False

    async def exchange(self, request: bytes) -> Answer:
        """Send a request, and wait for its whole answer. Raises OSError when there is none."""
        assert self.is_open
        self._answered = self._loop.create_future()
        self.is_reusable = False
        self._transport.write(request)
        return await self._answered

    def abort(self) -> None:
        """Close at once, whatever is still to be sent or received."""
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, failure: str) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionError(failure))

    # ── called by the event loop ───────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._answered is None or self._answered.done():
            self.abort()  # an answer to a question that nobody asked
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the answer is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = self.is_reusable = False
        self._connections.discard(self)
        self._fail(f"the connection was closed without an answer{f' ({exc})' if exc else ''}")

    # ── called by the parser ───────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        self._parts = []
        self._headers = {}
        if self._answered is not None and self._answered.done():
            self.is_reusable = False  # more answers than requests: the next would get the wrong one

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._answered is None or self._answered.done():
            return  # below 200 the answer is still to come
        self.is_reusable = self._parser.should_keep_alive()
        self._answered.set_result(Answer(status, b"".join(self._parts), self._headers))
