"""Calls that a process on standby passes on to the owner of its shard, as they came.

    call ──▶ forwarded before? no owner, for a while? told to be directed? ──▶ 503, 421
         ──▶ head without the fields of this hop ──▶ kept connection ──▶ owner
         ──▶ body, part by part, as the owner takes it             │
    client ◀── part by part, as the client takes it ◀── answer ◀───┘

Nothing here believes a caller. A caller that wants to be told who the owner is shows a token here.
Else the token goes along, and the owner checks it. The owner checks `Host` and `Origin` too, so
both stay as the client sent them. (A `Host` of our own would open an owner without tokens to the
web pages that it refuses; the addresses in its answers would be those of a machine that the client
does not know.) So an owner must answer at its URL whatever the `Host`, which servers of ours do.

A call to another node cannot be read on its way. An owner by HTTPS is verified. Any other owner is
reached by a tunnel through the port of its links, behind the proof that both nodes know the
cluster's secret (`delayserver.shards.meeting`).

`_Call.run` alone decides the state of a call, and no caller is told more. A call is not begun
if there was no connection, or if the process that was asked said that it does not own the shard and
has done nothing (`StandbyError`), as an owner says that leaves. Then it looks for the owner again,
for up to OWNER_WAIT_S; behind that it is answered 503. If this process becomes the owner meanwhile,
the call is left to its server (`delayserver.api.moving`). A connection that broke after the request
went out: 503 with `outcome: unknown`; GET and HEAD, which change nothing, are asked once more. A
body of more than KEPT_MAX_BYTES cannot be sent again. An answer of up to WHOLE_MAX_BYTES is given
whole or not at all; a longer one whose owner dies ends with the client's connection, which is how
HTTP says so. A call that the client gives up is given up at once, so that a pull's messages are
leased to nobody.

Memory: for each call the bytes on their way in either direction, some 64 KiB each, whatever its
length. Descriptors: one besides the client's for each call under way; idle ones are no more than
calls were under way at once, and IDLE_MAX.

Rejected: httpx (750 µs a request, where `HttpConnection` takes 25; `delayserver.client.transport`);
`HttpConnection` itself, which holds whole answers and cannot send a body in parts.

Cost: see `delayserver.serve.standby`. Threads: belongs to the event loop.
"""

import asyncio
import contextlib
import ssl
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import structlog

from delayserver.api.hot.answers import Headers, header, problem_answer
from delayserver.api.hot.asgi import GoneError, Receive, Scope, Send, limited, send_answer
from delayserver.api.hot.consume import WHEN_GONE
from delayserver.api.hot.paths import BATCH_PATH, NO_FORWARD, REST_MAX_BYTES
from delayserver.api.intake import ENVELOPE_BYTES
from delayserver.api.moving import GIVE_BACK
from delayserver.cluster.hop import LAST_CHUNK, CallBody, beyond_hop, chunk
from delayserver.config import Settings
from delayserver.errors import (
    DelayServerError,
    LinkError,
    MalformedError,
    MisdirectedError,
    OverloadedError,
    ShardAwayError,
    StandbyError,
)
from delayserver.http.stream import HttpStream

FORWARDED: Final = (b"delay-forwarded", b"1")
"""The header of a call that was passed on: it is not passed on again."""
WHOLE_MAX_BYTES: Final = 64 * 1024
CONNECT_S: Final = 2.0
IDLE_S: Final = 30.0
"""A connection that was idle for longer is closed: the owner closes it after `idle_timeout_ms`, and
a call must not meet that. (Half of that setting, where it is shorter.)"""
IDLE_MAX: Final = 256
OWNER_WAIT_S: Final = 5.0
"""A call waits so long if an owner has left in order, and the next one is about to come. A change
of owner takes a second, and some more where the machine is busy."""
LOOK_AGAIN_S: Final = 0.05
SILENCE_S: Final = 90.0
"""An owner that neither takes nor says anything for so long is given up. The longest that one keeps
a call waiting is 60 s (pulls, `ack`, the map)."""
SWEEP_S: Final = 1.0

