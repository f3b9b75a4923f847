"""The right to call: all callers on loopback, until a token was made; then only callers with one.

This is the first thing that looks at a request: at the size of its head, at its token, and at how
often the token is used. The scopes of the token are checked later (`delayserver.api.scopes`), when
the subject of the request is known.

Where no token is asked for, a request that a web page of another origin sent is refused, and so is
one for a host that is not this machine (a name of somebody else's that was made to resolve to
127.0.0.1): a browser on this machine must not become a way in.

HEAD is GET without the body of the answer, wherever there is a GET.

Cost: a walk over the request's headers; one SHA-256 where there is a token. Threads: event loop.
"""

from collections import Counter
from collections.abc import MutableMapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from delayserver.api.hot.answers import Headers, header, problem_answer
from delayserver.api.hot.asgi import Asgi, Receive, Scope, Send, send_answer
from delayserver.api.scopes import is_unguarded
from delayserver.errors import (
    AccessError,
    CodingError,
    DelayServerError,
    HeadTooLargeError,
    MalformedError,
)
from delayserver.security.tokens import Caller, TokenTable

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_SEPARATORS_BYTES = 4
"""Colon, blank and line break of a header."""


class Access:
    """ASGI middleware in front of everything. It puts a `caller` into the scope."""

    def __init__(
        self,
        tokens: TokenTable,
        app: Asgi,
        *,
        headers_max: int,
        head_max_bytes: int,
        origins: Sequence[str] = (),
        answers: Counter[bytes] | None = None,
    ) -> None:
        """`origins`: whose web pages may call, too, where no token is asked for; `answers`: counts
        requests, by the status that they are answered with."""
        self.tokens = tokens
        self._app = app
        self.headers_max = headers_max
        self.head_max_bytes = head_max_bytes
        self._origins = origins
        self.answers: Counter[bytes] = Counter() if answers is None else answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = self._counted(send)
            if scope["method"] == "HEAD":
                scope, send = {**scope, "method": "GET"}, _without_body(send)
            try:
                target = scope.get("raw_path") or scope["path"].encode()
                headers = scope["headers"]
                self.check_head(target + scope["query_string"], headers, scope["http_version"])
                if not is_unguarded(scope["path"]):
                    scope["caller"] = self.check(headers)
                _check_coding(headers)
            except DelayServerError as error:
                await send_answer(send, problem_answer(error))
                return
        await self._app(scope, receive, send)

    def _counted(self, send: Send) -> Send:
        async def send_counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.answers[b"%d" % message["status"]] += 1
            await send(message)

        return send_counted

    def check_head(self, target: bytes, headers: Headers, version: str) -> None:
        """Raises HeadTooLargeError unless the head of a request keeps the limits, MalformedError
        unless it names one host (RFC 9112, 3.2); `version` of HTTP."""
        count = hosts = 0
        total_bytes = len(target)
        for name, value in headers:
            count += 1
            hosts += name == b"host"
            total_bytes += len(name) + len(value) + _SEPARATORS_BYTES
        if count > self.headers_max:
            raise HeadTooLargeError(f"more than {self.headers_max} headers (headers_max)")
        if total_bytes > self.head_max_bytes:
            raise self.head_too_long()
        if hosts > 1 or (not hosts and version == "1.1"):
            raise MalformedError(f"a request has one header `Host`, and this one has {hosts}")

    def head_too_long(self) -> HeadTooLargeError:
        """The head of a request has more bytes than it may have."""
        return HeadTooLargeError(
            f"address and headers have more than {self.head_max_bytes} bytes (head_max_bytes)"
        )

    def check(self, headers: Headers) -> Caller | None:
        """As `caller`, and the request is counted.

        Raises AccessError, RateLimitedError: it may not be served."""
        caller = self.caller(headers)
        if caller is not None:
            caller.admit()
        return caller

    def caller(self, headers: Headers) -> Caller | None:
        """The caller whose token is in these headers; None where no token is needed.

        Raises AccessError: it may not be served."""
        if self.tokens.is_open:
            self._check_is_local(headers)
            return None
        scheme, _, token = header(headers, b"authorization").partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            raise AccessError("send the header `Authorization: Bearer TOKEN`")
        return self.tokens.caller(token.strip())

    def is_restricted(self, headers: Headers) -> bool:
        """Whether who sent the request may do some things only. Nothing is counted or refused."""
        try:
            caller = self.caller(headers)
        except AccessError:
            return False
        return caller is not None and not caller.is_admin

    def _check_is_local(self, headers: Headers) -> None:
        origin = header(headers, b"origin").decode("latin-1")
        host = header(headers, b"host").decode("latin-1")
        if origin and not _is_local(origin) and origin not in self._origins:
            raise AccessError(
                "requests from web pages of other origins need a token, or that the origin is "
                "allowed (cors_origins)",
                authenticated=True,
            )
        if host and not _is_local("//" + host):
            raise AccessError(
                f"without a token the server answers to localhost and 127.0.0.1, not to {host}",
                authenticated=True,
            )


def _without_body(send: Send) -> Send:
    """The same `send` without bodies: HEAD is answered as GET is."""

    async def send_head(message: MutableMapping[str, Any]) -> None:
        await send({**message, "body": b""} if "body" in message else message)

    return send_head


def _check_coding(headers: Headers) -> None:
    for name, value in headers:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            coding = value.decode("latin-1")
            raise CodingError(f"send the body as it is: it came with Content-Encoding: {coding}")


@lru_cache(maxsize=256)
def _is_local(url: str) -> bool:
    """Whether a URL names this machine. Clients send the same one again and again."""
    try:
        return urlsplit(url).hostname in _LOCAL
    except ValueError:
        return False
