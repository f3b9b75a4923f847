"""HTTP/1.1 as this client needs it: one request, one answer, over connections that stay open.

    Transport       groups of calls and consumers ask through it; a test has one that never leaves
                    the process
    HttpTransport   the real one, over the connections that the server's webhooks use too

No redirects, proxies, cookies or compression: the other end is one known server. Whether a request
whose connection broke may have been served is never hidden: `UnreachableError` says that nothing
was sent, `UnansweredError` that something was. Nothing is retried here.

Connections belong to one event loop of one process. In another loop, and in the child of a fork,
new ones are made: two processes on one connection would get each other's answers.

Cost: 25 µs of CPU per request of 4 KB and its answer, on uvloop; in the same run aiohttp took 95 µs
and httpx 750 µs, which is why there is no library here. Threads: belongs to the event loop.
"""

import asyncio
import os
import socket
import ssl
from collections import deque
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from typing import Protocol, TypeVar
from urllib.parse import quote, urlsplit
from weakref import WeakSet

import msgspec

from delayserver.client.errors import (
    ClientError,
    NotADelayServerError,
    Problem,
    UnansweredError,
    UnreachableError,
    UnsendableError,
    refusal,
)
from delayserver.http.connecting import connect_to_any, until
from delayserver.http.connection import HttpConnection