_SAFE: Final = frozenset({"GET", "HEAD"})
_NOT_BEGUN: Final = b'"urn:delayserver:problem:standby"'
"""In the answer of who does not own the shard (StandbyError)."""

log = structlog.get_logger()


class OwnerPlace(NamedTuple):
    """Where an owner is."""

    url: str
    host: str
    port: int
    is_https: bool
    prefix: bytes
    """The prefix of its paths, where a gateway has it below one."""
    authority: bytes


@lru_cache(maxsize=16)
def place_of(url: str) -> OwnerPlace:
    """Read a URL. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ValueError(f"{url!r} is not an address such as http://10.0.0.7:8080")
    is_https = parts.scheme == "https"
    port = parts.port or (443 if is_https else 80)
    prefix = parts.path.rstrip("/").encode()
    return OwnerPlace(url, parts.hostname, port, is_https, prefix, parts.netloc.encode())


Tunnel = Callable[[Callable[[], asyncio.Protocol]], Awaitable[None]]
"""Connects to the owner, and has a protocol made for the connection. Raises OSError, LinkError."""


class Forwarder:
    """Passes calls on, from when it is made to `close`; an ASGI application."""

    def __init__(
        self,
        shard: int,
        owner: Callable[[], str | None],
        settings: Settings,
        tls: Callable[[], ssl.SSLContext],
        answers: Counter[bytes],
        check: Callable[[Headers], object] = lambda headers: None,
        tunnel: "Callable[[], Tunnel | None]" = lambda: None,
    ) -> None:
        """`owner`: its URL, None while nobody is known to be; `tls`: how one by HTTPS is
        verified now; `answers`: counts calls, by the status that they are answered with. `check`
        raises AccessError where who sent a request with these headers is to be told nothing.
        `tunnel`: a sealed way to the owner, for one whose URL is no HTTPS; None: there is none."""
        self.shard = shard
        self.answers = answers
        self.tls = tls
        self.loop = asyncio.get_running_loop()
        self.is_closing = False
        self.gives_back = False
        """Whether calls that nobody was asked are left to the next server of this process."""
        self._owner = owner
        self._check = check
        self._tunnel = tunnel
        self._calls_max = settings.connections_max
        self._batch_max_bytes = settings.batch_max_bytes
        # The owner knows which limit each call has, and says so. This bounds all forwarded bodies.
        body_max_bytes = settings.body_max_bytes * 4 // 3 + ENVELOPE_BYTES
        self._rest_max_bytes = max(body_max_bytes, REST_MAX_BYTES)
        self._idle_s = min(IDLE_S, settings.idle_timeout_ms / 2000)
        self._idle: deque[HttpStream] = deque()
        self._idle_place: OwnerPlace | None = None
        self._calls: set[_Call] = set()
        self._changed = asyncio.Event()
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)

    @property
    def count(self) -> int:
        """Calls under way."""
        return len(self._calls)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = _Call(self, scope, self._counted(send))
        self._calls.add(call)
        try:
            await self._admit(scope["headers"])
            is_batch = scope["path"] == BATCH_PATH
            limit = self._batch_max_bytes if is_batch else self._rest_max_bytes
            await call.run(limited(scope["headers"], receive, limit))
        except GoneError:
            return
        except DelayServerError as error:
            if call.is_gone:
                return
            if call.has_begun:
                # uvicorn closes the connection of an answer that does not end.
                log.warning("an answer was cut off", path=scope["path"], error=str(error))
                return
            await send_answer(self._counted(send), problem_answer(error))
        finally:
            self._calls.discard(call)

    def _counted(self, send: Send) -> Send:
        async def send_counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.answers[b"%d" % message["status"]] += 1
            await send(message)

        return send_counted

    async def _admit(self, headers: Headers) -> None:
        """Raises why a call is not passed on."""
        if header(headers, FORWARDED[0]):
            raise StandbyError(
                f"it was forwarded to who owned shard {self.shard} and is on standby for it now; "
                "its owner has just moved, so try again"
            )
        is_to_be_told = header(headers, NO_FORWARD[0]).strip().lower() == NO_FORWARD[1]
        if is_to_be_told:
            self._check(headers)
        await self.until_owned(self.loop.time() + OWNER_WAIT_S)
        place = self.place()
        if is_to_be_told:
            raise MisdirectedError(self.shard, place.url)
        if len(self._calls) > self._calls_max:
            raise OverloadedError(f"there are {self._calls_max} calls under way to the owner")

    async def until_owned(self, until_s: float) -> None:
        """Wait for an owner, until then by the loop's time."""
        if self._owner() is not None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                while self._owner() is None and not self.is_closing:
                    await self._changed.wait()

    async def has_moved(self, place: OwnerPlace, until_s: float) -> bool:
        """Wait for another owner than the one there, by the loop's time; whether it came."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                while not self.is_closing and self._owner() in (None, place.url):
                    await self._changed.wait()
        return not self.is_closing and self._owner() not in (None, place.url)

    def owner_changed(self) -> None:
        """Another may be the owner."""
        self._changed.set()
        self._changed = asyncio.Event()

    def place(self) -> OwnerPlace:
        """Where the owner is now. Raises ShardAwayError."""
        url = self._owner()
        if url is None or self.is_closing:
            raise ShardAwayError(self.shard)
        try:
            return place_of(url)
        except ValueError as error:
            log.error("the owner cannot be reached", error=str(error))
            raise ShardAwayError(self.shard) from error

    # ── connections ────────────────────────────────────────────────────────────────────────────

    def idle(self, place: OwnerPlace) -> HttpStream | None:
        """An open connection that nobody uses."""
        if place != self._idle_place:
            self._drop_idle()  # the owner has moved
            self._idle_place = place
        while self._idle:
            stream = self._idle.pop()
            if stream.is_open:
                return stream
        return None

    async def connect(self, place: OwnerPlace) -> HttpStream:
        """A new one. Raises OSError, TimeoutError among them."""
        if not place.is_https and (tunnel := self._tunnel()) is not None:
            through = HttpStream(self.loop)
            try:
                await tunnel(lambda: through)
            except LinkError as error:
                raise ConnectionError(f"no tunnel to the owner: {error}") from error
            return through
        async with asyncio.timeout(CONNECT_S):
            _, stream = await self.loop.create_connection(
                partial(HttpStream, self.loop),
                place.host,
                place.port,
                ssl=self.tls() if place.is_https else None,
            )
        return stream

    def keep(self, stream: HttpStream, place: OwnerPlace) -> None:
        """A connection may be used again."""
        if place == self._idle_place and len(self._idle) < IDLE_MAX and not self.is_closing:
            self._idle.append(stream)
        else:
            stream.abort()

    def _drop_idle(self) -> None:
        for stream in self._idle:
            stream.abort()
        self._idle.clear()

    def _sweep(self) -> None:
        """Give up connections that have been silent or idle for too long."""
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)
        now_s = self.loop.time()
        for call in tuple(self._calls):
            call.check_silence(now_s)
        # Used last, taken first: the oldest stand in front.
        while self._idle and now_s - self._idle[0].active_s >= self._idle_s:
            self._idle.popleft().abort()

    # ── the end ────────────────────────────────────────────────────────────────────────────────

    def give_back(self) -> None:
        """Leave connections without a call under way, now or later, to the next server."""
        self.gives_back = True
        for call in tuple(self._calls):
            call.give_back()

    def give_up(self) -> None:
        """Answer the calls under way without the owner, as far as they are not answered."""
        self.is_closing = True
        self.owner_changed()
        for call in tuple(self._calls):
            call.give_up()

    def close(self) -> None:
        """Close all connections."""
        self.give_up()
        self._sweeper.cancel()
        self._drop_idle()


class _Call:
    """One call on its way."""

    def __init__(self, forwarder: Forwarder, scope: Scope, send: Send) -> None:
        self.has_begun = False
        """Whether the client has a part of the answer."""
        self._forwarder = forwarder
        self._scope = scope
        self._send = send
        self._is_head = scope["method"] == "HEAD"
        self._is_safe = scope["method"] in _SAFE
        self._was_sent = False
        self._stream: HttpStream | None = None
        self._connecting: asyncio.Task[HttpStream] | None = None
        self._end: GoneError | DelayServerError | None = None
        """Why it was ended from this side."""

    @property
    def is_gone(self) -> bool:
        """Whether nobody waits here for its answer any more."""
        return isinstance(self._end, GoneError)

    async def run(self, receive: Receive) -> None:
        """Pass it on, and its answer back. Raises GoneError, DelayServerError."""
        body = CallBody(receive)
        tries = 2 if self._is_safe else 1
        until_s = self._forwarder.loop.time() + OWNER_WAIT_S
        try:
            while True:
                message = await body.receive()
                if message["type"] == "http.disconnect":
                    raise GoneError
                self._check_end()
                # From here on the client is heard leave before anything else happens.
                self._scope[WHEN_GONE](self._leave)
                has_more = message.get("more_body", False)
                place, stream = await self._way(until_s)
                head, is_chunked = self._head(place)
                first = message["body"]
                if is_chunked:
                    first = chunk(first) + (b"" if has_more else LAST_CHUNK)
                try:
                    rest = self._send_rest(stream, body.receive, is_chunked) if has_more else None
                    if await self._exchange(stream, head + first, rest):
                        self._forwarder.keep(stream, place)
                    return
                except OSError as error:
                    if self._end is not None:
                        raise self._end from error
                    if not body.rewind():
                        raise self._lost() from error
                    if self._was_sent:
                        tries -= 1
                        if self.has_begun or not tries:
                            raise self._lost() from error
                        until_s = self._forwarder.loop.time() + OWNER_WAIT_S
                    elif not await self._may_look_again(place, until_s):
                        raise self._lost() from error
        finally:
            self._scope[WHEN_GONE](None)

    async def _may_look_again(self, place: OwnerPlace, until_s: float) -> bool:
        """Whether to look for the owner once more, where the call was not begun: the owner may be
        leaving. Waits a moment for the next one."""
        now_s = self._forwarder.loop.time()
        if self._forwarder.gives_back:
            self.give_back()
        if now_s >= until_s or self._end is not None:
            return False
        await self._forwarder.has_moved(place, min(until_s, now_s + LOOK_AGAIN_S))
        return self._end is None

    async def _way(self, until_s: float) -> tuple[OwnerPlace, HttpStream]:
        """Where the owner is, and a connection. One that cannot be reached may have left, so the
        call waits for the next one, until then by the loop's time. Raises as `_connected`."""
        forwarder = self._forwarder
        while True:
            await forwarder.until_owned(until_s)
            self._check_end()
            place = forwarder.place()
            try:
                return place, await self._connected(place)
            except ShardAwayError:
                has_moved = await forwarder.has_moved(place, until_s)
                self._check_end()
                if not has_moved:
                    raise

    def _check_end(self) -> None:
        """Raises why the call was ended meanwhile."""
        if self._end is not None:
            raise self._end

    async def _connected(self, place: OwnerPlace) -> HttpStream:
        """Raises ShardAwayError, and why the call was ended meanwhile."""
        if (stream := self._forwarder.idle(place)) is not None:
            return stream
        self._connecting = self._forwarder.loop.create_task(self._forwarder.connect(place))
        # A task of its own can be cancelled without this one.
        await asyncio.wait((self._connecting,))
        connecting, self._connecting = self._connecting, None
        if self._end is not None:
            if not connecting.cancelled() and connecting.exception() is None:
                connecting.result().abort()
            raise self._end
        try:
            return connecting.result()
        except OSError as error:
            log.debug("the owner cannot be reached", url=place.url, error=str(error))
            raise ShardAwayError(self._forwarder.shard) from error

    async def _exchange(
        self, stream: HttpStream, data: bytes, rest: Coroutine[Any, Any, None] | None
    ) -> bool:
        """Whether the connection may be used again. Raises OSError. `rest`: sends the part of the
        body that is still to come."""
        sending: asyncio.Task[None] | None = None
        is_kept = False
        self._stream = stream
        try:
            if rest is not None:
                sending = self._forwarder.loop.create_task(rest)  # It begins when this one waits.
            stream.begin(data, is_head=self._is_head)
            self._was_sent = True
            await self._answer(stream, await stream.answered())
            is_kept = (sending is None or sending.done()) and self._end is None and stream.finish()
        finally:
            self._stream = None
            if sending is not None:
                sending.cancel()
            if not is_kept:
                stream.abort()
        return is_kept

    def _head(self, place: OwnerPlace) -> tuple[bytes, bool]:
        """The head as the owner gets it, and whether a body in chunks follows it."""
        scope = self._scope
        headers = scope["headers"]
        target = scope.get("raw_path") or scope["path"].encode()
        if scope["query_string"]:
            target = b"%b?%b" % (target, scope["query_string"])
        lines = [b"%b %b%b HTTP/1.1" % (scope["method"].encode(), place.prefix, target)]
        lines += [b"%b: %b" % field for field in beyond_hop(headers)]
        if not header(headers, b"host"):
            lines.append(b"host: %b" % place.authority)  # HTTP/1.0
        lines.append(b"%b: %b" % FORWARDED)
        is_chunked = bool(header(headers, b"transfer-encoding"))
        if is_chunked:
            lines.append(b"transfer-encoding: chunked")
        head = b"\r\n".join([*lines, b"", b""])
        if head.count(b"\n") != len(lines) + 1 or head.count(b"\r") != len(lines) + 1:
            raise MalformedError("a header of the request has more than one line")
        return head, is_chunked

    async def _send_rest(self, stream: HttpStream, receive: Receive, is_chunked: bool) -> None:
        """Pass the rest of the body on."""
        try:
            has_more = True
            while has_more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise GoneError
                body, has_more = message.get("body", b""), message.get("more_body", False)
                if is_chunked:
                    body = chunk(body) + (b"" if has_more else LAST_CHUNK)
                if body:
                    await stream.write(body)
        except (GoneError, DelayServerError) as error:
            if self._end is None and not self.has_begun:
                self._end = error
            stream.abort()
        except OSError:
            pass  # who waits for the answer is told, too

    async def _answer(self, stream: HttpStream, status: int) -> None:
        """Pass the answer back. Raises OSError."""
        # The time is said by who answers the client.
        fields = [field for field in beyond_hop(stream.headers) if field[0] != b"date"]
        start = {"type": "http.response.start", "status": status, "headers": fields}
        length = header(stream.headers, b"content-length")
        parts: list[bytes] = []
        is_short = length.isdigit() and int(length) <= WHOLE_MAX_BYTES
        if stream.has_ended or is_short:
            while data := await stream.read():
                parts.append(data)
            body = b"".join(parts)
            if status == HTTPStatus.SERVICE_UNAVAILABLE and _NOT_BEGUN in body:
                self._was_sent = False
                raise _NotBegunError("who was asked does not own the shard")
            self.has_begun = True
            await self._send(start)
            await self._send({"type": "http.response.body", "body": body})
            return
        self.has_begun = True
        await self._send(start)
        while data := await stream.read():
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    def _lost(self) -> ShardAwayError:
        is_unknown = self._was_sent and not self._is_safe
        return ShardAwayError(self._forwarder.shard, is_unknown=is_unknown)

    # ── ends from this side ────────────────────────────────────────────────────────────────────

    def _leave(self) -> None:
        """The client is gone."""
        self._stop(GoneError())

    def give_back(self) -> None:
        """Leave it to the next server of this process, if nobody was asked."""
        if not self._was_sent and self._end is None and self._scope[GIVE_BACK]():
            self._stop(GoneError())

    def give_up(self) -> None:
        """This process is not on standby any more."""
        self._stop(self._lost())

    def _stop(self, end: GoneError | DelayServerError) -> None:
        if self._end is None:
            self._end = end
        if self._connecting is not None:
            self._connecting.cancel()
        if self._stream is not None:
            self._stream.abort()

    def check_silence(self, now_s: float) -> None:
        """Give the owner up if it has been silent for too long."""
        stream = self._stream
        if stream is not None and stream.waits_for_other and now_s - stream.active_s >= SILENCE_S:
            stream.abort()


class _NotBegunError(ConnectionError):
    """The process that was asked has done nothing, and says so."""
