"""Who may call: everybody on loopback, holders of the token elsewhere.

Only the digest of the token is kept in memory, and digests are compared in constant time. Without
a token, a request that a web page of another origin sent is refused, and so is one for a host that
is not this machine (a name of somebody else's that was made to resolve to 127.0.0.1): a browser on
this machine must not become a way in.

Cost: a walk over the request's headers; one SHA-256 where there is a token. Threads: event loop.
"""

import hashlib
import hmac
from functools import lru_cache
from urllib.parse import urlsplit

from delayserver.api.hot import (
    Asgi,
    Headers,
    Receive,
    Scope,
    Send,
    header,
    problem_answer,
    send_answer,
)
from delayserver.errors import AccessError

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


class Access:
    """ASGI middleware in front of everything."""

    def __init__(self, token: str | None, app: Asgi) -> None:
        self._digest = hashlib.sha256(token.encode()).digest() if token is not None else None
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                self.check(scope["headers"])
            except AccessError as error:
                await send_answer(send, problem_answer(error))
                return
        await self._app(scope, receive, send)

    def check(self, headers: Headers) -> None:
        """Raises AccessError unless the request with these headers may be served."""
        if self._digest is None:
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
            return
        scheme, _, token = header(headers, b"authorization").partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            raise AccessError("send the header `Authorization: Bearer TOKEN`")
        if not hmac.compare_digest(hashlib.sha256(token.strip()).digest(), self._digest):
            raise AccessError("the token is not valid")


@lru_cache(maxsize=256)
def _is_local(url: str) -> bool:
    """Whether a URL names this machine. Clients send the same one again and again."""
    try:
        return urlsplit(url).hostname in _LOCAL
    except ValueError:
        return False