JSON = "application/json"
TIMEOUT_S = 30.0
CONNECT_S = 5.0
IDLE_S = 30.0
"""A connection that was idle for longer is not used again: the server, or something on the way, may
be closing it just then. The server closes its own after 75 s."""
IDLE_CONNECTIONS_MAX = 16
_AWAY = (
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
"""To be waited out, whatever the body says."""
UNKNOWN = (HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT)
"""Something in front of the server has no answer from it."""
NO_HEADERS: Mapping[str, str] = {}
_inherited: list[HttpConnection] = []
"""Connections of the parent, in the child of a fork. They are kept, since closing them here would
take them out of the parent's poll set, which both share."""

T = TypeVar("T")


class HttpAnswer(msgspec.Struct):
    """The answer of the server to a request."""

    status: int
    body: bytes
    headers: dict[str, str] = {}
    """Names in lower case."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def version(self) -> str:
        """The version of the thing that it shows, for `if_match`; empty: it has none."""
        return self.headers.get("etag", "").strip('"')

    def error(self) -> ClientError:
        """The error for an answer that is no success."""
        problem = self.problem
        if problem is None:
            if self.status in _AWAY:
                # Something stands in front of the server, and has a page of its own for this.
                problem = Problem(HTTPStatus(self.status).phrase, self.status)
            else:
                kind = self.headers.get("content-type", "no content type")
                return NotADelayServerError(
                    f"what answers there is not a delay server (status {self.status}, {kind})"
                )
        return refusal(msgspec.structs.replace(problem, status=self.status), self.retry_after_s)

    @property
    def problem(self) -> Problem | None:
        """The document of a refusal; None: it is not from a delay server."""
        try:
            return msgspec.json.decode(self.body, type=Problem)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    @property
    def is_unknown(self) -> bool:
        """Whether it is a refusal after which the call may have had its effect, or a part of it: a
        proxy has no answer from the server, or a shard has ended."""
        if self.status in UNKNOWN:
            return True
        if self.status != HTTPStatus.SERVICE_UNAVAILABLE:
            return False
        problem = self.problem
        return problem is not None and bool(problem.outcome or problem.ids)

    @property
    def retry_after_s(self) -> float | None:
        """The wait that the server asked for."""
        text = self.headers.get("retry-after", "")
        # The server writes seconds. A date, as others may write it, only costs the usual backoff.
        return float(text) if text.isascii() and text.isdigit() and len(text) < 9 else None


class Request(Protocol):
    """Has one request answered, as `Transport.request` does. Raises as that."""

    async def __call__(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float = TIMEOUT_S,
    ) -> HttpAnswer: ...


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
    ) -> HttpAnswer:
        """One request, its body JSON. Raises UnreachableError, UnansweredError."""

    async def close(self) -> None:
        """Close all connections; requests under way are unanswered."""


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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotADelayServerError(f"an answer that this client cannot read: {error}") from error


def path_of(*parts: str) -> str:
    """A path below /v1; names and keys may hold any text. Raises UnsendableError for bytes and the
    like."""
    for part in parts:
        if not isinstance(part, str):
            raise UnsendableError(f"a name, key or id is text, not {type(part).__name__}: {part!r}")
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


class HttpTransport:
    """Connections to one server, as many as there are requests at once.

    `url` is `http://host[:port]` or `https://…`, with a path where a gateway has the server below
    one; `tls` replaces the system's certificates."""

    def __init__(
        self, url: str, *, token: str | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an address such as http://127.0.0.1:8080")
        if parts.query or parts.fragment or parts.username:
            raise ValueError(f"{url!r}: give scheme, host, port and path, and the token by itself")
        if not (parts.path.isascii() and parts.path.isprintable() and " " not in parts.path):
            raise ValueError(f"{url!r}: the path has to be quoted, as in http://host/my%20server")
        self._prefix = parts.path.rstrip("/")
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
        self._idle: deque[HttpConnection] = deque()
        self._open: WeakSet[HttpConnection] = WeakSet()
        self._home: tuple[asyncio.AbstractEventLoop, int] | None = None
        """Loop and process of the connections."""
        self._closed = False

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float = TIMEOUT_S,
        content_type: str = JSON,
    ) -> HttpAnswer:
        """One request, with the type of its body. Raises UnreachableError, UnansweredError."""
        head = b"%b %b HTTP/1.1\r\n%b" % (
            method.encode(),
            f"{self._prefix}{path}".encode(),
            self._head,
        )
        for name, value in headers.items():
            head += f"{name}: {value}\r\n".encode("latin-1")
        if body is None:
            data = head + (b"\r\n" if method == "GET" else b"content-length: 0\r\n\r\n")
        else:
            data = b"%bcontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (
                *(head, content_type.encode("latin-1"), len(body), body),
            )
        self._settle_in()
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        connection = await self._connection(min(CONNECT_S, timeout_s))
        try:
            await connection.exchange(data, deadline_s)
        except BaseException as error:
            connection.abort()
            if isinstance(error, TimeoutError):
                raise UnansweredError(
                    f"{self.url} did not answer {method} {path} within {timeout_s:g} s"
                ) from error
            if isinstance(error, OSError):
                raise UnansweredError(f"{method} {path} at {self.url}: {error}") from error
            raise
        answered = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in connection.headers
        }
        assert connection.status is not None
        answer = HttpAnswer(connection.status, connection.body, answered)
        self._release(connection)
        return answer

    async def close(self) -> None:
        """Close all connections; requests under way are unanswered."""
        self._settle_in()
        self._closed = True
        for connection in tuple(self._open):
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # in which the transports close their sockets

    def _settle_in(self) -> None:
        """Forget the connections of another loop, or of the process that was forked."""
        loop, process = asyncio.get_running_loop(), os.getpid()
        home, self._home = self._home, (loop, process)
        if home is None or home == self._home:
            return
        others, self._open = tuple(self._open), WeakSet()
        self._idle.clear()
        if home[1] != process:
            _inherited.extend(others)
        elif not home[0].is_closed():
            for connection in others:
                home[0].call_soon_threadsafe(connection.abort)

    async def _connection(self, connect_s: float) -> HttpConnection:
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
            async with until(loop.time() + connect_s):
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
                _, connection = await connect_to_any(
                    addresses, self._connect_to, HttpConnection.abort
                )
        except TimeoutError as error:
            raise UnreachableError(f"{self.url} took no connection in {connect_s:g} s") from error
        except OSError as error:
            raise UnreachableError(f"no server can be reached at {self.url}: {error}") from error
        self._open.add(connection)
        return connection

    async def _connect_to(self, address: str) -> HttpConnection:
        loop = asyncio.get_running_loop()
        tls = self._tls if self._wants_tls else None
        _, connection = await loop.create_connection(
            partial(HttpConnection, loop),
            address,
            self._port,
            ssl=tls,
            server_hostname=self._host if tls else None,
        )
        return connection

    def _release(self, connection: HttpConnection) -> None:
        if connection.is_reusable and len(self._idle) < IDLE_CONNECTIONS_MAX and not self._closed:
            connection.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()
