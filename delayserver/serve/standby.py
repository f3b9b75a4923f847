"""A process on standby, as clients see it: it has no server, and answers all calls nevertheless.
So is one of a node that has no replica of the shard.

    connections ──▶ Acceptor ──▶ uvicorn's protocol with our limits
                                   ├─▶ /healthz, /readyz, /v1/cluster, /metrics ──▶ answered here
                                   └─▶ everything else ──▶ Forwarder ──▶ the owner of the shard

A client has the same limits as at an owner: connections, heads, bodies, times
(`delayserver.api.hot.connection`). A call that is answered here needs the same tokens as there; a
call that is passed on is checked by the owner.

It listens with sockets of its own that share the port with those it was given, so these stay open:
when this process has become the owner, its server goes on with them. `close` ends in order: nothing
more is accepted, and who connects meanwhile waits in the system's queue for the server. Idle
connections, and those whose call nobody was asked yet, wait for it, too (`delayserver.api.moving`);
without a server to come they are closed. A call to an owner has GRACE_S to be answered, and is
told then that its outcome is unknown. When `close` returns, no connection is left.

An owner by HTTPS is verified with the system's authorities (`SSL_CERT_FILE` names others), and with
`tls_client_ca` where that is set: then it asks who calls, too, and is shown this node's own
certificate, `tls_cert`, which has to be good for clients as well as for servers.

Cost: 125 to 165 µs of CPU in this process for a publish that is passed on, its start included. With
64 connections that was 0.17 to 0.42 of the owner's own rate (two runs by turns, on two cores that
owner, standby, client and others shared). Clients that know the map ask the owner. A call under way
has two descriptors. Threads: belongs to the event loop.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from email.utils import formatdate
from functools import partial
from typing import Final

import uvicorn
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from uvicorn.server import ServerState

from delayserver.api.access import Access
from delayserver.api.documents import encode
from delayserver.api.finish import Finish
from delayserver.api.hot.answers import Always, Answer, header, problem_answer
from delayserver.api.hot.asgi import Asgi, Receive, Scope, Send, send_answer
from delayserver.api.hot.connection import Connection
from delayserver.api.hot.paths import ALIVE_PATH, CLUSTER_PATH, READY_PATH
from delayserver.api.hot.protocol import make_passing_protocol
from delayserver.api.map_call import ShardMap, answer_map, read_query
from delayserver.api.moving import Moving
from delayserver.api.scopes import RULES
from delayserver.cluster.forwarding import Forwarder, Tunnel
from delayserver.config import Settings
from delayserver.errors import DelayServerError, StandbyError
from delayserver.security.tokens import TokenTable
from delayserver.serve.acceptor import Acceptor
from delayserver.serve.app import with_cors
from delayserver.serve.certificates import Certificates
from delayserver.wire.operations import HealthDocument

METRICS_PATH: Final = "/metrics"
OWN_PATHS: Final = frozenset({ALIVE_PATH, READY_PATH, CLUSTER_PATH, METRICS_PATH})
GRACE_S: Final = 1.0
"""A call under way may take so long to be answered by the owner, …"""
FLUSH_S: Final = 0.25
"""… and a client so long to take the answer to a call that was given up."""
_DATE_S: Final = 1.0


class StandbyFront:
    """Answers at the addresses of a node, from `begin` to `close`, once."""

    def __init__(
        self,
        settings: Settings,
        *,
        shard: int,
        owner: Callable[[], str | None],
        is_ready: Callable[[], bool],
        has_replica: Callable[[], bool] = lambda: True,
        shard_map: ShardMap,
        metrics: Callable[[], str],
        tokens: TokenTable,
        clock: Callable[[], int],
        before: Callable[[Asgi], Asgi] = lambda app: app,
        tunnel: Callable[[], Tunnel | None] = lambda: None,
    ) -> None:
        """`owner`: URL of the shard's owner, None while none is known. `is_ready`: whether
        the log that it follows has been caught up with. `has_replica`: whether it is one that can
        own the shard; else it only passes calls on. `metrics`: all of them, as Prometheus reads
        them. `before` puts something in front of all calls. `tunnel`: see `Forwarder`.
        `tokens`: those of the node, which another part refreshes. `clock`: milliseconds since the
        epoch."""
        self.answers: Counter[bytes] = Counter()
        """Calls that were answered, by status."""
        self._settings = settings
        self._number = shard
        self._owner = owner
        self._is_ready = is_ready
        self._has_replica = has_replica
        self._map = shard_map
        self._metrics = metrics
        self._clock = clock
        self._before = before
        self._tunnel = tunnel
        origins = settings.cors_origins
        self._access = Access(
            tokens,
            Finish(self._answer),
            headers_max=settings.headers_max,
            head_max_bytes=settings.head_max_bytes,
            origins=origins,
            answers=self.answers,
        )
        self._own = with_cors(self._access, origins) if origins else self._access
        self._polls: set[Callable[[], object]] = set()
        """Functions that end the long polls of the map."""
        self._state = ServerState()
        self._forwarder: Forwarder
        self._acceptor: Acceptor
        self._protocol: type[Connection]
        self._date: asyncio.TimerHandle | None = None

    async def begin(
        self,
        listeners: Sequence[socket.socket],
        certificates: Certificates,
        moved: Sequence[tuple[socket.socket, bytes]] = (),
    ) -> None:
        """Answer clients that connect to these, which listen already. `moved`: connections of the
        server before."""
        settings = self._settings
        self._forwarder = Forwarder(
            self._number,
            self._owner,
            settings,
            lambda: certificates.for_owners,
            self.answers,
            self._access.check,
            self._tunnel,
        )
        config = uvicorn.Config(
            self._before(self),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
        )
        config.load()
        self._protocol = make_passing_protocol(self._access, settings)
        make_protocol = partial(
            self._protocol,
            config=config,
            server_state=self._state,
            app_state={},
        )
        self._set_date()
        shared = [listener.dup() for listener in listeners]
        self._acceptor = Acceptor(shared, make_protocol, settings, certificates)
        self._acceptor.begin(moved)

    async def close(self, moving: Moving | None = None) -> None:
        """End in order, in GRACE_S and FLUSH_S at the longest. Once more it does nothing. `moving`:
        where the server of this process finds connections; None: there is to be none."""
        if self._date is None:
            return
        self._date.cancel()
        self._date = None
        self._protocol.moving = moving
        self._acceptor.close()
        if moving is not None:
            self._forwarder.give_back()
        for connection in tuple(self._state.connections):
            connection.shutdown()
        for end in tuple(self._polls):
            end()
        empty = asyncio.ensure_future(self._empty())
        await asyncio.wait((empty,), timeout=GRACE_S)
        self._forwarder.give_up()
        await asyncio.wait((empty,), timeout=FLUSH_S)
        for connection in tuple(self._state.connections):
            connection.transport.abort()
        await empty
        self._forwarder.close()

    async def _empty(self) -> None:
        await self._acceptor.wait_closed()
        await self._acceptor.wait_empty()

    def owner_changed(self) -> None:
        """Another may be the owner: calls that wait for one look again."""
        self._forwarder.owner_changed()

    @property
    def connections(self) -> int:
        """Connections of clients that are open, or being opened."""
        return self._acceptor.count

    @property
    def forwarded(self) -> int:
        """Calls that the owner is being asked."""
        return self._forwarder.count

    def _set_date(self) -> None:
        """All answers say when they were given (RFC 9110, 6.6.1)."""
        self._date = asyncio.get_running_loop().call_later(_DATE_S, self._set_date)
        date = formatdate(self._clock() / 1000, usegmt=True).encode()
        self._state.default_headers = [(b"date", date)]
        Always.set(self._state.default_headers)

    # ── calls ──────────────────────────────────────────────────────────────────────────────────

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_own = scope["path"] in OWN_PATHS and scope["method"] in ("GET", "HEAD")
        await (self._own if is_own else self._forwarder)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A call that is answered here, once it is known who calls."""
        try:
            if (caller := scope.get("caller")) is not None:
                rule = RULES[scope["method"], scope["path"]]
                if rule.actions:
                    caller.require(rule.actions)
            match scope["path"]:
                case path if path == ALIVE_PATH:
                    answer = Answer(200, encode(HealthDocument("ok")))
                case path if path == READY_PATH:
                    answer = self._readiness()
                case path if path == CLUSTER_PATH:
                    answer = await self._map_answer(scope)
                case _:
                    content_type = CONTENT_TYPE_LATEST.encode()
                    answer = Answer(200, self._metrics().encode(), content_type=content_type)
        except DelayServerError as error:
            answer = problem_answer(error)
        await send_answer(send, answer)

    def _readiness(self) -> Answer:
        """Ready: a process that can have calls answered, here or by the owner, accepts them."""
        has_replica = self._has_replica()
        what = "on standby for" if has_replica else "passing on calls to"
        on_standby = f"{what} shard {self._number}"
        if self._owner() is None:
            # Anybody may ask this: who it is stands in the map, for those who have a token.
            raise StandbyError(f"{on_standby}, and no owner of it is known")
        if not self._is_ready():
            raise StandbyError(f"{on_standby}, and has not caught up with its owner")
        return Answer(200, encode(HealthDocument("standby" if has_replica else "passing on")))

    async def _map_answer(self, scope: Scope) -> Answer:
        headers = scope["headers"]
        after, wait = read_query(scope["query_string"])
        known = header(headers, b"if-none-match").decode("latin-1")
        ends: list[Callable[[], object]] = []

        def on_wait(end: Callable[[], object]) -> None:
            ends.append(end)
            self._polls.add(end)

        try:
            return await answer_map(
                self._map,
                scope,
                host=header(headers, b"host").decode("latin-1"),
                after=after,
                wait=wait,
                if_none_match=known or None,
                on_wait=on_wait,
            )
        finally:
            self._polls.difference_update(ends)
