"""The sender of webhooks: one POST, to an address that was checked, within a deadline.

The status line decides. The rest of an answer is read only for its beginning, which people look up,
and so that the connection can be used again, up to RESPONSE_BYTES_MAX and the request's deadline; a
receiver that answers 200 and then stalls, resets or streams without end has received the message,
and loses its connection.

`HttpWebhookSender` speaks HTTP/1.1 itself, over the connections that the client library uses too
(`delayserver.http.connection`). That is little code, because a webhook is one POST without
redirects, cookies, proxies or decompression, and it makes the safety of a target plain to see: a
name is resolved here, each address goes through `TargetPolicy.check_address`, and the socket is
opened to that address and no other (Host, SNI and the certificate stay with the name). Everything
that a receiver can make us hold is bounded: bytes, time, addresses, idle connections. The sum over
all receivers is bounded, too: to open a connection, an idle one of any target is closed where
there are `connections_max`. If the machine lacks descriptors nevertheless, that is no failure of
the receiver: the same is tried until there is one.

    name ──► addresses, for ADDRESS_TTL_S; later looked up again while the old ones serve; after
         │   an attempt that failed, looked up again before the next one
         └─► idle connections, newest first, each for IDLE_S (below the 5 s after which common
             servers close theirs, so that a request rarely meets a closing connection)

Cost: 30 µs of the event loop per delivery, signing included: 29,000/s on one core with uvloop, 64
in flight, a receiver on the same machine. Threads: all of it belongs to the event loop; names are
looked up in four threads of its own, so that a slow name server delays only webhooks to names not
yet known.

Measured in the same run and rejected: pyreqwest (21,000/s; an answer of endless `100 Continue`
lines keeps its thread busy long after the request was given up, and every other request then takes
0.4 s), aiohttp (11,000/s).
"""

import asyncio
import socket
import ssl
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial

import structlog

from delayserver.delivery.webhook import (
    WebhookRequest,
    WebhookResponse,
    parse_retry_after_ms,
    request_headers,
)
from delayserver.errors import InputError
from delayserver.http.connecting import connect_to_any, until
from delayserver.http.connection import HttpConnection
from delayserver.records.message import MADE_HEADERS, check_headers
from delayserver.security.targets import Target, TargetPolicy, split_url
from storage.errors import EXHAUSTED

RESPONSE_BYTES_MAX = 64 * 1024
ADDRESS_TTL_S = 30.0
ADDRESSES_MAX = 8
"""For each name."""
IDLE_S = 4.0
IDLE_CONNECTIONS_MAX = 256
"""For each target."""
LOOK_UP_AGAIN_S = 1.0
"""After a failed attempt a name is looked up again before the next one, at most once in this time
…"""
LOOK_UP_WAIT_S = 1.0
"""… and so long the next one waits for the name server."""
EXHAUSTED_WAIT_S = 1.0
RESOLVER_THREADS = 4
URLS_REMEMBERED = 4096
"""How many URLs are remembered as allowed. They stay so, for the policy does not change."""

