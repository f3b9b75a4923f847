"""The application: access, then the hot path, then everything else on FastAPI.

    Access ──▶ Leaving ──▶ Finish ──▶ HotPath ──▶ Rest ──▶ FastAPI, imported and made later

A server is ready when it has recovered and its port is open. FastAPI, pydantic's models and the
routes take longer to import than a million messages take to recover, and publishing, delivering and
/readyz need none of them: they are imported by a thread, which begins when the first call comes
that needs them, or REST_AFTER_S after the port was opened. Calls that come meanwhile wait for it.
From then on nothing is imported any more.

Threads: belongs to the event loop.
"""

import asyncio
import gc
from collections.abc import Callable, MutableMapping, Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple

from delayserver.api.access import Access
from delayserver.api.finish import Finish
from delayserver.api.hot.asgi import Asgi, Receive, Scope, Send
from delayserver.api.hot.connection import Connection, Phase
from delayserver.api.hot.protocol import make_protocol
from delayserver.api.hot.publish import Hot
from delayserver.api.intake import Intake
from delayserver.api.leaving import Leaving
from delayserver.server.calls import Calls
from delayserver.shards.book import OwnerBook
from delayserver.shards.map import ClusterMap, Machines
from delayserver.shards.meeting import Meeting
from delayserver.shards.member import Member
from delayserver.shards.place import ShardPlace

IMPORTED_LATE: Final = ("encodings.idna", "numpy.ma", "delayserver.recovery.check")
"""Modules that libraries import when they first need them, or that only a backup needs. By then the
process may have no descriptor left for a module's file, and the call that needs it would fail."""

REST_AFTER_S: Final = 10.0
"""A server that serves only hot calls makes the rest so long after its start: by then it has
delivered the messages that had become due, and the first other call does not wait. A server that
lives shorter, as in a test, or while it comes and falls again, does without."""

READ_HEADERS: Final = (
    "Authorization",
    "If-Match",
    "If-None-Match",
    "delay-forward",
    "traceparent",
    "tracestate",
)
"""Request headers that a page of another origin may send besides those that any page may."""
TOLD_HEADERS: Final = ("ETag", "Location", "Retry-After", "Server-Timing", "delay-owner")
"""Answer headers that it may read besides those that any page may."""


class Rest:
    """An application that is made when it is first asked, or some time after the start."""

    def __init__(
        self, make: Callable[[], Asgi], on_failed: Callable[[BaseException], None]
    ) -> None:
        """`on_failed` is told of an error of `make`: a server without its calls is none."""
        self._make = make
        self._on_failed = on_failed
        self._making: asyncio.Future[Asgi] | None = None
        self._made: Asgi | None = None

    def begin_within(self, seconds: float) -> None:
        """Have it made by then, if nobody asks before."""
        asyncio.get_running_loop().call_later(seconds, self.begin)

    def begin(self) -> "asyncio.Future[Asgi]":
        """Have a thread make it."""
        if self._making is None:
            self._making = asyncio.get_running_loop().run_in_executor(None, self._make)
            self._making.add_done_callback(self._end)
        return self._making

    def _end(self, making: "asyncio.Future[Asgi]") -> None:
        if making.cancelled():
            return
        error = making.exception()
        if error is not None:
            self._on_failed(error)
            return
        self._made = making.result()
        # It lives until the end, as nearly all that is there: the collector need not look at it.
        gc.freeze()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._made
        if app is None:
            app = await asyncio.shield(self.begin())
        await app(scope, receive, send)


class App(NamedTuple):
    """The application of a process, and its parts."""

    asgi: Asgi
    protocol: type[Connection]
    """Takes the hot path past ASGI."""
    rest: Rest
    """The part of the application that may be begun beforehand."""
    member: Member
    """The shard among the others, or alone."""
    cluster: ClusterMap


def make_app(
    calls: Calls,
    place: ShardPlace,
    *,
    meeting: Meeting | None = None,
    book: OwnerBook | None = None,
    machines: Callable[[], Machines] = Machines,
) -> App:
    """The application of a server, as the shard at `place`. In a cluster: `meeting`, how it comes
    together with the others, `book`, the owners of the shards, and `machines`, the state of
    the nodes."""
    intake = Intake(calls.settings, calls.subjects, calls.random)

    def make() -> Asgi:
        for name in IMPORTED_LATE:
            import_module(name)
        from delayserver.api.rest.app import make_rest

        return make_rest(calls, intake, member.path, cluster)

    rest = Rest(make, calls.on_fatal)
    settings = calls.settings
    member = Member(place, calls, intake, rest, meeting, book)
    hot = member.hot
    cluster = ClusterMap(member.links, settings, calls.clock, machines)
    access = Access(
        calls.tokens,
        Leaving(hot.exit, Finish(member.front)),
        headers_max=settings.headers_max,
        head_max_bytes=settings.head_max_bytes,
        origins=settings.cors_origins,
        answers=calls.gauges.metrics.answers,
    )
    app = with_cors(access, settings.cors_origins) if settings.cors_origins else access
    protocol = make_protocol(hot, access, settings)
    add_gauges(calls.gauges.metrics.gauge, hot, protocol)
    return App(app, protocol, rest, member, cluster)


def add_gauges(
    gauge: Callable[[str, str, Callable[[], float]], None], hot: Hot, protocol: type[Connection]
) -> None:
    """Register gauges of the bytes that the connections of a server hold."""
    held = protocol.receiving.held_bytes
    gauge("receiving_bytes", "Bodies that have come in part", lambda: held[Phase.BODY])
    gauge("held_bytes", "Bodies that wait for their answers", lambda: hot.bodies.held_bytes)
    gauge("gathered_bytes", "Publishes that wait to be decided", lambda: hot.gathered_bytes)
    gauge("unread_bytes", "Answers that clients do not read", lambda: protocol.unread.total_bytes)


def with_cors(app: Asgi, origins: Sequence[str]) -> Asgi:
    """The same, and a browser is told which pages may call it, and which headers they may read. All
    answers say that they depend on the page, so that no cache gives one page those of another."""
    from starlette.datastructures import MutableHeaders
    from starlette.middleware.cors import CORSMiddleware

    told = CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT"),
        allow_headers=READ_HEADERS,
        expose_headers=TOLD_HEADERS,
    )

    async def varying(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_varying(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=list(message["headers"]))
                if "origin" not in headers.get("vary", "").lower():
                    headers.add_vary_header("Origin")
                message = {**message, "headers": headers.raw}
            await send(message)

        await told(scope, receive, send_varying)

    return varying
