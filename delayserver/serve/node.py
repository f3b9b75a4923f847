"""A process of a node for one shard: on standby until it holds the office, then its server.

    follow (a thread) ──▶ Standby.step, step, … ──▶ Holder ──▶ beats (a thread)
         │ who owns the shard                          └──▶ the server, in this very process
         ▼                                                    │ somebody else is to have it
    book ──▶ front: answers, or passes on to the owner ◀──────┘

Whoever gives the office away in order is on standby again, in the same process: its socket never
stops listening. Whoever may have lost it ends at once, with a status that says "start me again"
(75): a new process follows the log, whoever owns it then.

What is in the directory, and how it gets there, is the business of `keeping`; where nothing is to
be there the process passes calls on all the time. All the time a thread reports how far the
replica is (`reports`).

Cost: that of its parts. Threads: the event loop, and those of the beats, of `follow` and of
`reports`.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec
import structlog

import delayserver.api.cluster.reports  # noqa: F401  # scripts set constants by this name
from delayserver.api.hot.asgi import Asgi
from delayserver.api.moving import Moving
from delayserver.clocks import stopwatch_ms, wall_clock_ms
from delayserver.cluster.copying import HttpPeer
from delayserver.cluster.follow import Follow
from delayserver.cluster.forwarding import Tunnel
from delayserver.cluster.joining import open_engine
from delayserver.cluster.keeping import ReplicaKeeper
from delayserver.cluster.membership import Address, Lines, Membership, entry_of
from delayserver.cluster.proofs import Proofs
from delayserver.cluster.reports import HowFar, Reports
from delayserver.cluster.sharing import Sharing, Take, Taken
from delayserver.cluster.watch import News, choose
from delayserver.config import Settings
from delayserver.errors import AccessError
from delayserver.recovery.replica import Replica, ReplicaPlace
from delayserver.recovery.standby import LAG_MAX_MS
from delayserver.recovery.store import Surroundings
from delayserver.security.tokens import TokenFile, TokenTable
from delayserver.serve.certificates import Certificates
from delayserver.serve.standby import StandbyFront
from delayserver.server.metrics import Metrics
from delayserver.server.server import open_catalog_in
from delayserver.shards.book import Entry, OwnerBook, encode_line
from delayserver.shards.exposition import Figure, standby_metrics
from delayserver.shards.map import ClusterMap
from delayserver.shards.meeting import BACKLOG as LINK_BACKLOG
from delayserver.shards.meeting import TcpMeeting
from delayserver.shards.place import ShardPlace
from storage.errors import NoPeerError
from storage.files import OsFiles
from storage.replicated.envelope import NOBODY
from storage.replicated.holder import Holder
from storage.replicated.log import FollowedLog
from storage.write_ahead_log import WriteAheadLog

BEATS_LOOK_S: Final = 0.05
CAUGHT_UP_RECORDS: Final = 10_000
"""A standby that is not further behind can take over soon."""
TOKENS_S: Final = 1.0
STEADY_MS: Final = 60_000
"""An owner gives its shard to one that goes before it, but not sooner than this after its claim."""

log = structlog.get_logger()
Fatal = Callable[[BaseException], None]


class Beats(threading.Thread):
    """Has an owner be heard of."""

    def __init__(self, holder: Holder, fatal: Fatal) -> None:
        super().__init__(name="delayserver-beats", daemon=True)
        self._holder = holder
        self._fatal = fatal
        self._ending = threading.Event()

    def run(self) -> None:
        try:
            while not self._ending.wait(BEATS_LOOK_S):
                self._holder.beat()
        except BaseException as error:
            self._fatal(error)

    def end(self) -> None:
        """No beat comes behind this."""
        self._ending.set()
        self.join()


class Awaited:
    """What a standby waits for: the office, or that it is told to stop; the other one may come as
    well, as long as it is not a server."""

    def __init__(self) -> None:
        self.holder: Holder | None = None
        self.is_stopping = False
        self._event = asyncio.Event()

    def came(self, holder: Holder) -> None:
        """The office is held."""
        self.holder = holder
        self._event.set()

    def stop(self) -> None:
        """It is told to stop."""
        self.is_stopping = True
        self._event.set()

    async def wait(self) -> None:
        """Until one of the two is so."""
        await self._event.wait()


class NodeShard:
    """The process, as a member of its cluster."""

    def __init__(
        self,
        settings: Settings,
        place: ShardPlace,
        membership: Membership,
        rest: bytes,
        certificates: Certificates,
        *,
        figures: Sequence[Figure],
        tell: Callable[[bytes], None],
        fatal: Fatal,
    ) -> None:
        """`rest`: what the supervisor has said behind the membership; `tell`: gives it a line;
        `figures`: what its process counts.

        Raises StorageError, DelayServerError, OSError."""
        assert settings.advertise is not None
        self._settings = settings
        self._place = place
        self._membership = membership
        self._tell = tell
        self._fatal = fatal
        self._brokers = open_engine(settings)
        self.book = OwnerBook(place.count)
        self.lines = Lines(0, rest, self.book)
        self.meeting: TcpMeeting
        self.holder: Holder | None = None
        self._beats: Beats
        self._address = ""
        self._replica: Replica
        identity = membership.identity
        self._proofs = Proofs(bytes.fromhex(identity.link_secret), identity.cluster)
        self._certificates = certificates
        self._figures = figures
        self._own_url = ""
        self._reports = Reports(
            self._brokers,
            place.shard,
            membership.node,
            settings.advertise,
            self.lines,
            clock=wall_clock_ms,
            stopwatch=stopwatch_ms,
        )
        self._reports.start()
        self._keeper = ReplicaKeeper(
            settings,
            place.shard,
            membership,
            self._brokers,
            self.lines,
            self._reports,
            self._make_peer,
            open_catalog=lambda: open_catalog_in(OsFiles(str(settings.data_dir)), settings),
            stopwatch=stopwatch_ms,
        )

    # ── on standby ─────────────────────────────────────────────────────────────────────────────

    def _prepare(self, listeners: Sequence[socket.socket]) -> None:
        settings, shard, engine = self._settings, self._place.shard, self._brokers
        self._own_url, host = self._own_urls(listeners)
        port = settings.link_port and settings.link_port + shard
        link = _bind(settings.host, port)
        identity = self._membership.identity
        secret = bytes.fromhex(identity.link_secret)
        self.meeting = TcpMeeting(link, self.book, secret, identity.cluster)
        own_link = f"{host}:{link.getsockname()[1]}"
        # From a claim on others come: they wait until this process serves.
        link.listen(LINK_BACKLOG)
        address = Address(self._membership.node, self._own_url, own_link, tunnels=True)
        self._address = address.pack()
        offset_ms = settings.clock_offset_ms
        place = ReplicaPlace(
            self._membership.number,
            self._keeper.placement.rank(shard, self._membership.node),
            self._membership.of_shard(shard),
            identity.durability == "fsync",
            self._address,
            partial(engine.log, shard),
            partial(engine.settled, shard),
            partial(engine.transactions, shard),
            self._keeper.adoptions,
        )
        surroundings = Surroundings(
            clock=lambda: wall_clock_ms() + offset_ms,
            stopwatch=stopwatch_ms,
            monotonic=time.monotonic,
            random_bytes=os.urandom,
            random=random.random,
            shard=shard,
        )
        self._replica = Replica(place, surroundings, settings)
        self._keeper.begin(self._replica, self._own_url, self._owner_url)

    def _make_peer(self, url: str) -> HttpPeer:
        return HttpPeer(
            url, self._place.shard, self._proofs, self._certificates.for_owners, wall_clock_ms
        )

    def sharing(self, want: Callable[[Take, Taken], None]) -> Callable[[Asgi], Asgi]:
        """What gives copies to other nodes, before an application. `want` has the thread that files
        take a snapshot."""
        shard, proofs = self._place.shard, self._proofs
        return lambda app: Sharing(app, shard, proofs, self._keeper.snapshots, want, wall_clock_ms)

    async def stand_by(
        self,
        listeners: Sequence[socket.socket],
        on_open: Callable[[], None],
        moving: Moving,
    ) -> Holder | None:
        """Follow, and answer at `listeners`, which listen already, until this node holds the
        office; None: it was told to stop. `on_open` is called once it can follow. `moving`: where
        the connections of clients are before it, and behind it if the office is held.

        Raises StorageError, AccessError."""
        settings, loop, lines = self._settings, asyncio.get_running_loop(), self.lines
        # What listened to the last one has ended.
        self.book = lines.book = self.book.renewed()
        tokens = self._open_tokens()
        self._prepare(listeners)
        opened = await asyncio.to_thread(self._keeper.open_sound)
        on_open()
        office = Awaited()
        ended = asyncio.Event()

        def tell_owner(epoch: int, address: str) -> None:
            entry = entry_of(self._place.shard, epoch, address)
            loop.call_soon_threadsafe(self._on_owner, entry)

        def on_claimed(holder: Holder) -> None:
            # From here on the office is held, whatever the event loop is busy with.
            self._beats = Beats(holder, self._fatal)
            self._beats.start()
            loop.call_soon_threadsafe(office.came, holder)

        def on_end() -> None:
            with contextlib.suppress(RuntimeError):  # The loop is closed already.
                loop.call_soon_threadsafe(ended.set)

        def on_news() -> None:
            if (standby := follow.standby) is not None:
                self._keeper.instruct(standby)
            if (owner := lines.news.owners.get(self._place.shard)) is not None:
                self._on_owner(entry_of(self._place.shard, *owner))
            cluster_map.changed()

        def is_ready() -> bool:
            if (onlooker := follow.onlooker) is not None:
                return onlooker.is_there
            standby = follow.standby
            if standby is None or standby.lag_ms > LAG_MAX_MS:
                return False
            return (standby.lag_records or 0) <= CAUGHT_UP_RECORDS

        def want(take: Take, told: Taken) -> None:
            standby = follow.standby
            if standby is None:
                told(None, NoPeerError(self._place.shard, []))
            else:
                standby.want_snapshot(take, told)

        follow = Follow(opened, self._keeper, tell_owner, on_claimed, on_end, self._fatal)
        cluster_map = ClusterMap(
            None, settings, wall_clock_ms, lambda: lines.news.machines, self.book
        )
        # A call that is passed on has a second descriptor, and the budget has one for each client.
        clients_max = max(1, settings.connections_max // 2)
        front = StandbyFront(
            settings.model_copy(update={"connections_max": clients_max}),
            shard=self._place.shard,
            owner=self._owner_url,
            has_replica=lambda: follow.onlooker is None,
            is_ready=is_ready,
            shard_map=cluster_map,
            metrics=lambda: self._metrics(follow),
            tokens=tokens,
            clock=wall_clock_ms,
            before=self.sharing(want),
            tunnel=self._tunnel,
        )
        on_news()
        lines.begin(office.stop, on_news)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, office.stop)
        refreshing = loop.create_task(_refresh(tokens))
        follow.start()
        await front.begin(listeners, self._certificates, moving.take())
        self.book.on_change(lambda shard: front.owner_changed())
        if opened is not None or self._keeper.is_placed:
            log.info("on standby", shard=self._place.shard, node=self._membership.node)
        try:
            await office.wait()
            if office.is_stopping:
                follow.end()
            await front.close(None if office.is_stopping else moving)
            await ended.wait()
            self.holder = office.holder
            if self.holder is not None and office.is_stopping:
                # It claimed meanwhile, and there was no server yet that would have heard it.
                await asyncio.to_thread(self.leave, None)
        finally:
            refreshing.cancel()
            lines.end()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return self.holder

    def _open_tokens(self) -> TokenTable:
        settings, directory = self._settings, self._place.data_dir
        tokens = TokenTable(TokenFile(OsFiles(str(directory))), settings.token, time.monotonic)
        tokens.refresh(wall_clock_ms())
        if not settings.on_loopback and not len(tokens):
            raise AccessError(
                f"{settings.host} is not a loopback address: make a token (delayserver token "
                f"create NAME --scope admin --data-dir {directory}), or set one "
                "(DELAYSERVER_TOKEN, at least 16 characters), before others can reach the node"
            )
        return tokens

    def _own_urls(self, listeners: Sequence[socket.socket]) -> tuple[str, str]:
        """Where clients reach this very process, and the host of its links."""
        advertise = self._settings.advertise
        assert advertise is not None
        scheme, _, authority = advertise.partition("://")
        host, colon, port = authority.rpartition(":")
        if not colon or not port.isdigit():
            host = authority
        if self._place.count == 1:
            return advertise, host
        return f"{scheme}://{host}:{listeners[-1].getsockname()[1]}", host

    def _owner_url(self) -> str | None:
        owner = self.book.owner(self._place.shard)
        # An office that this node has held before it was started again is nobody's now.
        return None if owner is None or owner.url == self._own_url else owner.url

    def _tunnel(self) -> Tunnel | None:
        owner = self.book.owner(self._place.shard)
        if owner is None or not owner.tunnels:
            return None
        return partial(self.meeting.tunnel, self._place.shard)

    def _on_owner(self, entry: Entry) -> None:
        if self.book.take(entry):
            self._tell(encode_line(entry))

    def _metrics(self, follow: Follow) -> str:
        standby = follow.standby
        return standby_metrics(
            self._place.shard,
            lag_records=None if standby is None else standby.lag_records,
            lag_s=None if standby is None else standby.lag_ms / 1000,
            unseen_nodes=self._unseen_nodes(),
            clock_differs=standby is not None and standby.clock_differs,
            has_replica=follow.onlooker is None,
            besides=[(name, text, value()) for name, text, value in self._figures],
        )

    def _unseen_nodes(self) -> int:
        return len(self.lines.news.unseen.get(self._membership.node, ()))

    # ── in office ──────────────────────────────────────────────────────────────────────────────

    @property
    def epoch(self) -> int:
        """In which this node holds the office."""
        assert self.holder is not None
        return self.holder.claimed.epoch

    def around(self, surroundings: Surroundings) -> Surroundings:
        """The surroundings of the server, once this node holds the office."""
        assert self.holder is not None
        owned = self._replica.owned_by(self.holder)
        return replace(
            surroundings,
            clock=owned.clock,
            identity=owned.identity,
            message_log=owned.message_log,
            settler=owned.settler,
            leases=owned.leases,
            may_deliver=owned.may_deliver,
            transactions=owned.transactions,
        )

    def serving(self, message_log: WriteAheadLog, metrics: Metrics) -> None:
        """This process serves the shard from now on, with that log; `metrics` are its own."""
        holder = self.holder
        assert holder is not None and isinstance(message_log, FollowedLog)
        self._taken_ms = stopwatch_ms()
        self._on_owner(entry_of(self._place.shard, self.epoch, self._address))
        self._reports.how_far = lambda: HowFar(message_log.kept, holder.state.next_offset)
        self._reports.office, self._reports.stage = (self.epoch, self._address), "replica"
        metrics.gauge(
            "office_epoch", "Which owner of its shard this process is", lambda: self.epoch
        )
        metrics.gauge(
            "office_lease", "Whether deliveries may leave", lambda: int(holder.may_deliver())
        )
        metrics.gauge(
            "office_unread_records",
            "Records of the log that a new owner would read, beats among them",
            lambda: holder.state.next_offset - message_log.kept[0],
        )
        metrics.gauge(
            "unseen_nodes", "Other nodes that cannot be reached from this one", self._unseen_nodes
        )

    def successor(self, *, is_damaged: bool = False, is_slow: bool = False) -> str | None:
        """The node that is to have the shard now instead of this one, if any. `is_damaged`: here is
        something that another replica has sound; this one is made anew behind the office.
        `is_slow`: the disk here does not keep up."""
        self._keeper.is_damaged |= is_damaged
        news, own = self.lines.news, self._membership.node
        return choose(
            replace_drained(news, own) if self._keeper.is_damaged or is_slow else news,
            self._place.shard,
            self._membership.node,
            self.epoch,
            may_balance=stopwatch_ms() - self._taken_ms >= STEADY_MS,
        )

    def leave(self, successor: str | None) -> None:
        """Give the office away: nothing is to be delivered or settled any more. `successor`: the
        node that is to have it; None: any that is in step."""
        assert self.holder is not None
        self._beats.end()
        news, shard, own = self.lines.news, self._place.shard, self._membership.node
        if successor is None:
            drained = replace_drained(news, own)
            successor = choose(drained, shard, own, 0, may_balance=False)
        number = NOBODY if successor not in news.nodes else news.nodes.index(successor) + 1
        self.holder.leave(number)
        self.holder.log.close()
        self._reports.office = (0, "")
        entry = entry_of(shard, self.epoch, "")
        self.holder = None
        self._on_owner(entry)

    def close(self) -> None:
        """Let go of what is left."""
        self._reports.end()


def replace_drained(news: News, node: str) -> News:
    """The same, and the node is to own nothing."""
    return msgspec.structs.replace(news, drained=[*news.drained, node])


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(
            f"cannot listen for other nodes on {host}:{port}: {error.strerror}; choose another "
            "--link-port"
        ) from error
    listener.set_inheritable(False)
    return listener


async def _refresh(tokens: TokenTable) -> None:
    while True:
        await asyncio.sleep(TOKENS_S)
        with contextlib.suppress(OSError):
            tokens.refresh(wall_clock_ms())