log = structlog.get_logger()
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host name (and port). Raises OSError."""


class HttpWebhookSender:
    """The sender over HTTP/1.1; one for all subscriptions. How many requests are in flight is the
    caller's business: no more than `connections_max`.

    `answer_kept_max_bytes`: so much of the body of an answer is kept for whoever looks it up.
    `resolve` replaces the system's name look-up, and `tls` its trusted certificates."""

    def __init__(
        self,
        policy: TargetPolicy,
        *,
        connections_max: int,
        answer_kept_max_bytes: int = 0,
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._policy = policy
        self._connections_max = connections_max
        self._answer_kept_max_bytes = answer_kept_max_bytes
        self._in_flight = 0
        self._kept: OrderedDict[HttpConnection, _Route] = OrderedDict()
        """The idle connections of all targets; the one used last is last."""
        self._is_exhausted = False
        self._target = lru_cache(maxsize=URLS_REMEMBERED)(self._check_url)
        self._resolve = resolve or self._resolve_by_system
        self._given_tls = tls
        self._routes: dict[Target, _Route] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    async def send(self, request: WebhookRequest, may_begin: Callable[[], bool]) -> WebhookResponse:
        """One attempt, over a connection that is kept for the target's next one.

        A kept connection that the receiver closes before it has answered a byte is no failure: the
        request is sent once more, over a new one."""
        assert not self._closed
        try:
            target, first_lines = self._target(request.url)
            head = _request_head(request, first_lines)
        except InputError as error:
            return WebhookResponse(None, error=error.detail)
        route = self._route(target)
        failure, is_withheld = None, False
        now_s = asyncio.get_running_loop().time()
        deadline_s = now_s + request.timeout_ms / 1000
        route.users += 1
        self._in_flight += 1
        connection: HttpConnection | None = None
        try:
            if route.is_doubted:
                await self._look_up_doubted(target, route, deadline_s)
            connection = self._idle(target, route, now_s)
            while True:
                is_new = connection is None
                if connection is None:
                    connection, deadline_s = await self._open(target, route, request.timeout_ms)
                is_withheld = not may_begin()
                if is_withheld:
                    break
                try:
                    # As one buffer: the copy costs less than a second system call, or uvloop's
                    # writelines.
                    await connection.exchange(head + request.body, deadline_s)
                    break
                except ConnectionError:
                    if is_new or not connection.is_silent:
                        raise
                    connection.abort()
                    connection = None
        except TimeoutError:
            failure = f"no answer within {request.timeout_ms} ms"
        except OSError as error:
            failure = str(error) or type(error).__name__
        finally:
            route.users -= 1
            self._in_flight -= 1
            if connection is not None:
                self._release(route, connection)
        if is_withheld:
            return WebhookResponse(None, is_withheld=True)
        if connection is None or connection.status is None or connection.status >= 500:
            # It may have moved, or only one of its addresses fails.
            route.is_doubted = not target.is_address
            route.doubted_address = "" if connection is None else connection.address
        if connection is None or connection.status is None:
            return WebhookResponse(None, error=failure)
        is_refused = connection.status >= 300
        retry_after_ms = _retry_after_ms(connection, request.timestamp_s) if is_refused else None
        return WebhookResponse(connection.status, retry_after_ms, body=connection.body)

    async def close(self) -> None:
        """Close the idle connections. Sends are to be finished or cancelled before."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for route in self._routes.values():
            if route.lookup is not None:
                route.lookup.cancel()
            for connection in route.idle:
                connection.abort()
        self._routes.clear()
        self._kept.clear()
        if "_resolver_threads" in self.__dict__:
            self._resolver_threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.sleep(0)  # in which the transports close their sockets

    # Names and addresses

    def _check_url(self, url: str) -> tuple[Target, str]:
        target, path = split_url(url)
        self._policy.check_target(target)
        return target, f"{path} HTTP/1.1\r\nhost: {target.authority}"

    def _route(self, target: Target) -> "_Route":
        route = self._routes.get(target)
        if route is None:
            route = self._routes[target] = _Route()
            if target.is_address:
                route.addresses = (target.host,)  # the name gate has checked it
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(IDLE_S, self._sweep)
        return route

    def _look_up_in_time(self, target: Target, route: "_Route", now_s: float) -> None:
        """Have a name looked up again; the old addresses serve until then."""
        if not target.is_address and now_s >= route.fresh_until_s:
            self._begin_look_up(target, route)

    def _begin_look_up(self, target: Target, route: "_Route") -> "asyncio.Task[None]":
        if route.lookup is None:
            loop = asyncio.get_running_loop()
            route.lookup = loop.create_task(self._look_up(target, route))
        return route.lookup

    async def _look_up_doubted(self, target: Target, route: "_Route", deadline_s: float) -> None:
        """An attempt has failed: look up again where the target is, before it is asked again. A
        name server that takes its time is not waited for: the old addresses serve."""
        now_s = asyncio.get_running_loop().time()
        if now_s < route.looked_up_s + LOOK_UP_AGAIN_S:
            return  # Receivers that always fail cost no more than a look-up in that time.
        lookup = self._begin_look_up(target, route)
        await asyncio.wait((lookup,), timeout=min(LOOK_UP_WAIT_S, deadline_s - now_s))

    async def _addresses(self, route: "_Route") -> tuple[str, ...]:
        """The checked addresses of a target, the one that worked last first. Raises OSError."""
        if not route.addresses and route.lookup is not None:
            # Shared by all who wait, so the deadline of one does not end it.
            await asyncio.shield(route.lookup)
        if not route.addresses:
            raise OSError(route.failure)
        return route.addresses

    async def _look_up(self, target: Target, route: "_Route") -> None:
        refusal = f"{target.host} has no address"
        allowed: list[str] = []
        try:
            for address in dict.fromkeys(await self._resolve(target.host, target.port)):
                try:
                    self._policy.check_address(target.host, target.port, address)
                    allowed.append(address)
                except InputError as error:
                    refusal = error.detail
        except OSError as error:
            # A name server that is down does not stop deliveries to a name that was known.
            route.failure = f"cannot resolve {target.host}: {error}"
        else:
            # An address that is still in use stays the first: connections to it are open.
            known = route.addresses[:1]
            allowed.sort(key=lambda one: (one == route.doubted_address, one not in known))
            route.addresses = tuple(allowed[:ADDRESSES_MAX])
            route.failure = refusal
            route.is_doubted, route.doubted_address = False, ""
        finally:
            route.lookup = None
        now_s = route.looked_up_s = asyncio.get_running_loop().time()
        if route.addresses:
            route.fresh_until_s = now_s + ADDRESS_TTL_S

    async def _resolve_by_system(self, host: str, port: int) -> Sequence[str]:
        lookup = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._resolver_threads, lookup)
        return [str(address[0]) for *_, address in found]

    @cached_property
    def _resolver_threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="resolver")

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        # Reading the system's certificates takes 20 ms: only where there is an https target.
        return self._given_tls or ssl.create_default_context()

    # Connections

    def _idle(self, target: Target, route: "_Route", now_s: float) -> HttpConnection | None:
        """An open connection to a checked address that no request uses."""
        self._look_up_in_time(target, route, now_s)
        while route.idle and route.addresses:
            connection = route.idle.pop()
            del self._kept[connection]
            fresh = now_s - connection.idle_since_s < IDLE_S
            if fresh and connection.is_open and connection.address in route.addresses:
                return connection
            connection.abort()
        return None

    async def _open(
        self, target: Target, route: "_Route", timeout_ms: int
    ) -> tuple[HttpConnection, float]:
        """A new connection, and the deadline of the request. Raises OSError."""
        loop = asyncio.get_running_loop()
        if self._in_flight + len(self._kept) > self._connections_max and self._kept:
            longest_idle, its_route = self._kept.popitem(last=False)
            its_route.idle.remove(longest_idle)
            longest_idle.abort()
            await asyncio.sleep(0)  # in which its transport closes its socket
        while True:
            deadline_s = loop.time() + timeout_ms / 1000
            try:
                async with until(deadline_s):
                    connection = await self._connect(target, route)
                self._is_exhausted = False
                return connection, deadline_s
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
                if not self._is_exhausted:
                    log.error("webhooks wait for a socket", error=str(error))
                self._is_exhausted = True
            await asyncio.sleep(EXHAUSTED_WAIT_S)

    async def _connect(self, target: Target, route: "_Route") -> HttpConnection:
        """A new connection to a checked address. Raises OSError."""
        addresses = await self._addresses(route)
        # Nothing was sent yet, so to try another address repeats nothing.
        address, connection = await connect_to_any(
            addresses, partial(self._connect_to, target), HttpConnection.abort
        )
        connection.address = address
        index = addresses.index(address)
        if index and route.addresses == addresses:
            route.addresses = (*addresses[index:], *addresses[:index])
        return connection

    async def _connect_to(self, target: Target, address: str) -> HttpConnection:
        loop = asyncio.get_running_loop()
        tls = self._tls if target.scheme == "https" else None
        new_connection = partial(
            HttpConnection,
            loop,
            answer_bytes_max=RESPONSE_BYTES_MAX,
            body_bytes_max=self._answer_kept_max_bytes,
        )
        _, connection = await loop.create_connection(
            new_connection,
            address,
            target.port,
            ssl=tls,
            server_hostname=target.host if tls else None,
        )
        return connection

    def _release(self, route: "_Route", connection: HttpConnection) -> None:
        if connection.is_reusable and len(route.idle) < IDLE_CONNECTIONS_MAX and not self._closed:
            connection.idle_since_s = asyncio.get_running_loop().time()
            route.idle.append(connection)
            self._kept[connection] = route
        else:
            connection.abort()

    def _sweep(self) -> None:
        """Close what has been idle for long, and forget the targets that are not used any more."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for target, route in list(self._routes.items()):
            while route.idle and now_s - route.idle[0].idle_since_s >= IDLE_S:
                connection = route.idle.popleft()
                del self._kept[connection]
                connection.abort()
            if not (route.users or route.idle or route.lookup) and now_s >= route.fresh_until_s:
                del self._routes[target]
        self._sweeper = loop.call_later(IDLE_S, self._sweep) if self._routes else None


@dataclass(slots=True)
class _Route:
    """The server's knowledge of one target."""

    addresses: tuple[str, ...] = ()
    """Checked; the one to try first is first."""
    failure: str = ""
    """Why there are none."""
    fresh_until_s: float = 0.0
    lookup: asyncio.Task[None] | None = None
    looked_up_s: float = 0.0
    is_doubted: bool = False
    """An attempt has failed since it was looked up where the target is."""
    doubted_address: str = ""
    """Where that attempt went."""
    users: int = 0
    """Sends under way."""
    idle: deque[HttpConnection] = field(default_factory=deque)
    """The one used last is last."""


def _request_head(request: WebhookRequest, first_lines: str) -> bytes:
    """`first_lines`: the request line and that of the host, without the method."""
    # Headers were checked when they were published, yet a bulk load may have written them.
    if request.headers:
        check_headers(request.headers, MADE_HEADERS)
    lines = [
        f"{request.method} {first_lines}",
        f"content-length: {len(request.body)}",
        *map(": ".join, request_headers(request).items()),
    ]
    text = "\r\n".join(lines) + "\r\n\r\n"
    breaks = len(lines) + 2
    if text.count("\r") != breaks or text.count("\n") != breaks:
        raise InputError("a header holds a line break")
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise InputError("a header holds other characters than Latin-1") from None


def _retry_after_ms(connection: HttpConnection, now_s: int) -> int | None:
    """How long an answer asks to be left alone; None: it does not say."""
    retry_after_ms = None
    for name, value in connection.headers:
        if name.lower() == b"retry-after":
            retry_after_ms = parse_retry_after_ms(value.decode("latin-1"), now_s)
    return retry_after_ms
