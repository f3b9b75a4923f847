"""The last step of an answer to GET: it says how long it took, and is compressed if it is long and
the client takes that.

    Access ──▶ Finish ──▶ everything that answers

`Server-Timing` has `app`, until the answer was there, and `gzip`, if it was compressed: the
figures that the browser's own tools, and the console, show of a call. An answer that has begun to
leave before all of it is there is passed on as it is, and so is one that is encoded already. One
with an `ETag` is not compressed: the tag is the version of the thing itself, which `If-Match` has
to name byte for byte (RFC 9110, 8.8.1).

Only GET: publishing, cancelling and consuming do not come here, or leave as they are. A compressed
answer holds only data that the token may read; no secret of another client stands beside it.

Level 1 takes half the time of level 6, for answers that are a ninth longer: a list of 1,000
messages becomes 67 kB instead of 249 in 1.6 ms. Long ones are compressed by a thread, since 16 MiB
would hold up the event loop for a tenth of a second.

Rejected: Starlette's GZipMiddleware, which compresses on the event loop, and does not know which
answers must stay as they are.

Cost: 4 µs for a GET; 7 µs for each KiB that is compressed. Threads: belongs to the event loop; long
answers are compressed in its executor.
"""

import asyncio
import gzip
from collections.abc import MutableMapping
from functools import lru_cache, partial
from typing import Any, Final

from delayserver.api.hot.answers import Headers, header
from delayserver.api.hot.asgi import Asgi, Receive, Scope, Send

COMPRESS_MIN_BYTES: Final = 1400
"""An answer that fits into one packet gains nothing."""
INLINE_MAX_BYTES: Final = 16 * 1024
"""Longer ones are compressed by a thread."""
LEVEL: Final = 1
_TYPES: Final = (b"text/", b"application/json", b"application/openmetrics-text")
_ENCODED: Final = frozenset({b"content-encoding", b"etag"})


class Finish:
    """ASGI middleware behind the access."""

    def __init__(self, app: Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "GET":
            takes_gzip = accepts_gzip(scope["headers"])
            send = _Finisher(send, takes_gzip=takes_gzip)
        await self._app(scope, receive, send)


class _Finisher:
    """Sends one answer: its head as soon as it is known whether the body is compressed."""

    def __init__(self, send: Send, *, takes_gzip: bool) -> None:
        self._send = send
        self._takes_gzip = takes_gzip
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._start: MutableMapping[str, Any] | None = None

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        start, self._start = self._start, None
        if start is None:  # more of an answer that has begun
            await self._send(message)
            return
        timing = b"app;dur=%.1f" % self._ms_since(self._began_s)
        headers: list[tuple[bytes, bytes]] = [*start["headers"]]
        body = message.get("body", b"")
        if not message.get("more_body", False) and _may_compress(headers, body):
            headers = [*_without(headers, b"vary"), (b"vary", _vary(headers))]
            if self._takes_gzip:
                began_s = self._loop.time()
                body = await self._compress(body)
                timing += b", gzip;dur=%.1f" % self._ms_since(began_s)
                headers = [
                    *_without(headers, b"content-length"),
                    (b"content-length", b"%d" % len(body)),
                    (b"content-encoding", b"gzip"),
                ]
                message = {**message, "body": body}
        await self._send({**start, "headers": [*headers, (b"server-timing", timing)]})
        await self._send(message)

    async def _compress(self, body: bytes) -> bytes:
        compress = partial(gzip.compress, body, LEVEL, mtime=0)
        if len(body) <= INLINE_MAX_BYTES:
            return compress()
        return await self._loop.run_in_executor(None, compress)

    def _ms_since(self, began_s: float) -> float:
        return (self._loop.time() - began_s) * 1000


def _may_compress(headers: list[tuple[bytes, bytes]], body: bytes) -> bool:
    return (
        len(body) >= COMPRESS_MIN_BYTES
        and not any(name in _ENCODED for name, _ in headers)
        and header(headers, b"content-type").startswith(_TYPES)
    )


def _without(headers: list[tuple[bytes, bytes]], name: bytes) -> list[tuple[bytes, bytes]]:
    return [one for one in headers if one[0] != name]


def _vary(headers: list[tuple[bytes, bytes]]) -> bytes:
    before = header(headers, b"vary")
    if b"accept-encoding" in before.lower():
        return before
    return before + b", accept-encoding" if before else b"accept-encoding"


def accepts_gzip(headers: Headers) -> bool:
    """Whether the headers of a request take gzip: `Accept-Encoding` (RFC 9110, 12.5.3)."""
    return _accepts_gzip(header(headers, b"accept-encoding"))


@lru_cache(maxsize=256)
def _accepts_gzip(value: bytes) -> bool:
    weights = {}
    for item in value.lower().split(b","):
        coding, *parameters = (part.strip() for part in item.split(b";"))
        weights[coding] = all(
            not one.startswith(b"q=") or one[2:].strip(b"0.") != b"" for one in parameters
        )
    return weights.get(b"gzip", weights.get(b"*", False))
