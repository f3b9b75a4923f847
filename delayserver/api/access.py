"""Who may call: everybody on loopback, until a token was made; then only who shows one.

This is the first thing that looks at a request: at the size of its head, at its token, and at how
often the token is used. What the token allows is asked later (`delayserver.api.scopes`), when it is
known what the request is about.

Where no token is asked for, a request that a web page of another origin sent is refused, and so is
one for a host that is not this machine (a name of somebody else's that was made to resolve to
127.0.0.1): a browser on this machine must not become a way in.

Cost: a walk over the request's headers; one SHA-256 where there is a token. Threads: event loop.
"""

from functools import lru_cache
from urllib.parse import urlsplit

from delayserver.api.hot.answers import Headers, header, problem_answer
from delayserver.api.hot.asgi import Asgi, Receive, Scope, Send, send_answer
from delayserver.api.scopes import UNGUARDED_PATHS
from delayserver.errors import AccessError, DelayServerError, HeadTooLargeError
from delayserver.security.tokens import Caller, TokenTable

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_SEPARATORS_BYTES = 4
"""Colon, blank and line break of a header."""


class Access:
    """ASGI middleware in front of everything. It puts a `caller` into the scope."""

    def __init__(
        self, tokens: TokenTable, app: Asgi, *, headers_max: int, head_max_bytes: int
    ) -> None:
        self.tokens = tokens
        self._app = app
        self.headers_max = headers_max
        self.head_max_bytes = head_max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                target = scope.get("raw_path") or scope["path"].encode()
                self.check_head(target + scope["query_string"], scope["headers"])
                if scope["path"] not in UNGUARDED_PATHS:
                    scope["caller"] = self.check(scope["headers"])
            except DelayServerError as error:
                await send_answer(send, problem_answer(error))
                return
        await self._app(scope, receive, send)

    def check_head(self, target: bytes, headers: Headers) -> None:
        """Raises HeadTooLargeError unless the head of a request keeps the limits."""
        count = 0
        total_bytes = len(target)
        for name, value in headers:
            count += 1
            total_bytes += len(name) + len(value) + _SEPARATORS_BYTES
        if count > self.headers_max:
            raise HeadTooLargeError(f"more than {self.headers_max} headers (headers_max)")
        if total_bytes > self.head_max_bytes:
            raise self.head_too_long()

    def head_too_long(self) -> HeadTooLargeError:
        """The head of a request has more bytes than it may have."""
        return HeadTooLargeError(
            f"address and headers have more than {self.head_max_bytes} bytes (head_max_bytes)"
        )

    def check(self, headers: Headers) -> Caller | None:
        """Who sent the request with these headers; None where nobody is asked.

        Raises AccessError, RateLimitedError: it may not be served."""
        if self.tokens.is_open:
            _check_is_local(headers)
            return None
        scheme, _, token = header(headers, b"authorization").partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            raise AccessError("send the header `Authorization: Bearer TOKEN`")
        caller = self.tokens.caller(token.strip())
        caller.admit()
        return caller

    def is_restricted(self, headers: Headers) -> bool:
        """Whether who sent the request may do some things only. Nothing is counted or refused."""
        if self.tokens.is_open:
            return False
        token = header(headers, b"authorization").partition(b" ")[2]
        try:
            return not self.tokens.caller(token.strip()).is_admin
        except AccessError:
            return False


def _check_is_local(headers: Headers) -> None:
    origin = header(headers, b"origin").decode("latin-1")
    host = header(headers, b"host").decode("latin-1")
    if origin and not _is_local(origin):
        raise AccessError(
            "requests from web pages of other origins need a token", authenticated=True
        )
    if host and not _is_local("//" + host):
        raise AccessError(
            f"without a token the server answers to localhost and 127.0.0.1, not to {host}",
            authenticated=True,
        )


@lru_cache(maxsize=256)
def _is_local(url: str) -> bool:
    """Whether a URL names this machine. Clients send the same one again and again."""
    try:
        return urlsplit(url).hostname in _LOCAL
    except ValueError:
        return False
